"""`ScalePolicy`: the one method that a user's own scaling policy needs in a simulation; a planner decides more."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from penstock.planner.observation import Observation


@runtime_checkable
class ScalePolicy(Protocol):
    """Any object with this method can be judged in a simulation: ``--policy MODULE:NAME``."""

    def decide(self, observation: Observation) -> Mapping[str, int] | None:
        """Return how many workers each pool should have; pools that are left out, and None, stay as they are.

        Called once in each window, in order of time. The workers that are to go drain first; new ones take their
        start-up time. It must not read a clock: the same ``observation`` must lead to the same answer.
        """
        ...
