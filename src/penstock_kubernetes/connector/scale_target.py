"""Scale target: one object of the API server that holds the replicas of pools, and what is read and written of it."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.kernel.errors import PenstockError
from penstock.kernel.values import Pool, Replica


class ApiRight(NamedTuple):
    """One verb on one resource that an account needs, as RBAC spells it."""

    verb: str
    group: str
    resource: str
    """With its subresource, such as ``deployments/scale``."""
    name: str = ""
    """Of the one object that is meant; empty for all of them."""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f" of {self.group}" if self.group else "")


LIST_PODS = ApiRight("list", "", "pods")
"""Without it pools are counted by what serves, and no reason of a pod that fails is known."""


class PoolReading(NamedTuple):
    """A pool as the API server has it.

    Args:
        pool: without its replicas, which are pods.
        version: resourceVersion of the object that holds its number; a write with an older one is refused.
        labels: that its pods have; each pod that matches is one replica.
    """

    pool: Pool
    version: str
    labels: Mapping[str, str]


class TargetError(PenstockError):
    """The API server did not do it, and the object is as it was."""


class WriteConflict(TargetError):
    """Another writer changed the object in between."""


class RightMissing(TargetError):
    """The account of this process may not do it."""


class OutcomeUnknown(TargetError):
    """No answer came: the write may count already, or may count later."""


class ScaleTarget(Protocol):
    """An object that holds the replicas of one pool or of several."""

    @property
    def rights(self) -> tuple[ApiRight, ...]:
        """Return what must be allowed so that it can be scaled."""
        ...

    async def read(self) -> Mapping[str, PoolReading]:
        """Return its pools by name.

        Raises:
            ConfigError: the object is not what the settings say.
            TargetError: it can't be read at present.
        """
        ...

    async def write(self, pool: str, replicas: int, readings: Mapping[str, PoolReading]) -> None:
        """Set the replicas of one pool, on the condition that its object is still as it was read.

        Args:
            readings: of `read`, all of them.
        Raises:
            TargetError: nothing was changed; with `OutcomeUnknown` perhaps it was.
        """
        ...

    def describe(self) -> str:
        """Return its kind and name."""
        ...


class ClusterAccess(Protocol):
    """What else a connector asks the API server: `penstock_kubernetes.connector.api_access.ApiAccess`."""

    async def replicas(self, labels: Mapping[str, str]) -> tuple[Replica, ...]:
        """Return the pods with these labels.

        Raises:
            TargetError: they can't be listed.
        """
        ...

    async def mark_victims(self, labels: Mapping[str, str], workers: Collection[str]) -> None:
        """Make these workers the first that a smaller number ends.

        Raises:
            TargetError: they can't be marked.
        """
        ...

    async def missing(self, rights: Sequence[ApiRight]) -> Sequence[ApiRight]:
        """Return those of the rights that our account does not have.

        Raises:
            TargetError: that can't be learnt at present.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...
