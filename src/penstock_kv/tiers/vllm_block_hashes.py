"""Hashes that vLLM gives to the full blocks of a prompt, with ``--prefix-caching-hash-algo sha256_cbor``."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from penstock.kernel.errors import ConfigError
from penstock_kv.tiers.tier_admin_protocol import CacheStat

_ARRAY, _BYTES, _TEXT, _NULL = 4, 2, 3, b"\xf6"


def prompt_hashes(prompt: str, tokenizer: str, stat: CacheStat, seed: str) -> list[bytes]:
    """Return the hash of every full block of a prompt, which is sent as it is, without a chat template.

    Args:
        tokenizer: folder or tokenizer.json of the model.
        seed: the engine's PYTHONHASHSEED.
    Raises:
        ConfigError: the engine hashes in another way, or there is no such tokenizer.
    """
    if stat.hash_algorithm != "sha256_cbor":
        raise ConfigError(
            f"the hashes of a prompt are known for sha256_cbor only, and this engine has {stat.hash_algorithm!r}",
            hint="pin by KEYS, as 'penstock cache ls' shows them",
        )
    from tokenizers import Tokenizer

    file = Path(tokenizer) / "tokenizer.json" if Path(tokenizer).is_dir() else Path(tokenizer)
    if not file.is_file():
        raise ConfigError(f"there is no tokenizer {file}", hint="name the model's folder or its tokenizer.json")
    return token_hashes(Tokenizer.from_file(str(file)).encode(prompt).ids, stat.block_tokens, seed)


def token_hashes(tokens: Sequence[int], block_tokens: int, seed: str) -> list[bytes]:
    """Return the chained hash of every full block: SHA-256 of CBOR of (parent, tokens, no extra keys)."""
    parent = sha256(_cbor_head(_TEXT, len(seed.encode())) + seed.encode()).digest()
    hashes = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = b"".join(_cbor_head(0, token) for token in tokens[start : start + block_tokens])
        array = _cbor_head(_ARRAY, block_tokens) + block
        parent = sha256(_cbor_head(_ARRAY, 3) + _cbor_head(_BYTES, len(parent)) + parent + array + _NULL).digest()
        hashes.append(parent)
    return hashes


def _cbor_head(major: int, number: int) -> bytes:
    """Return a CBOR head (RFC 8949, section 3): the major type and a number in as few bytes as it needs."""
    if number < 24:
        return bytes((major << 5 | number,))
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * size:
            return bytes((major << 5 | code,)) + number.to_bytes(size, "big")
    raise ValueError(f"{number} is not a CBOR number")
