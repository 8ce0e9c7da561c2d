"""Which bytes are hashed? Constants that other routers compute too, and the shapes around them."""

import struct
from array import array

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.hashing import block_hashes, chain, extra_bytes, local_hashes, text_hashes, token_bytes

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def xxh3(raw: bytes) -> int:
    return xxhash.xxh3_64_intdigest(raw, seed=1337)


def test_the_local_hash_is_the_one_that_the_field_computes() -> None:
    assert local_hashes(range(16), 16) == [0xD47A8F41C833328A]


def test_the_bytes_of_a_block_are_its_tokens_as_little_endian_u32() -> None:
    assert token_bytes([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    assert token_bytes(array("I", [7])) == token_bytes([7]) == b"\x07\0\0\0"


def test_the_chain_hashes_the_parent_and_the_local_hash_as_little_endian_u64() -> None:
    first, second = local_hashes(range(32), 16)
    assert chain([first, second]) == [first, xxh3(struct.pack("<QQ", first, second))]
    assert chain([first, second])[1:] == chain([second], parent=first)
    assert block_hashes(range(32), 16) == chain([first, second])


@given(tokens, st.integers(1, 9), st.integers(0, 8))
def test_a_chain_can_be_taken_up_anywhere(prompt: list[int], size: int, cut: int) -> None:
    every = block_hashes(prompt, size)
    assert len(every) == len(prompt) // size
    head = every[:cut]
    tail = chain(local_hashes(prompt[len(head) * size :], size), head[-1] if head else None)
    assert [*head, *tail] == every


@given(tokens, st.integers(0, 69), st.integers(0, 2**32 - 1))
def test_a_block_stands_for_its_whole_prefix(prompt: list[int], at: int, token: int) -> None:
    if at >= len(prompt) or prompt[at] == token:
        return
    changed = [*prompt[:at], token, *prompt[at + 1 :]]
    before, after = block_hashes(prompt, 4), block_hashes(changed, 4)
    assert before[: at // 4] == after[: at // 4]
    assert all(a != b for a, b in zip(before[at // 4 :], after[at // 4 :], strict=True))


def test_extras_are_tagged_records() -> None:
    assert extra_bytes() == b""
    assert extra_bytes(lora="lo") == b"\x01\x02\0\0\0lo"
    assert extra_bytes(lora="é", salt="s", multimodal=[b"\x00\xff"]) == (
        b"\x01\x02\0\0\0\xc3\xa9" + b"\x02\x01\0\0\0s" + b"\x03\x02\0\0\0\x00\xff"
    )


def test_extras_follow_the_tokens_of_their_block() -> None:
    plain, extra = token_bytes(range(4)), extra_bytes(lora="a")
    assert local_hashes(range(8), 4, [extra, b""]) == [xxh3(plain + extra), xxh3(token_bytes(range(4, 8)))]


def test_the_adapter_is_in_every_block_and_the_salt_in_the_first() -> None:
    lora, salt = extra_bytes(lora="a"), extra_bytes(lora="a", salt="t")
    expected = chain(local_hashes(range(12), 4, [salt, lora, lora]))
    assert block_hashes(range(12), 4, lora="a", salt="t") == expected
    assert block_hashes([], 4, lora="a", salt="t") == []
    # Names can't run into each other: the length is part of the record.
    assert block_hashes(range(4), 4, lora="ab", salt="c") != block_hashes(range(4), 4, lora="a", salt="bc")


def test_a_salt_parts_two_tenants_from_the_first_block_on() -> None:
    a, b = (block_hashes(range(64), 16, salt=salt) for salt in ("a", "b"))
    assert not {*a} & {*b} and not {*a} & {*block_hashes(range(64), 16)}


def test_a_token_that_is_no_u32_is_an_error() -> None:
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            local_hashes([0, 1, 2, bad], 4)


def test_extras_must_be_one_per_block() -> None:
    with pytest.raises(ValueError):
        local_hashes(range(8), 4, [b""])


def test_text_is_hashed_in_blocks_of_utf8_bytes() -> None:
    text = "héllo wörld" * 10
    raw = text.encode()
    every = text_hashes(text, 16)
    assert every == chain([xxh3(raw[i : i + 16]) for i in range(0, len(raw) // 16 * 16, 16)])
    assert text_hashes(text + "x", 16)[: len(every)] == every
    assert text_hashes("short", 16) == [] and len(text_hashes("\ud800" * 16, 16)) == 3
    assert text_hashes(text, 16, salt="s")[0] != every[0]
    assert text_hashes(text, 16, lora="l") == chain(
        [xxh3(raw[i : i + 16] + extra_bytes(lora="l")) for i in range(0, len(raw) // 16 * 16, 16)]
    )
