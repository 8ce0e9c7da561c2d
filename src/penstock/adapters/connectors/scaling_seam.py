"""What does a planner need of whoever changes replica counts? Pools as they are, and a say in how many there are.

The seam for Kubernetes is this one. A pool is what has a scale of its own there: a Deployment, a LeaderWorkerSet, or a
component of a custom resource. `look` reads ``spec.replicas`` as ``desired`` and its pods as ``replicas`` (one that is
not ready is ``starting``, one with a deletion timestamp ``draining``, one that can't be scheduled or restarts over and
over ``failed`` with the reason that it states); `scale` patches the scale subresource, which is a level like ours and
needs nothing that was said before. Drains are the pod's own preStop and its grace period. `penstock.adapters.seams` has
the seam of whoever starts the processes.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from penstock.adapters.seams import ReplicaState
from penstock.kernel.values import Role
from penstock.planner.proposals import Because, Flip


class ReplicaFound(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. ``role``: what it does for requests; None where it does not serve or nobody says."""

    id: str
    state: ReplicaState
    reason: str | None = None
    gpus: int = 0
    role: Role | None = None


class PoolFound(msgspec.Struct, frozen=True, kw_only=True):
    """One pool.

    Args:
        desired: replicas that are worked towards; ``by``: who said so, where that is known.
        replicas: those that there are; None where only those who serve requests tell of themselves.
        limit: most replicas that there can be; ``problem``: why ``desired`` can't come true.
        scalable: whether anybody can change how many there are.
        settled: False while a change that was said has not been acknowledged.
    """

    model: str
    role: Role
    desired: int
    by: str = ""
    replicas: Sequence[ReplicaFound] | None = None
    gpus: int = 1
    variant: str = ""
    limit: int | None = None
    problem: str | None = None
    scalable: bool = True
    settled: bool = True


class ScaleConnector(Protocol):
    """Who can change how many replicas pools have, for a planner that may be anywhere.

    Level-triggered: `scale` says what should be, as often as one likes.
    """

    async def look(self) -> Mapping[str, PoolFound]:
        """Return every pool by its name.

        Raises:
            PenstockError: nothing can be seen at present.
        """
        ...

    async def scale(
        self, targets: Mapping[str, int], flips: Sequence[Flip], because: Sequence[Because]
    ) -> dict[str, str]:
        """Want so many replicas, and these changes of role; return pool -> why it can't be. It raises nothing."""
        ...

    def describe(self) -> str:
        """Say in a few words who that is."""
        ...

    async def close(self) -> None:
        """Let go of connections; what is wanted stays as it is."""
        ...
