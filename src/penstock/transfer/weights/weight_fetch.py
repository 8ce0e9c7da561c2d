"""Fetch of weights: every tensor of a checkpoint from a sibling into anonymous memory, each one checked."""

import asyncio
import mmap
import os
import time
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from penstock.kernel.errors import TransferError
from penstock.kernel.secret import ClusterSecret
from penstock.transfer.tcp.link_jobs import SpanReadJob, wait_for_jobs
from penstock.transfer.tcp.tcp_frames import MoveOutcome, RegionSpan
from penstock.transfer.tcp.tcp_link import TcpLink
from penstock.transfer.tcp.tcp_stream import PeerIdentity
from penstock.transfer.weights.weight_files import StoredTensor, WeightManifest
from penstock.transfer.weights.weight_server import HEAD, HEAD_REGION, MANIFEST_REGION

ASK_SECONDS = 10.0
"""For the manifest."""
BYTES_PER_SECOND_LEAST = 50e6
"""A sibling that is slower is slower than a disk, and given up."""
MANIFEST_MAX = 256 << 20
ALIGNMENT = 64
"""Of tensors in the memory: a cache line, as torch has it."""
CHUNK = 64 << 20
"""Bytes of one job: what a broken connection costs, and what two connections divide among them."""


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
    link = TcpLink(address, secret, PeerIdentity(name, time.time_ns()))
    try:
        manifest = await _manifest(link)
        if manifest.fingerprint != fingerprint:
            raise FetchFailed(f"{address[0]}:{address[1]} has another checkpoint, with other files or weights")
        return await _tensors(link, manifest)
    finally:
        await asyncio.to_thread(link.close)


async def _manifest(link: TcpLink) -> WeightManifest:
    head = await _read(link, HEAD_REGION, HEAD.size)
    length, checksum = HEAD.unpack(head)
    if not 0 < length <= MANIFEST_MAX:
        raise FetchFailed(f"the sibling's manifest would have {length} bytes")
    raw = await _read(link, MANIFEST_REGION, length)
    if xxh3_64_intdigest(raw) != checksum:
        raise FetchFailed("the sibling's manifest has another checksum than it says")
    try:
        return msgspec.json.decode(raw, type=WeightManifest)
    except msgspec.DecodeError as error:
        raise FetchFailed(f"the sibling's manifest can't be read: {error}") from error


async def _read(link: TcpLink, region: int, length: int) -> bytes:
    buffer = bytearray(length)
    await _run(link, [RegionSpan(region, 0, length)], [memoryview(buffer)], ASK_SECONDS)
    return bytes(buffer)


async def _tensors(link: TcpLink, manifest: WeightManifest) -> FetchedWeights:
    placed, size = [], 0
    for tensor in manifest.tensors:
        placed.append(FetchedTensor(tensor, size))
        size += -(-tensor.length // ALIGNMENT) * ALIGNMENT
    size = max(size, ALIGNMENT)
    fd = os.memfd_create("penstock-weights", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as memory, memoryview(memory) as view:
            await _fill(link, manifest, placed, view, ASK_SECONDS + size / BYTES_PER_SECOND_LEAST)
            await asyncio.to_thread(_check, placed, view)
    except BaseException:
        os.close(fd)
        raise
    return FetchedWeights(fd, size, placed)


async def _fill(
    link: TcpLink, manifest: WeightManifest, placed: list[FetchedTensor], view: memoryview, seconds: float
) -> None:
    spans: list[RegionSpan] = []
    buffers: list[memoryview] = []
    for tensor, offset in placed:
        for start in range(0, tensor.length, CHUNK):
            length = min(CHUNK, tensor.length - start)
            spans.append(RegionSpan(manifest.regions[tensor.file], tensor.offset + start, length))
            buffers.append(view[offset + start : offset + start + length])
    try:
        await _run(link, spans, buffers, seconds)
    finally:
        for buffer in buffers:
            buffer.release()


async def _run(link: TcpLink, spans: list[RegionSpan], buffers: list[memoryview], seconds: float) -> None:
    """Read spans, divided among the link's connections by bytes."""
    faults: list[str] = []

    def report(item: int, outcome: MoveOutcome, cause: str) -> None:
        if outcome != "ok":
            faults.append(cause or outcome)

    total, share = sum(len(buffer) for buffer in buffers), 0
    parts: list[list[int]] = [[] for _ in range(link.streams)]
    for place, buffer in enumerate(buffers):
        parts[min(len(parts) - 1, share * len(parts) // max(1, total))].append(place)
        share += len(buffer)
    jobs = [
        SpanReadJob([spans[place] for place in part], [buffers[place] for place in part], report, seconds)
        for part in parts
        if part
    ]
    for job in jobs:
        link.submit(job)
    await wait_for_jobs(jobs)
    if faults:
        raise FetchFailed(f"{len(faults)} of {len(spans)} parts did not come: {faults[0]}")


def _check(placed: list[FetchedTensor], view: memoryview) -> None:
    for tensor, offset in placed:
        with view[offset : offset + tensor.length] as part:
            if xxh3_64_intdigest(part) != tensor.checksum:
                raise FetchFailed(f"tensor {tensor.name!r} has another checksum than the sibling says")
