"""Scale connector of a planner: reads the pools as they are and sets how many replicas each should have.

The seam for Kubernetes is this one. A pool is what has a scale of its own there: a Deployment, a LeaderWorkerSet, or a
component of a custom resource. `look` reads ``spec.replicas`` as ``desired`` and its pods as ``replicas`` (one that is
not ready is ``starting``, one with a deletion timestamp ``draining``, one that can't be scheduled or restarts over and
over ``failed`` with the reason that it states); `scale` patches the scale subresource, which is a level like ours and
needs no earlier call. Drains are the pod's own preStop and its grace period. `penstock.adapters.seams` has
the seam of the connector that starts the processes.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.kernel.values import Pool
from penstock.planner.plugins.proposals import Flip, Reason


class ScaleConnector(Protocol):
    """Changes how many replicas pools have, for a planner that may run anywhere.

    Level-triggered: `scale` sets the desired state, as often as the caller likes.
    """

    async def look(self) -> Mapping[str, Pool]:
        """Return every pool by its name.

        Raises:
            PenstockError: the pools can't be read at present.
        """
        ...

    async def scale(
        self, targets: Mapping[str, int], flips: Sequence[Flip], reasons: Sequence[Reason]
    ) -> dict[str, str]:
        """Set the desired replicas and these changes of role; return pool -> why it can't be. It raises nothing."""
        ...

    def describe(self) -> str:
        """Return in a few words what scales the pools."""
        ...

    async def close(self) -> None:
        """Close connections; the desired state stays as it is."""
        ...
