"""What does a planner see? One observation per look: traffic, pools and engines, and what could not be read.

Sums, not means, so that looks add up to windows of any length. What can't be read is None, never 0.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from penstock.kernel.bins import Bins, join
from penstock.kernel.values import Role, StepStats, WorkerId

Health = Literal["fresh", "stale", "broken"]
"""Of a source: read just now; read a while ago; not readable."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one model's requests in ``seconds``. Counts of requests and tokens; latencies in seconds.

    Demand counts at arrival: ``arrived`` and ``prompt_tokens`` are of requests that arrived in the window, all the rest
    is of those that ended in it. A source that counts at the end only (``at_end``) puts the same numbers in both.

    Args:
        prompts: prompt tokens of those that arrived, as `penstock.planner.shapes` bins them.
        shapes: joint bins of prompt, output and share of cache, of those that were answered.
        classes: answers by the class that their requests named.
        judged, in_slo: requests of which it is known whether the service level was kept, and those of which it was.
        lost: failed, refused and expired.
        told_tokens: prompt tokens of answers that tell how many came from cache: ``cached_tokens`` of these.
        ttft, itl: each answer's, in `penstock.kernel.bins`; empty where the source knows only sums.
        accept_length: tokens per speculated step; None where nothing speculates.
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
    told_tokens: int = 0
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
        """Return both windows as one; ``accept_length`` is the later one's, where it tells it."""
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
    def isl(self) -> float | None:
        """Mean prompt of those that arrived; None where none did."""
        return self.prompt_tokens / self.arrived if self.arrived else None

    @property
    def osl(self) -> float | None:
        """Mean output of those that were answered; None where none was."""
        return self.output_tokens / self.answered if self.answered else None

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that came from cache, token-weighted; None where nothing tells."""
        return self.cached_tokens / self.told_tokens if self.told_tokens else None

    @property
    def ttft_mean(self) -> float | None:
        return self.ttft_sum / self.ttft_count if self.ttft_count else None

    @property
    def itl_mean(self) -> float | None:
        return self.itl_sum / self.itl_count if self.itl_count else None


class EngineSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an engine that serves. What it does not tell is None.

    Args:
        role: what it does at present, which a flip may have changed.
        steps: its passes since the look before; None where it told none.
        running, waiting: requests in it now.
        queued_prefill_tokens: prompt tokens that wait in it now; ``queued_decode_kv``: KV tokens of decodes that wait.
        decode_kv: KV tokens of the decodes that run now.
        kv_tokens: how many it has room for.
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


class PoolSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One pool: replicas that stand in for each other.

    Args:
        gpus: of one replica; ``watts``: that one may draw, None where nobody says.
        desired: replicas that the connector works towards.
        starting: seconds since the start of each that does not serve yet, the eldest first.
        failed: replicas that can't be started at present, with ``problem`` as the reason.
        limit: most replicas that the connector can have.
        came: start-up times of those that began to serve since the look before, seconds.
        warm: whether a replica that starts finds what it needs on the machine.
        flips: whether its workers can take another role.
    """

    role: Role
    variant: str = ""
    gpus: int = 1
    watts: float | None = None
    desired: int
    ready: int
    starting: tuple[float, ...] = ()
    draining: int = 0
    failed: int = 0
    problem: str | None = None
    limit: int | None = None
    came: tuple[float, ...] = ()
    warm: bool = False
    flips: bool = False
    engines: tuple[EngineSeen, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether no replica is on its way in or out, and as many serve as should."""
        return not self.starting and not self.draining and not self.failed and self.ready == self.desired


class ModelSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One model.

    Args:
        traffic: since the look before; None where it could not be read, which is not the same as none.
        queued: requests that wait in the router now.
        held: requests that wait because there is no worker at all.
        health: of the source of ``traffic``; ``why``: what is wrong with it.
    """

    traffic: Traffic | None
    pools: Mapping[str, PoolSeen]
    queued: int | None = None
    held: int = 0
    health: Health = "fresh"
    why: str = ""

    def pool(self, role: Role) -> tuple[str, PoolSeen] | None:
        """Return the first pool of a role, by name."""
        return next(((name, pool) for name, pool in self.pools.items() if pool.role == role), None)

    def engines(self, *roles: Role) -> Iterator[EngineSeen]:
        """Yield the engines that do one of these roles at present."""
        for pool in self.pools.values():
            for engine in pool.engines:
                if engine.role in roles:
                    yield engine


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at second ``at`` of the run; what is counted is of the ``window`` seconds before it."""

    at: float
    window: float
    models: Mapping[str, ModelSeen]

    def pools(self) -> Iterator[tuple[str, str, PoolSeen]]:
        """Yield (model, pool, what was seen of it)."""
        for model, seen in self.models.items():
            for name, pool in seen.pools.items():
                yield model, name, pool
