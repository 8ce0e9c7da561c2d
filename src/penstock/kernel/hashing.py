"""Hashes of KV blocks: the chained routing hash (`BlockHash`) and the bytes that go into it.

A block's *local* hash is XXH3-64, seed 1337, over its tokens as little-endian u32, followed by the block's
``extra`` bytes. The *chained* hash of block i stands for tokens [0, (i + 1) * block_size):

    chained[0] = local[0]
    chained[i] = XXH3-64(u64le(chained[i - 1]) || u64le(local[i]), seed 1337)

This is the identity that Dynamo's router uses (checked bit for bit against a peer; tests/kernel/test_hashing.py
holds the constants). It is not cryptographic: it routes, it never names stored KV.

``extra`` is a sequence of records ``u8 tag || u32le length || bytes``, in the order of the tags: 1 = LoRA adapter
name (UTF-8, in every block), 2 = cache salt (UTF-8, in block 0 only: the chain carries it on), 3 = an image or the like
(in each block that it touches: `media_key`). No record, no bytes: a plain block hashes as its tokens alone.
"""

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import msgspec
import numpy as np
import xxhash

from penstock.kernel.values import BlockHash

SEED = 1337
SCHEME = "xxh3-64-1337-chained-v1"
"""Name of this scheme in a `WorkerCard`: an engine that announces it needs no translation."""

BYTES_PER_TOKEN = 4
"""Assumed where a model has no tokenizer at hand: lengths of such prompts are estimates."""
TEXT_BLOCK_BYTES = 256
"""Bytes of a block of text, which stands for 64 tokens then."""

TAG_LORA, TAG_SALT, TAG_MULTIMODAL = 1, 2, 3

_pair = struct.Struct("<QQ").pack
_record = struct.Struct("<BI").pack
_xxh3 = xxhash.xxh3_64_intdigest


def extra_bytes(lora: str | None = None, salt: str | None = None, multimodal: Sequence[bytes] = ()) -> bytes:
    """Encode what decides a block's KV besides its tokens, in the format of the module's docstring."""
    out = b""
    if lora:
        name = lora.encode()
        out += _record(TAG_LORA, len(name)) + name
    if salt:
        text = salt.encode()
        out += _record(TAG_SALT, len(text)) + text
    for digest in multimodal:
        out += _record(TAG_MULTIMODAL, len(digest)) + digest
    return out


def records(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the records of ``extra`` bytes: tag and value."""
    at = 0
    while at < len(extra):
        tag, size = extra[at], int.from_bytes(extra[at + 1 : at + 5], "little")
        yield tag, extra[at + 5 : at + 5 + size]
        at += 5 + size


class MediaSpan(NamedTuple):
    """An image or the like in a prompt: the tokens [start, start + length) stand for it."""

    id: str
    start: int
    length: int


def media_key(id: str, offset: int) -> bytes:
    """Return the key of a block that contains part of an image: MessagePack ``[id, offset]``, as vLLM names it.

    Args:
        offset: where the image begins, counted from the block's first token; below 0 where it began before.
    """
    return msgspec.msgpack.encode([id, offset])


def media_keys(media: Sequence[MediaSpan], block_size: int, first: int, end: int) -> list[list[bytes]]:
    """Return the keys of the images that blocks [first, end) of a prompt touch, shape (end - first, any)."""
    found: list[list[bytes]] = [[] for _ in range(first, end)]
    for id, start, length in media:
        for block in range(max(first, start // block_size), min(end, -(-(start + length) // block_size))):
            found[block - first].append(media_key(id, start - block * block_size))
    return found


def block_extras(
    first: int, end: int, block_size: int, lora: str | None, salt: str | None, media: Sequence[MediaSpan] = ()
) -> list[bytes] | None:
    """Return the ``extra`` bytes of blocks [first, end) of a prompt, shape (end - first,); None where none has any."""
    if not lora and not salt and not media:
        return None
    keys = media_keys(media, block_size, first, end)
    return [
        extra_bytes(lora, salt if block == 0 else None, multimodal)
        for block, multimodal in zip(range(first, end), keys, strict=True)
    ]


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens as little-endian u32, shape (n,) -> 4n bytes.

    Raises:
        OverflowError: a token id is below 0 or above 2**32 - 1.
    """
    words = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    if sys.byteorder == "big":  # pragma: no cover - no such machine in CI
        words = array("I", words)
        words.byteswap()
    return words.tobytes()


def local_hashes(tokens: Sequence[int], block_size: int, extras: Sequence[bytes] | None = None) -> list[int]:
    """Hash each full block by itself.

    Args:
        tokens: token ids, shape (n,).
        block_size: tokens per block; a rest shorter than that has no hash.
        extras: ``extra`` bytes per block, or None for none.
    Returns: shape (n // block_size,).
    Cost: about 1.5 us per 1,000 tokens plus 0.1 us per block.
    """
    count = len(tokens) // block_size
    stride = block_size * 4
    raw = token_bytes(tokens)[: count * stride]
    # numpy cuts the bytes in one call, in half the time of as many slices.
    blocks: list[bytes] = np.frombuffer(raw, f"V{stride}").tolist() if count else []
    if extras is None:
        return [_xxh3(block, SEED) for block in blocks]
    return [_xxh3(block + extra if extra else block, SEED) for block, extra in zip(blocks, extras, strict=True)]


def chain(local: Sequence[int], parent: int | None = None) -> list[BlockHash]:
    """Chain local hashes into sequence hashes, going on from ``parent`` where one is given."""
    out = list(local)
    previous = parent
    for i, value in enumerate(local):
        out[i] = previous = value if previous is None else _xxh3(_pair(previous, value), SEED)
    return cast(list[BlockHash], out)


def block_hashes(
    tokens: Sequence[int],
    block_size: int,
    *,
    lora: str | None = None,
    salt: str | None = None,
    media: Sequence[MediaSpan] = (),
) -> list[BlockHash]:
    """Return the chained hash of every full block of a prompt, shape (n // block_size,).

    Args:
        media: images and the like in it, in order.
    """
    extras = block_extras(0, len(tokens) // block_size, block_size, lora, salt, media)
    return chain(local_hashes(tokens, block_size, extras))


def text_hashes(
    text: str,
    block_bytes: int,
    *,
    lora: str | None = None,
    salt: str | None = None,
) -> list[BlockHash]:
    """Return chained hashes over blocks of UTF-8 bytes, for a model whose tokenizer is not at hand.

    They name text, not KV, so they only ever meet hashes made the same way (the approximate index).
    """
    raw = text.encode("utf-8", "surrogatepass")
    if not lora and not salt:
        whole = len(raw) - len(raw) % block_bytes
        return chain([_xxh3(raw[i : i + block_bytes], SEED) for i in range(0, whole, block_bytes)])
    first = extra_bytes(lora=lora, salt=salt)
    every = extra_bytes(lora=lora)
    local = [
        _xxh3(raw[i : i + block_bytes] + (first if i == 0 else every), SEED)
        for i in range(0, len(raw) - len(raw) % block_bytes, block_bytes)
    ]
    return chain(local)
