"""Keys differ wherever bytes may differ, and stay the same over a restart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.errors import ConfigError
from penstock_kv.blocks.block_key import (
    OF_ENGINE_HASH,
    OF_TOKENS,
    KeyIdentity,
    engine_keys,
    token_keys,
)

IDENTITY = KeyIdentity(model="m", dtype="bf16", layout="NHD", block_size=4)
TOKENS = list(range(12))
FIXED = [
    "010200008aa286f92697ff06c02e8db79cff0496",
    "01020000c512f8ef158dd9f90faa573f2a943ff5",
    "01020000a7b12a84a17bf9b4cae6752b37839512",
]
FIXED_ENGINE = "02020000e2eefb2ee533d93181d5fbd758690168"
OTHERS = [
    KeyIdentity(model="n", dtype="bf16", layout="NHD", block_size=4),
    KeyIdentity(model="m", dtype="fp8", layout="NHD", block_size=4),
    KeyIdentity(model="m", dtype="bf16", layout="HND", block_size=4),
    KeyIdentity(model="m", dtype="bf16", layout="NHD", block_size=4, weights="a"),
    KeyIdentity(model="m", dtype="bf16", layout="NHD", block_size=4, lora="a"),
    KeyIdentity(model="m", dtype="bf16", layout="NHD", block_size=4, tenant="a"),
]


def test_keys_are_those_of_every_release_with_this_version() -> None:
    keys = token_keys(TOKENS, IDENTITY)
    assert [key.hex() for key in keys] == FIXED
    assert engine_keys([b"\1" * 32], "sha256_cbor", IDENTITY)[0].hex() == FIXED_ENGINE


def test_all_that_decides_the_bytes_decides_the_key() -> None:
    keys = [tuple(token_keys(TOKENS, identity)) for identity in (IDENTITY, *OTHERS)]
    keys.append(tuple(token_keys(TOKENS, IDENTITY, extras=[b"image", b"", b""])))
    keys.append(tuple(token_keys(TOKENS, IDENTITY, group=1)))
    keys.append(tuple(engine_keys([b"a", b"b", b"c"], "sha256", IDENTITY)))
    names = [key for each in keys for key in each]
    assert len(set(names)) == len(names) == 30


@given(st.lists(st.integers(0, 2**32 - 1), max_size=30), st.integers(0, 7))
def test_keys_are_chained_and_go_on_from_any_block(tokens: list[int], cut: int) -> None:
    keys = token_keys(tokens, IDENTITY)
    cut = min(cut, len(keys))
    rest = token_keys(tokens[cut * 4 :], IDENTITY, parent=keys[cut - 1] if cut else None)
    assert keys[:cut] + rest == keys
    if len(keys) > 1:
        changed = [tokens[0] ^ 1, *tokens[1:]]
        assert not set(token_keys(changed, IDENTITY)) & set(keys)


def test_a_key_describes_itself() -> None:
    key = token_keys(TOKENS, IDENTITY)[0]
    assert key[:4] == bytes((OF_TOKENS, 2, 0, 0))
    assert engine_keys([b"x"], "sha256", IDENTITY, group=2)[0][:4] == bytes((OF_ENGINE_HASH, 2, 0, 2))


def test_an_engine_hash_that_can_be_forged_names_nothing() -> None:
    with pytest.raises(ConfigError, match="sha256_cbor"):
        engine_keys([b"x"], "xxhash", IDENTITY)
