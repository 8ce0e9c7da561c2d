"""Weights of a checkpoint come over TCP as they are in the files, or not at all."""

import asyncio
import json
import mmap
import os
import random
import socket
from pathlib import Path

import pytest

from penstock.kernel.secret import ClusterSecret
from penstock_kv.inside.weights.weight_protocol import WantWeights, WeightsHere, WeightsRefused, ask
from penstock_kv.transfer.weights import weight_fetch
from penstock_kv.transfer.weights.weight_fetch import FetchFailed, fetch
from penstock_kv.transfer.weights.weight_files import CheckpointFiles, UnfitCheckpoint
from penstock_kv.transfer.weights.weight_server import WeightServer
from penstock_kv.weights.weight_process import WeightNode, _accept, _listener

SECRET = ClusterSecret("a secret of this test only")


def checkpoint(folder: Path, *, seed: int = 1, tensors: int = 5) -> dict[str, bytes]:
    """Write two safetensors files with random bytes; return name -> bytes of each tensor."""
    folder.mkdir(parents=True)
    rng, contents = random.Random(seed), {}
    for number in range(2):
        header, data = {}, b""
        for place in range(tensors):
            name, raw = f"layers.{number}.{place}", rng.randbytes(1000 * (place + 1))
            header[name] = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [len(data), len(data) + len(raw)]}
            contents[name] = raw
            data += raw
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        (folder / f"model-{number}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return contents


class Flipping:
    """Forward one connection, with one byte of what comes back turned once so many have passed."""

    def __init__(self, port: int, after: int) -> None:
        self.to, self.after, self.passed, self.flips = port, after, 0, 0

    async def start(self) -> int:
        self.server = await asyncio.start_server(self._come, "127.0.0.1", 0)
        port: int = self.server.sockets[0].getsockname()[1]
        return port

    async def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_connection("127.0.0.1", self.to)

        async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter, back: bool) -> None:
            while data := await source.read(4096):
                if back and not self.flips and self.passed + len(data) > self.after:
                    data = bytearray(data)
                    data[-1] ^= 1
                    self.flips = 1
                self.passed += len(data) if back else 0
                target.write(data)
                await target.drain()
            target.close()

        await asyncio.gather(carry(reader, onward, False), carry(there, writer, True), return_exceptions=True)


def contents_of(fd: int, size: int, placed: list[tuple[str, int, int]]) -> dict[str, bytes]:
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as memory:
        return {name: memory[offset : offset + length] for name, offset, length in placed}


async def test_every_tensor_arrives_as_it_is_in_the_files(tmp_path: Path) -> None:
    contents = checkpoint(tmp_path / "one")
    files = CheckpointFiles(tmp_path / "one")
    server = WeightServer(files, SECRET, name="holder")
    address = await server.start()
    try:
        here = await fetch(address, SECRET, name="new", fingerprint=files.fingerprint)
        placed = [(tensor.name, offset, tensor.length) for tensor, offset in here.tensors]
        assert contents_of(here.fd, here.size, placed) == contents
        os.close(here.fd)
        with pytest.raises(FetchFailed, match="another checkpoint"):
            await fetch(address, SECRET, name="new", fingerprint=files.fingerprint + 1)
        with pytest.raises(FetchFailed):
            await fetch(address, ClusterSecret("not the secret of that one"), name="new", fingerprint=files.fingerprint)
    finally:
        await server.close()
        files.close()
    with pytest.raises(FetchFailed, match="can't be reached"):
        await fetch(address, SECRET, name="new", fingerprint=1)


async def test_a_checkpoint_of_many_rounds_arrives_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_fetch, "CHUNK", 1500)
    monkeypatch.setattr(weight_fetch, "ROUND", 4000)
    contents = checkpoint(tmp_path / "one")
    files = CheckpointFiles(tmp_path / "one")
    server = WeightServer(files, SECRET, name="holder")
    here = await fetch(await server.start(), SECRET, name="new", fingerprint=files.fingerprint)
    placed = [(tensor.name, offset, tensor.length) for tensor, offset in here.tensors]
    assert contents_of(here.fd, here.size, placed) == contents
    os.close(here.fd)
    await server.close()
    files.close()


async def test_a_byte_that_turned_on_the_way_is_found(tmp_path: Path) -> None:
    checkpoint(tmp_path / "one", tensors=20)
    files = CheckpointFiles(tmp_path / "one")
    server = WeightServer(files, SECRET, name="holder")
    _, port = await server.start()
    cable = Flipping(port, after=100_000)
    try:
        with pytest.raises(FetchFailed):
            await fetch(("127.0.0.1", await cable.start()), SECRET, name="new", fingerprint=files.fingerprint)
        assert cable.flips == 1
    finally:
        cable.server.close()
        await server.close()
        files.close()


async def test_weights_that_changed_in_the_files_since_they_were_summed_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "one")
    files = CheckpointFiles(tmp_path / "one")
    server = WeightServer(files, SECRET, name="holder")
    address = await server.start()
    path = tmp_path / "one" / "model-1.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-7] ^= 1
    with path.open("r+b") as file:
        file.write(raw)
    try:
        with pytest.raises(FetchFailed, match=r"layers\.1\.4"):
            await fetch(address, SECRET, name="new", fingerprint=files.fingerprint)
    finally:
        await server.close()
        files.close()


def test_other_weights_of_the_same_shapes_have_another_fingerprint(tmp_path: Path) -> None:
    checkpoint(tmp_path / "one", seed=1)
    checkpoint(tmp_path / "two", seed=2)
    checkpoint(tmp_path / "same", seed=1)
    one, two, same = (CheckpointFiles(tmp_path / name) for name in ("one", "two", "same"))
    assert one.fingerprint == same.fingerprint != two.fingerprint
    for each in (one, two, same):
        each.close()


@pytest.mark.parametrize(
    "raw", [b"", b"\x00" * 8, (1 << 40).to_bytes(8, "little") + b"{}", b"\x02" + b"\x00" * 7 + b"[]"]
)
def test_a_file_that_is_no_safetensors_file_is_named(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(UnfitCheckpoint, match=r"model\.safetensors"):
        CheckpointFiles(tmp_path)


def test_an_index_may_not_name_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret"}}))
    with pytest.raises(UnfitCheckpoint, match="outside"):
        CheckpointFiles(tmp_path)


async def test_an_engine_gets_memory_from_a_sibling_and_a_reason_where_there_is_none(tmp_path: Path) -> None:
    contents = checkpoint(tmp_path / "one")
    checkpoint(tmp_path / "copy")
    files = CheckpointFiles(tmp_path / "one")
    server = WeightServer(files, SECRET, name="holder")
    address = await server.start()
    node = WeightNode(tmp_path / "copy", SECRET, name="new", siblings=[address])
    path = tmp_path / "w.sock"
    listener = _listener(path)
    accepting = asyncio.create_task(_accept(listener, node))
    try:
        here, fd = await asyncio.to_thread(ask, str(path), WantWeights(str(tmp_path / "copy")), 10.0)
        assert isinstance(here, WeightsHere) and fd is not None and node.fetched == 1
        placed = [(tensor.name, tensor.offset, tensor.length) for tensor in here.tensors]
        assert contents_of(fd, here.size, placed) == contents
        socket.close(fd)
        node.drop()
        await server.close()
        refused, fd = await asyncio.to_thread(ask, str(path), WantWeights(str(tmp_path / "copy")), 10.0)
        assert isinstance(refused, WeightsRefused) and fd is None and node.refused == 1
        assert "can't be reached" in refused.reason
        other, _ = await asyncio.to_thread(ask, str(path), WantWeights(str(tmp_path / "one")), 10.0)
        assert isinstance(other, WeightsRefused)
    finally:
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        listener.close()
        files.close()
        node.files.close()
