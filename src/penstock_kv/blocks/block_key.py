"""Block keys: the cryptographic names of stored KV blocks, salted by all that decides a block's bytes.

A key is 20 bytes, and describes itself:

    u8 source | u8 version | u16be attention group | BLAKE2b-128 digest

``source`` says what was hashed: the block's tokens, or the full hash that an engine gave for the block. The digest is
keyed by the `KeyIdentity` (model, dtype, layout, block size, weights, LoRA adapter, tenant), so blocks of two
identities never share a key. Keys of tokens are chained: the digest of block i goes into that of block i + 1, and so
stands for the whole prefix. The routing hash (`penstock.kernel.hashing`) is not cryptographic and names no stored KV.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.hashing import BYTES_PER_TOKEN, token_bytes

BlockKey = NewType("BlockKey", bytes)

VERSION = 2
OF_TOKENS, OF_ENGINE_HASH = 1, 2
DIGEST = 16
"""Bytes of a digest: 2**64 blocks until a collision is likely, also for a tenant who looks for one."""
PREFIX = 4
ENGINE_HASHES = ("sha256", "sha256_cbor")
"""vLLM's ``--prefix-caching-hash-algo`` whose hashes can name stored KV; its xxhash ones are not cryptographic."""

_NO_PARENT = bytes(DIGEST)


class KeyIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides a block's bytes besides its tokens.

    Args:
        layout: digest or name of how a block's bytes lie, parallelism included.
        block_size: tokens.
        weights: identity of the model's files; empty where it is not known.
        lora: identity of the adapter's; empty for none.
        tenant: who may share blocks with each other; empty for all.
    """

    model: str
    dtype: str
    layout: str
    block_size: int
    weights: str = ""
    lora: str = ""
    tenant: str = ""

    def root(self, source: int) -> bytes:
        """Return the key of the keyed hash, 32 bytes."""
        return blake2b(
            msgspec.msgpack.encode([source, VERSION, *msgspec.structs.astuple(self)]),
            digest_size=32,
            person=b"penstock-block",
        ).digest()


def token_keys(
    tokens: Sequence[int],
    identity: KeyIdentity,
    *,
    extras: Sequence[bytes] | None = None,
    parent: BlockKey | None = None,
    group: int = 0,
) -> list[BlockKey]:
    """Return the key of every full block of a prompt, shape (n // block_size,).

    Args:
        tokens: those after ``parent``, shape (n,).
        extras: per block, what else decides its KV, such as images (`penstock.kernel.hashing.block_extras`).
        parent: the block before the first one; None at the start of a prompt.
        group: attention group.
    Cost: about 2 us per block of 16 tokens, `token_bytes` included.
    """
    stride = identity.block_size * BYTES_PER_TOKEN
    raw = token_bytes(tokens)
    fresh = blake2b(digest_size=DIGEST, key=identity.root(OF_TOKENS)).copy
    prefix = _prefix(OF_TOKENS, group)
    digest = _NO_PARENT if parent is None else parent[PREFIX:]
    keys: list[BlockKey] = []
    for number in range(len(raw) // stride):
        start = number * stride
        hasher = fresh()
        hasher.update(digest + raw[start : start + stride])
        if extras is not None:
            hasher.update(extras[number])
        digest = hasher.digest()
        keys.append(BlockKey(prefix + digest))
    return keys


def engine_keys(hashes: Sequence[bytes], algorithm: str, identity: KeyIdentity, *, group: int = 0) -> list[BlockKey]:
    """Return a key for each full hash that an engine gives for its blocks (they are chained already).

    Raises:
        ConfigError: the engine's hash is not cryptographic, so two prompts could be made to share a block.
    """
    if algorithm not in ENGINE_HASHES:
        raise ConfigError(
            f"prefix caching hash {algorithm!r} can't name stored KV: it is not cryptographic",
            hint="start vLLM with --prefix-caching-hash-algo sha256_cbor, and with PYTHONHASHSEED set to one value "
            "everywhere so that the keys are the same after a restart",
        )
    fresh = blake2b(digest_size=DIGEST, key=identity.root(OF_ENGINE_HASH)).copy
    prefix = _prefix(OF_ENGINE_HASH, group)
    keys: list[BlockKey] = []
    for value in hashes:
        hasher = fresh()
        hasher.update(value)
        keys.append(BlockKey(prefix + hasher.digest()))
    return keys


def _prefix(source: int, group: int) -> bytes:
    return bytes((source, VERSION)) + group.to_bytes(2, "big")
