"""Checkpoint files: the tensors of safetensors files by their headers, mapped into memory, and what tells two apart.

Format: 8 bytes with the header's length, a JSON header (name -> dtype, shape, data_offsets after it), then the data.
Source: https://github.com/huggingface/safetensors, "Format".
"""

import json
import mmap
import os
from pathlib import Path

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from penstock.kernel.errors import TransferError

INDEX = "model.safetensors.index.json"
HEADER_MAX = 100 << 20
"""Bytes, as safetensors has it."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Places of each file that a fingerprint reads: other weights of the same shapes differ in nearly all of them."""


class UnfitCheckpoint(TransferError):
    """A folder has no safetensors files, or one of them can't be read."""


class StoredTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in a file. ``offset``: from the file's beginning; ``checksum``: XXH3-64 of its bytes."""

    name: str
    file: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int
    checksum: int = 0


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint. ``fingerprint``: of headers and samples; ``regions``: served regions, one for each file."""

    fingerprint: int
    files: list[str]
    tensors: list[StoredTensor]
    regions: list[int] = []


class CheckpointFiles:
    """The safetensors files of a folder, mapped for reading. A file must not be cut short while this is open.

    Raises:
        UnfitCheckpoint: see there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.maps: list[mmap.mmap] = []
        self.paths = weight_files(folder)
        tensors: list[StoredTensor] = []
        digest = xxh3_64()
        for number, path in enumerate(self.paths):
            try:
                with path.open("rb") as file:
                    self.maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                tensors += _tensors_of_header(self.maps[-1], number)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                self.close()
                raise UnfitCheckpoint(f"{path} is not a safetensors file: {error}") from error
            _digest_samples(digest, path.name, self.maps[-1])
        self.tensors = tensors
        self.fingerprint: int = digest.intdigest()

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.length for tensor in self.tensors)

    def read_ahead(self) -> None:
        """Ask the kernel to read the files into its page cache; returns at once."""
        for each in self.maps:
            each.madvise(mmap.MADV_WILLNEED)

    def manifest(self) -> WeightManifest:
        """Return the manifest, with the checksum of every tensor: reads all of them."""
        views = [memoryview(each) for each in self.maps]
        try:
            tensors = [
                msgspec.structs.replace(tensor, checksum=_tensor_checksum(views[tensor.file], tensor))
                for tensor in self.tensors
            ]
        finally:
            for view in views:
                view.release()
        names = [path.name for path in self.paths]
        return WeightManifest(fingerprint=self.fingerprint, files=names, tensors=tensors)

    def close(self) -> None:
        """Unmap the files."""
        for each in self.maps:
            each.close()
        self.maps.clear()


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that an index names, else all of them, by name.

    Raises:
        UnfitCheckpoint: there are none, or the index can't be read.
    """
    try:
        index = folder / INDEX
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if any(os.path.basename(name) != name for name in names):  # noqa: PTH119  # the text is what counts
                raise UnfitCheckpoint(f"{index} names files outside its folder")
            return [folder / name for name in names]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnfitCheckpoint(f"{folder / INDEX} can't be read: {error}") from error
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UnfitCheckpoint(f"{folder} has no safetensors files")
    return paths


def _tensors_of_header(memory: mmap.mmap, file: int) -> list[StoredTensor]:
    length = int.from_bytes(memory[:8], "little")
    if not 2 <= length <= min(HEADER_MAX, len(memory) - 8):
        raise ValueError(f"its header would have {length} bytes")
    begin = 8 + length
    tensors = []
    for name, entry in json.loads(memory[8:begin]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        if not 0 <= first <= last <= len(memory) - begin:
            raise ValueError(f"tensor {name!r} lies outside")
        shape = tuple(int(size) for size in entry["shape"])
        tensors.append(StoredTensor(name, file, str(entry["dtype"]), shape, begin + first, last - first))
    return tensors


def _tensor_checksum(view: memoryview, tensor: StoredTensor) -> int:
    part = view[tensor.offset : tensor.offset + tensor.length]
    try:
        return xxh3_64_intdigest(part)
    finally:
        part.release()


def _digest_samples(digest: xxh3_64, name: str, memory: mmap.mmap) -> None:
    header = 8 + int.from_bytes(memory[:8], "little")
    digest.update(f"{name} {len(memory)}\n".encode())
    digest.update(memory[:header])
    span = max(0, len(memory) - header - SAMPLE_BYTES)
    for place in range(SAMPLES):
        start = header + span * place // (SAMPLES - 1)
        digest.update(memory[start : start + SAMPLE_BYTES])
