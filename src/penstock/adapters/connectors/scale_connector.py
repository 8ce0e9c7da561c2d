"""Scale connector of a planner: reads the pools as they are and sets how many replicas each should have."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class ChecksTargets(Protocol):
    """A connector that can tell at the start whether what it should scale is as the settings say."""

    async def validate(self) -> None:
        """Check it.

        Raises:
            ConfigError: it is not.
        """
        ...
