"""`WeightServer`: lets siblings read the tensors of a checkpoint by a `TransferAgent`, out of the page cache."""

import asyncio

import msgspec

from penstock.kernel.secret import ClusterSecret
from penstock_kv.transfer.backends.tcp_backend import TcpBackend
from penstock_kv.transfer.transfer_agent import TransferAgent
from penstock_kv.transfer.weights.weight_files import CheckpointFiles

MANIFEST = "manifest"
"""Label of the region that has the `WeightManifest` as JSON."""


class WeightServer:
    """Serves one checkpoint to holders of the cluster's secret.

    Args:
        name: of this process, which siblings read in their logs.
        host, port: to listen on; port 0 is any free one.
    """

    def __init__(
        self, files: CheckpointFiles, secret: ClusterSecret, *, name: str, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._files = files
        self._tcp = TcpBackend(secret, host, port, advertise=host)
        self._agent = TransferAgent(name, [self._tcp])

    async def start(self) -> tuple[str, int]:
        """Read every tensor once, then listen; return the address.

        Raises:
            OSError: the address is not ours, or taken.
        """
        manifest = await asyncio.to_thread(self._files.manifest)
        register = self._agent.register_memory
        files = zip(self._files.maps, self._files.paths, strict=True)
        regions = [register(each, label=path.name, writable=False).id for each, path in files]
        raw = msgspec.json.encode(msgspec.structs.replace(manifest, regions=regions))
        register(raw, label=MANIFEST, writable=False)
        await self._agent.start()
        assert self._tcp.address is not None
        return self._tcp.address.host, self._tcp.address.port

    async def close(self) -> None:
        """Serve nobody any more; afterwards the files may be unmapped."""
        await self._agent.close()
