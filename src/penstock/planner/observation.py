"""Observation of the planner: traffic, pools and engines at one moment, and what could not be read.

Sums, not means, so that observations add up to windows of any length. A value that can't be read is None, never 0.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from penstock.kernel.latency_bins import Bins, join
from penstock.kernel.values import Pool, RequestShape, Role, StepStats, WorkerId

Health = Literal["fresh", "stale", "broken"]
"""State of a source: read just now; read a while ago; not readable."""
BROKEN_AFTER = 60.0
"""Seconds without a reading after which a source is broken: a restart of a frontend or of a Prometheus takes less."""


class Traffic(msgspec.Struct, kw_only=True):
    """One model's requests in ``seconds``. Counts of requests and tokens; latencies in seconds.

    Only `penstock.planner.sizing.request_counts.RequestCounts` changes one, before anyone else has it.

    Demand counts at arrival: ``arrived`` and ``prompt_tokens`` are of requests that arrived in the window, all others
    are of those that ended in it. A source that counts at the end only (``at_end``) puts the same numbers in both.

    Args:
        prompts: prompt tokens of those that arrived, in the bins of `penstock.planner.sizing.workload_mix`.
        shapes: joint bins of prompt, output and share of cache, of those that were answered.
        classes: answers by the class that their requests named.
        judged, in_slo: requests of which it is known whether they kept the service level, and those that did.
        lost: failed, refused and expired.
        cache_reported_tokens: prompt tokens of answers that report their cached tokens: ``cached_tokens`` of these.
        ttft, itl: each answer's, in `penstock.kernel.latency_bins`; empty where the source knows only sums.
        accept_length: tokens per speculated step; None without speculation.
    """

    seconds: float
    arrived: int
    prompt_tokens: int
    answered: int = 0
    answered_prompt_tokens: int = 0
    output_tokens: int = 0
    lost: int = 0
    judged: int = 0
    in_slo: int = 0
    cached_tokens: int = 0
    cache_reported_tokens: int = 0
    ttft_sum: float = 0.0
    ttft_count: int = 0
    itl_sum: float = 0.0
    itl_count: int = 0
    duration_sum: float = 0.0
    ttft: Bins = {}
    itl: Bins = {}
    prompts: Bins = {}
    shapes: Bins = {}
    classes: dict[str, int] = {}
    accept_length: float | None = None
    at_end: bool = False

    def __add__(self, later: "Traffic") -> "Traffic":
        """Return both windows as one; ``accept_length`` is the later one's, where it has one."""
        added: dict[str, object] = {}
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(later, name)
            if name == "accept_length":
                added[name] = mine if theirs is None else theirs
            elif name == "at_end":
                added[name] = mine or theirs
            elif isinstance(mine, dict):
                both = dict(mine)
                join(both, theirs)
                added[name] = both
            else:
                added[name] = mine + theirs
        return Traffic(**added)  # type: ignore[arg-type]

    @property
    def rate(self) -> float:
        """Requests per second that arrived."""
        return self.arrived / self.seconds if self.seconds else 0.0

    @property
    def shape(self) -> RequestShape[float | None]:
        """Mean request: prompt of those that arrived, output of those that were answered, token-weighted share of cache
        of the answers that report it."""
        return RequestShape(
            isl=self.prompt_tokens / self.arrived if self.arrived else None,
            osl=self.output_tokens / self.answered if self.answered else None,
            hit_rate=self.cached_tokens / self.cache_reported_tokens if self.cache_reported_tokens else None,
            accept_length=self.accept_length,
        )

    @property
    def ttft_mean(self) -> float | None:
        return self.ttft_sum / self.ttft_count if self.ttft_count else None

    @property
    def itl_mean(self) -> float | None:
        return self.itl_sum / self.itl_count if self.itl_count else None


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an engine that serves. A value that it does not report is None.

    Args:
        role: its present role, which a flip may have changed.
        steps: its passes since the observation before; None where it reported none.
        running, waiting: requests in it now.
        queued_prefill_tokens: prompt tokens that wait in it now; ``queued_decode_kv``: KV tokens of decodes that wait.
        decode_kv: KV tokens of the decodes that run now.
        kv_tokens: its KV capacity.
    """

    worker: WorkerId
    rank: int = 0
    role: Role = "aggregated"
    steps: StepStats | None = None
    running: int | None = None
    waiting: int | None = None
    queued_prefill_tokens: int | None = None
    queued_decode_kv: int | None = None
    decode_kv: int | None = None
    kv_tokens: int | None = None
    max_seqs: int | None = None
    max_batched_tokens: int | None = None
    max_len: int | None = None

    @property
    def kv_usage(self) -> float | None:
        """Share of the room that running decodes take, 0..1."""
        return self.decode_kv / self.kv_tokens if self.decode_kv is not None and self.kv_tokens else None


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """One pool, and how many of its replicas are in which state.

    Args:
        pool: without its replicas: simulators and plugins only count them.
        watts: the power that one replica may draw, None where no setting gives it.
        starting: seconds since the start of each replica that does not serve yet, the oldest first.
        failed: replicas that can't be started at present, with the pool's ``problem`` as the reason.
        start_up_times: of replicas that began to serve since the observation before, seconds.
        warm: whether a starting replica finds its files on the machine.
        flips: whether its workers can take another role.
    """

    pool: Pool
    watts: float | None = None
    ready: int
    starting: tuple[float, ...] = ()
    draining: int = 0
    failed: int = 0
    start_up_times: tuple[float, ...] = ()
    warm: bool = False
    flips: bool = False
    engines: tuple[EngineState, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether no replica is on its way in or out, and as many serve as desired."""
        return not self.starting and not self.draining and not self.failed and self.ready == self.pool.desired


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """One model.

    Args:
        traffic: since the observation before; None where it could not be read, which is not the same as none.
        queued: requests that wait in the router now.
        without_worker: requests that wait because there is no worker at all.
        health: of the source of ``traffic``; ``why``: its fault.
    """

    traffic: Traffic | None
    pools: Mapping[str, PoolState]
    queued: int | None = None
    without_worker: int = 0
    health: Health = "fresh"
    why: str = ""

    def pool(self, role: Role) -> tuple[str, PoolState] | None:
        """Return the first pool of a role, by name."""
        return next(((name, state) for name, state in self.pools.items() if state.pool.role == role), None)

    def engines(self, *roles: Role) -> Iterator[EngineState]:
        """Yield the engines that have one of these roles at present."""
        for pool in self.pools.values():
            for engine in pool.engines:
                if engine.role in roles:
                    yield engine


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at second ``at`` of the run; counts are of the ``window`` seconds before it."""

    at: float
    window: float
    models: Mapping[str, ModelState]

    def pools(self) -> Iterator[tuple[str, str, PoolState]]:
        """Yield (model, pool, its state)."""
        for model, seen in self.models.items():
            for name, pool in seen.pools.items():
                yield model, name, pool
