"""Observation of the planner: traffic, pools and engines at one moment, and what could not be read.

Sums, not means, so that observations add up to windows of any length. A value that can't be read is None, never 0.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from penstock.kernel.values import UNKNOWN_LIMITS, EngineLimits, Pool, Role, StepStats, Traffic, WorkerId

Health = Literal["fresh", "stale", "broken"]
"""State of a source: read just now; read a while ago; not readable."""
BROKEN_AFTER = 60.0
"""Seconds without a reading after which a source is broken: a restart of a frontend or of a Prometheus takes less."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an engine that serves. A value that it does not report is None.

    Args:
        role: its present role, which a flip may have changed.
        steps: its passes since the observation before; None where it reported none.
        running, waiting: requests in it now.
        queued_prefill_tokens: prompt tokens that wait in it now; ``queued_decode_kv``: KV tokens of decodes that wait.
        decode_kv: KV tokens of the decodes that run now.
        limits: what it has room for.
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
    limits: EngineLimits[int | None] = UNKNOWN_LIMITS

    @property
    def kv_usage(self) -> float | None:
        """Share of the room that running decodes take, 0..1."""
        room = self.limits.kv_tokens
        return self.decode_kv / room if self.decode_kv is not None and room else None


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """One pool, and how many of its replicas are in which state.

    Args:
        pool: without its replicas: simulators and plugins only count them.
        watts: the power that one replica may draw, None where no setting gives it.
        starting: seconds since the start of each replica that does not serve yet, the oldest first.
        failed: replicas that can't be started at present, with the pool's ``problem`` as the reason.
        start_up_times: of replicas that were started and began to serve since the observation before, seconds.
        wake_times: of those that were woken.
        asleep: replicas that can be woken in place of a start. They have no GPUs, and count in no capacity.
        host_memory: bytes that they take of their machines; None where that is unknown.
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
    wake_times: tuple[float, ...] = ()
    asleep: int = 0
    host_memory: int | None = 0
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
        for model, observed in self.models.items():
            for name, pool in observed.pools.items():
                yield model, name, pool
