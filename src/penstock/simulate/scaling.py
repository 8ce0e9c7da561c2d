"""How many workers should there be? What a scaling policy is told, and the one method that it has."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import msgspec


class PoolSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One pool at the end of a window. ``running``, ``waiting``: requests in its engines; ``kv_usage``: mean 0..1."""

    ready: int
    starting: int
    draining: int
    running: int
    waiting: int
    kv_usage: float


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy is told: counts are of the window of ``window`` seconds that ends at second ``now`` of the run.

    ``arrived``, ``ok``, ``rejected``, ``failed``: requests; ``prompt_tokens``: of those that arrived, and
    ``output_tokens`` of those that ended; ``queued``: requests that wait in the router now. ``ttft``, ``itl``:
    means over the answers that ended in the window, in seconds; None where there was none.
    """

    now: float
    window: float
    arrived: int
    ok: int
    rejected: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    queued: int
    ttft: float | None
    itl: float | None
    pools: Mapping[str, PoolSeen]


@runtime_checkable
class ScalePolicy(Protocol):
    """Any object with this method can be judged in a simulation: ``--policy MODULE:NAME``."""

    def decide(self, seen: Seen) -> Mapping[str, int] | None:
        """Return how many workers each pool should have; pools that are left out, and None, stay as they are.

        Called once in each window, in order of time. The workers that are to go drain first; new ones take their
        start-up time. It must not read a clock: the same ``seen`` must lead to the same answer.
        """
        ...


class Steps:
    """The plainest policy: so many workers from a given second on.

    Args:
        pool: whose workers.
        steps: second of the run -> workers.
    """

    def __init__(self, pool: str, steps: Mapping[float, int]) -> None:
        self._pool = pool
        self._steps = sorted(steps.items())

    def decide(self, seen: Seen) -> Mapping[str, int] | None:
        """Return the last step that has come."""
        due = [count for at, count in self._steps if at <= seen.now]
        return {self._pool: due[-1]} if due else None
