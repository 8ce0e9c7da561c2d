"""`WeightServer`: lets siblings read the tensors of a checkpoint over the TCP mover, out of the page cache."""

import struct
import time

import msgspec
from xxhash import xxh3_64_intdigest

from penstock.kernel.secret import ClusterSecret
from penstock.transfer.tcp.tcp_server import TcpServer
from penstock.transfer.tcp.tcp_stream import PeerIdentity
from penstock.transfer.weights.weight_files import CheckpointFiles

HEAD_REGION, MANIFEST_REGION, FILES_REGION = 1, 2, 3
"""Regions: `HEAD`, the manifest as JSON, and from the third on the files."""
HEAD = struct.Struct("<QQ")
"""Bytes of the manifest, and their XXH3-64."""


class WeightServer:
    """Serves one checkpoint to holders of the cluster's secret.

    Args:
        name: of this process, for its log.
    """

    def __init__(self, files: CheckpointFiles, secret: ClusterSecret, *, name: str) -> None:
        self._files = files
        self._server = TcpServer(PeerIdentity(name, time.time_ns()), secret)

    def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Read every tensor once, then listen; return the address.

        Raises:
            OSError: the address is not ours, or taken.
        """
        manifest = self._files.manifest()
        regions = [FILES_REGION + number for number in range(len(manifest.files))]
        raw = msgspec.json.encode(msgspec.structs.replace(manifest, regions=regions))
        table = self._server.regions
        table.add(HEAD_REGION, memoryview(HEAD.pack(len(raw), xxh3_64_intdigest(raw))), writable=False)
        table.add(MANIFEST_REGION, memoryview(raw), writable=False)
        for region, memory in zip(regions, self._files.maps, strict=True):
            table.add(region, memoryview(memory), writable=False)
        return self._server.start(host, port)

    def close(self) -> None:
        """Serve nobody any more; afterwards the files may be unmapped."""
        self._server.close()
        for region in range(HEAD_REGION, FILES_REGION + len(self._files.maps)):
            self._server.regions.remove(region)
