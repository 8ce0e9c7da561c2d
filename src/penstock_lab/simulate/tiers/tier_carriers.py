"""Tier carriers of a simulation: how long each move of a tier machine takes, behind those that use the same link."""

from penstock.kernel.machine import SECOND, Nanos, nanos
from penstock_kv.blocks.tiers.tier_events import Move, Place
from penstock_lab.engine.settings import TierLinks

HOST_LATENCY, DISK_LATENCY, OBJECT_LATENCY, PEER_LATENCY = 1e-5, 1e-4, 0.03, 2e-4
"""Seconds before a move's first byte: a copy's launch, a read of NVMe, a request to S3, a question and its answer in
one data centre. Rounded figures of such devices; bandwidths decide, and are settings."""


class TierCarriers:
    """The links of one engine's tiers. A link carries one move after the other, and each way has its own.

    Args:
        links: their speeds.
        block_bytes: of a whole block, all GPUs together.
        gpus: of the engine; each has a link to host memory.
    """

    def __init__(self, links: TierLinks, block_bytes: int, gpus: int = 1) -> None:
        host = links.host_bandwidth * gpus, HOST_LATENCY
        store = links.object_bandwidth, OBJECT_LATENCY
        self._speeds: dict[tuple[Place, Place], tuple[float, float]] = {
            ("engine", "host"): host,
            ("host", "engine"): host,
            ("host", "disk"): (links.disk_write, DISK_LATENCY),
            ("disk", "host"): (links.disk_read, DISK_LATENCY),
            ("host", "object"): store,
            ("object", "host"): store,
            ("peer", "host"): (links.peer_bandwidth, PEER_LATENCY),
        }
        self._block_bytes = block_bytes
        self._free: dict[tuple[Place, Place], Nanos] = {}

    @property
    def edges(self) -> list[tuple[Place, Place]]:
        """Ways that are known before a move; peers are met later."""
        return [edge for edge in self._speeds if edge[0] != "peer"]

    def seconds(self, source: Place, target: Place, blocks: int) -> float:
        """Return how long a move takes whose link is free."""
        rate, latency = self._speeds[source, target]
        return latency + blocks * self._block_bytes / rate

    def carry(self, now: Nanos, move: Move, sender: "TierCarriers | None" = None) -> tuple[Nanos, Nanos]:
        """Put a move behind what its link carries already.

        Args:
            sender: of the peer that the blocks come from; it sends to one peer at a time.
        Returns: when it begins, and when its last byte is there.
        """
        edge = (move.source, move.target)
        rate, latency = self._speeds[edge]
        begins = max(now, self._free.get(edge, 0))
        if sender is not None:
            begins = max(begins, sender._free.get(("host", "peer"), 0))
        lasts = round(len(move.keys) * self._block_bytes / rate * SECOND)
        self._free[edge] = begins + lasts
        if sender is not None:
            sender._free["host", "peer"] = begins + lasts
        return begins, begins + lasts + nanos(latency)

    def snapshot(self) -> list[list[object]]:
        """Return the state as plain data."""
        return [[source, target, at] for (source, target), at in self._free.items()]

    def restore(self, state: list[list[object]]) -> None:
        """Become what `snapshot` wrote."""
        self._free = {(source, target): at for source, target, at in state}  # type: ignore[misc]
