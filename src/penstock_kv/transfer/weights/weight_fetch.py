"""Fetch of weights: every tensor of a checkpoint from a sibling into anonymous memory, each one checked."""

import asyncio
import mmap
import os
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from penstock.kernel.errors import TransferError
from penstock.kernel.secret import ClusterSecret
from penstock_kv.transfer.backends.tcp_backend import TcpBackend
from penstock_kv.transfer.descriptors import Descriptor, MemoryRegion
from penstock_kv.transfer.tcp.tcp_frames import ITEMS_MAX
from penstock_kv.transfer.transfer_agent import TransferAgent
from penstock_kv.transfer.transfer_backend import RemoteAgent
from penstock_kv.transfer.weights.weight_files import StoredTensor, WeightManifest
from penstock_kv.transfer.weights.weight_server import MANIFEST

ASK_SECONDS = 10.0
"""For the manifest."""
BYTES_PER_SECOND_LEAST = 50e6
"""A sibling that is slower is slower than a disk, and given up."""
MANIFEST_MAX = 256 << 20
ALIGNMENT = 64
"""Of tensors in the memory: a cache line, as torch has it."""
CHUNK = 64 << 20
"""Bytes of one descriptor: what two connections divide among them."""
ROUND = 2 << 30
"""Bytes of one transfer: a server answers a request for 60 s at most, in which the slowest sibling sends 3 GB."""


class FetchFailed(TransferError):
    """A sibling does not have this checkpoint, is gone, too slow, or sent other bytes than it has."""


class FetchedTensor(NamedTuple):
    """A tensor, and where it is in the memory."""

    tensor: StoredTensor
    offset: int


class FetchedWeights(NamedTuple):
    """Tensors in memory of which ``fd`` is a descriptor, the caller's to close."""

    fd: int
    size: int
    tensors: list[FetchedTensor]


async def fetch(address: tuple[str, int], secret: ClusterSecret, *, name: str, fingerprint: int) -> FetchedWeights:
    """Fetch all tensors from one sibling.

    Args:
        name: of this process.
        fingerprint: that the sibling's checkpoint must have.
    Raises:
        FetchFailed: see there; nothing is left of what came.
    """
    where = f"{address[0]}:{address[1]}"
    tcp = TcpBackend(secret)
    agent = TransferAgent(f"{name} fetches", [tcp])  # it is not started: nobody reads anything of it
    try:
        sibling = agent.add_remote(await tcp.meet("", address, ASK_SECONDS))
        manifest = await _read_manifest(agent, sibling)
        if manifest.fingerprint != fingerprint:
            raise FetchFailed(f"{where} has another checkpoint, with other files or weights")
        return await _read_tensors(agent, sibling, manifest)
    except FetchFailed:
        raise
    except TransferError as error:
        raise FetchFailed(f"{where}: {error}") from error
    finally:
        await agent.close()


async def _read_manifest(agent: TransferAgent, sibling: RemoteAgent) -> WeightManifest:
    info = next((each for each in sibling.regions.values() if each.label == MANIFEST), None)
    if info is None or info.size > MANIFEST_MAX:
        raise FetchFailed(f"{sibling.name!r} serves no manifest of at most {MANIFEST_MAX} bytes")
    region = agent.register_memory(bytearray(info.size))
    await _read_parts(agent, sibling, [region.descriptor()], [Descriptor(info.id, 0, info.size)], ASK_SECONDS)
    try:
        return msgspec.json.decode(region.bytes_of().data, type=WeightManifest)
    except msgspec.DecodeError as error:
        raise FetchFailed(f"the sibling's manifest can't be read: {error}") from error


async def _read_tensors(agent: TransferAgent, sibling: RemoteAgent, manifest: WeightManifest) -> FetchedWeights:
    placed, size = [], 0
    for tensor in manifest.tensors:
        placed.append(FetchedTensor(tensor, size))
        size += -(-tensor.length // ALIGNMENT) * ALIGNMENT
    size = max(size, ALIGNMENT)
    fd = os.memfd_create("penstock-weights", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)  # unmapped with the last region, handle or error that shows it
        region = agent.register_memory(memory)
        for here, there in _transfer_rounds(region, manifest, placed):
            seconds = ASK_SECONDS + sum(part.length for part in here) / BYTES_PER_SECOND_LEAST
            await _read_parts(agent, sibling, here, there, seconds)
        with memoryview(memory) as view:
            await asyncio.to_thread(_check_tensors, placed, view)
    except BaseException:
        os.close(fd)
        raise
    return FetchedWeights(fd, size, placed)


def _transfer_rounds(
    region: MemoryRegion, manifest: WeightManifest, placed: list[FetchedTensor]
) -> Iterator[tuple[list[Descriptor], list[Descriptor]]]:
    """Yield the chunks of all tensors, here and there, in rounds of `ROUND` bytes or one chunk."""
    here: list[Descriptor] = []
    there: list[Descriptor] = []
    size = 0
    for tensor, offset in placed:
        for start in range(0, tensor.length, CHUNK):
            length = min(CHUNK, tensor.length - start)
            if here and (size + length > ROUND or len(here) == ITEMS_MAX):
                yield here, there
                here, there, size = [], [], 0
            here.append(region.descriptor(offset + start, length))
            there.append(Descriptor(manifest.regions[tensor.file], tensor.offset + start, length))
            size += length
    if here:
        yield here, there


async def _read_parts(
    agent: TransferAgent, sibling: RemoteAgent, here: list[Descriptor], there: list[Descriptor], seconds: float
) -> None:
    handle = agent.prepare("read", here, there, sibling.name, deadline=seconds)
    handle.post()
    await handle.wait_settled()
    handle.raise_for_failure()


def _check_tensors(placed: list[FetchedTensor], view: memoryview) -> None:
    for tensor, offset in placed:
        with view[offset : offset + tensor.length] as part:
            if xxh3_64_intdigest(part) != tensor.checksum:
                raise FetchFailed(f"tensor {tensor.name!r} has another checksum than the sibling says")
