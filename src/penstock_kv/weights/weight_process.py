"""Weight process: keeps a checkpoint in this machine's page cache, serves it to siblings, and fetches it from them.

The loader in an engine (`penstock_kv.inside.weights.vllm_weights`) asks over a unix socket. The cluster's secret stays
here.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.process_life import report_ready, stop_event
from penstock.inside.weights.weights_identity import signature
from penstock.kernel.errors import ConfigError, TransferError
from penstock.kernel.secret import ClusterSecret
from penstock_kv.inside.weights.weight_protocol import PlacedTensor, WeightsHere, WeightsRefused, answer, read_want
from penstock_kv.tiers.peer_tiers import SUFFIX, PeerPlace
from penstock_kv.transfer.weights.weight_fetch import FetchedWeights, fetch
from penstock_kv.transfer.weights.weight_files import CheckpointFiles, UnfitCheckpoint
from penstock_kv.transfer.weights.weight_server import WeightServer

log = logging.getLogger("penstock.weights")

Address = tuple[str, int]
KEPT_SECONDS = 30.0
"""For which fetched weights are kept: the other ranks of the same engine ask for them at about the same time."""
SEND_SECONDS = 10.0


class WeightNode:
    """One checkpoint on one machine.

    Args:
        folder: of the checkpoint.
        siblings: addresses that are always tried; those that ``peers`` names come after them.
        peers: folder with a file ``NAME.peer`` for each other weight process of the cluster.
    """

    def __init__(
        self,
        folder: Path,
        secret: ClusterSecret | None,
        *,
        name: str,
        siblings: Sequence[Address] = (),
        peers: Path | None = None,
    ) -> None:
        self._signature = signature(str(folder))
        self.files = CheckpointFiles(folder.resolve())
        self.fetched = 0
        self.refused = 0
        """Requests of engines that got weights, and that did not."""
        self._secret = secret
        self._name = name
        self._siblings = siblings
        self._peers = peers
        self._fetched_last: FetchedWeights | None = None
        self._source = ""
        self._lock = asyncio.Lock()

    async def give(self, sock: socket.socket) -> None:
        """Answer one engine."""
        begun = time.monotonic()
        try:
            want = read_want(await asyncio.wait_for(self._line(sock), SEND_SECONDS))
            async with self._lock:
                weights, sibling = await self._weights(Path(want.folder))
        except (TransferError, OSError, TimeoutError, msgspec.DecodeError) as error:
            self.refused += 1
            log.warning("an engine reads the files (%d so far): %s", self.refused, error)
            await _send_answer(sock, WeightsRefused(str(error) or type(error).__name__))
            return
        self.fetched += 1
        spent = time.monotonic() - begun
        log.info("an engine got %.2f GiB from %s within %.2f s", weights.size / 2**30, sibling, spent)
        tensors = [PlacedTensor(t.name, t.dtype, t.shape, offset, t.length) for t, offset in weights.tensors]
        await _send_answer(
            sock, WeightsHere(size=weights.size, tensors=tensors, sibling=sibling, seconds=spent), weights.fd
        )

    async def _weights(self, folder: Path) -> tuple[FetchedWeights, str]:
        if await asyncio.to_thread(folder.resolve) != self.files.folder:
            raise UnfitCheckpoint(f"this weight process has {self.files.folder}, not {folder}")
        if await asyncio.to_thread(signature, str(folder)) != self._signature:
            raise UnfitCheckpoint(f"files of {folder} are others than when this weight process began")
        if self._fetched_last is not None:
            return self._fetched_last, self._source
        if self._secret is None:
            raise UnfitCheckpoint("siblings know each other by the cluster's secret, and there is none")
        faults = []
        for host, port in self.siblings():
            try:
                weights = await fetch((host, port), self._secret, name=self._name, fingerprint=self.files.fingerprint)
            except TransferError as error:
                faults.append(f"{host}:{port}: {error}")
                continue
            self._fetched_last, self._source = weights, f"{host}:{port}"
            asyncio.get_running_loop().call_later(KEPT_SECONDS, self.drop)
            return weights, self._source
        raise UnfitCheckpoint("; ".join(faults) or "no sibling is known")

    def siblings(self) -> list[Address]:
        """Return the addresses that may have the checkpoint, in the order in which they are tried."""
        found = list(self._siblings)
        for path in sorted(self._peers.glob(f"*{SUFFIX}")) if self._peers is not None else ():
            try:
                place = msgspec.json.decode(path.read_bytes(), type=PeerPlace)
            except (OSError, msgspec.DecodeError):
                continue  # it went, or is being written
            if place.name != self._name:
                found.append((place.host, place.port))
        return found

    def drop(self) -> None:
        """Forget fetched weights; engines that have them keep them."""
        last, self._fetched_last = self._fetched_last, None
        if last is not None:
            os.close(last.fd)

    async def _line(self, sock: socket.socket) -> bytes:
        loop, line = asyncio.get_running_loop(), b""
        while not line.endswith(b"\n"):
            data = await loop.sock_recv(sock, 65_536)
            if not data or len(line) > 65_536:
                raise UnfitCheckpoint("an engine asked for nothing")
            line += data
        return line


async def run_weights(
    folder: Path,
    path: Path,
    secret: ClusterSecret | None,
    *,
    name: str,
    listen: Address | None = None,
    siblings: Sequence[Address] = (),
) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status. The first line on standard output says where, as JSON.

    Args:
        path: of the unix socket for engines; other weight processes say in its folder where they listen.
        listen: where siblings reach this process; None serves none.
    Raises:
        ConfigError: the socket or the port is taken, or the checkpoint is no fit.
    """
    stopping = stop_event()
    try:
        node = WeightNode(folder, secret, name=name, siblings=siblings, peers=path.parent)
    except UnfitCheckpoint as error:
        raise ConfigError(
            str(error), hint="only safetensors checkpoints in a folder of this machine are shared"
        ) from error
    node.files.read_ahead()
    engines = _listener(path)
    accepting = asyncio.create_task(_accept(engines, node))
    server: WeightServer | None = None
    mine = path.with_suffix(SUFFIX)
    report: dict[str, object] = {"socket": str(path)}
    try:
        if listen is not None and secret is not None:
            server = WeightServer(node.files, secret, name=name, host=listen[0], port=listen[1])
            try:
                host, port = await server.start()
            except OSError as error:
                raise ConfigError(f"{listen[0]}:{listen[1]} can't be listened at: {error}") from error
            report |= {"host": host, "port": port}
            draft = mine.with_suffix(".draft")
            draft.write_bytes(msgspec.json.encode(PeerPlace(name, host, port)))
            draft.replace(mine)
        report_ready(**report)
        await stopping.wait()
    finally:
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        engines.close()
        for left in (path, mine) if server is not None else (path,):
            left.unlink(missing_ok=True)
        node.drop()
        if server is not None:
            await server.close()
        node.files.close()
    return 0


def _listener(path: Path) -> socket.socket:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of a process that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"{path} can't be listened at: {error}") from error
    path.chmod(0o600)
    listener.listen(16)
    listener.setblocking(False)
    return listener


async def _accept(listener: socket.socket, node: WeightNode) -> None:
    loop = asyncio.get_running_loop()
    tasks = BackgroundTasks()
    try:
        while True:
            sock, _ = await loop.sock_accept(listener)
            sock.setblocking(False)
            tasks.spawn(_serve_engine(sock, node))
    finally:
        await tasks.close()


async def _serve_engine(sock: socket.socket, node: WeightNode) -> None:
    try:
        await node.give(sock)
    except OSError as error:
        log.warning("an engine went before it was answered: %s", error)
    finally:
        sock.close()


async def _send_answer(sock: socket.socket, what: WeightsHere | WeightsRefused, fd: int | None = None) -> None:
    sock.settimeout(SEND_SECONDS)
    await asyncio.to_thread(answer, sock, what, fd)
