"""`TierCosts`: which blocks of lower tiers count, by what loading them costs each worker."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from penstock.kernel.tiers.load_worth import LoadCosts
from penstock.kernel.values import Target, WorkerId
from penstock.router.kv_index.indexer import Column, HeldBlocks

UNKNOWN = LoadCosts(compute=0.0, host_start=0.0, host_token=0.0)
"""Of a worker that reports nothing: all that it holds counts."""


class TierCosts:
    """What workers last reported of their tiers. Blocks count where the worker's own gate would load them.

    An engine computes at least the last token of a prompt, and so asks for ``most`` blocks, of ``size`` tokens each.
    """

    def __init__(self) -> None:
        self.costs: dict[WorkerId, LoadCosts] = {}
        self._columns: tuple[Mapping[Target, int], Column] | None = None

    def report(self, worker: WorkerId, costs: LoadCosts) -> None:
        """Take in what a worker reports."""
        self.costs[worker] = costs
        self._columns = None

    def drop(self, worker: WorkerId) -> None:
        """A worker is gone."""
        self.costs.pop(worker, None)
        self._columns = None

    def counted(self, target: Target, overlap: HeldBlocks, most: int, size: int) -> HeldBlocks:
        """Return what counts of what a target holds."""
        costs = self.costs.get(target.worker)
        if costs is None:
            return overlap
        host = min(overlap.host, max(0, most - overlap.device))
        disk = min(overlap.disk, max(0, most - overlap.device - host))
        worth = costs.worth(host * size, disk * size) // size
        if worth == host + disk:
            return overlap
        return overlap._replace(host=worth, disk=0, costly=overlap.host + overlap.disk - worth)

    def counted_columns(
        self, place: Mapping[Target, int], device: Column, lower: Sequence[Column], most: int, size: int
    ) -> Sequence[Column]:
        """Return the same for many targets: blocks in host memory, on disk, and costly ones.

        Args:
            place: target -> its place; the same object for the same targets.
            device, lower: shape (targets,) each.
        """
        compute, host_start, host_token, disk_start, disk_token, own_host = self._columns_of(place)
        host = np.minimum(lower[0], np.maximum(0, most - device))
        disk = np.minimum(lower[1], np.maximum(0, most - device - host))
        fetched, both = disk * size, (host + disk) * size
        copied, unknown = np.where(own_host, fetched, both), compute == 0
        # As `penstock.kernel.tiers.load_worth.worth_loading` does, to the last bit.
        gain = host * size * compute - np.where(own_host, 0.0, host_start + host * size * host_token)
        takes_host = (host > 0) & ((gain > 0) | unknown)
        more = both * compute - ((host_start + copied * host_token) + (disk_start + fetched * disk_token))
        takes_disk = (disk > 0) & ((more > np.where(takes_host, gain, 0.0)) | unknown)
        worth = np.where(takes_disk, host + disk, np.where(takes_host, host, 0))
        whole = worth == host + disk
        return [
            np.where(whole, lower[0], worth),
            np.where(whole, lower[1], 0),
            np.where(whole, 0, lower[0] + lower[1] - worth),
        ]

    def _columns_of(self, place: Mapping[Target, int]) -> Column:
        if self._columns is None or self._columns[0] is not place:
            found = [msgspec.structs.astuple(self.costs.get(target.worker, UNKNOWN)) for target in place]
            self._columns = place, np.array(found, dtype=float).T
        return self._columns[1]

    def snapshot(self) -> dict[WorkerId, LoadCosts]:
        """Return the state."""
        return self.costs

    def restore(self, state: dict[WorkerId, LoadCosts]) -> None:
        """Become what has this state."""
        self.costs, self._columns = state, None
