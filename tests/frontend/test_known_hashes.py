"""Hashes that are looked up, beside the same computed from the beginning."""

from array import array
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.frontend.prompt import known_hashes
from penstock.frontend.prompt.known_hashes import CHUNK_BLOCKS, KnownHashes
from penstock.kernel.hashing import block_hashes, local_hashes
from tests.depth import deep

SIZE = 16
CHUNK = CHUNK_BLOCKS * SIZE

names = st.sampled_from([None, "a", "b"])
prompts = st.tuples(st.lists(st.integers(0, 1), max_size=24), st.integers(1, 3), names, names)


@given(asked=st.lists(prompts, max_size=12), bytes_max=st.sampled_from([0, 2_000, 1 << 20]), same=st.booleans())
@settings(max_examples=deep(200))
def test_what_is_looked_up_is_what_would_be_computed(
    asked: list[tuple[list[int], int, str | None, str | None]], bytes_max: int, same: bool
) -> None:
    known = KnownHashes(bytes_max)
    digest = mock.patch.object(known_hashes, "xxh3_64_intdigest", lambda tokens, seed: len(tokens) if same else seed)
    with mock.patch.object(known_hashes, "CHUNK_BLOCKS", 2), digest:
        for tokens, size, lora, salt in asked * 2:
            words = array("I", tokens)
            assert known.block_hashes(words, size, lora=lora, salt=salt) == block_hashes(
                words, size, lora=lora, salt=salt
            )
            assert known.bytes <= bytes_max and bool(known.bytes) == bool(len(known))


@pytest.fixture
def hashed() -> Iterator[list[int]]:
    """How many tokens were hashed by each call."""
    counts: list[int] = []

    def counted(tokens: Sequence[int], size: int, extras: Sequence[bytes] | None) -> list[int]:
        counts.append(len(tokens))
        return local_hashes(tokens, size, extras)

    with mock.patch.object(known_hashes, "local_hashes", counted):
        yield counts


def test_only_what_follows_a_known_beginning_is_hashed(hashed: list[int]) -> None:
    known = KnownHashes()
    first = array("I", range(5 * CHUNK + 40))
    longer, other = first + array("I", range(CHUNK)), first[: 3 * CHUNK] + array("I", [7]) * CHUNK
    for prompt in (first, first, longer, longer, other, first):
        assert known.block_hashes(prompt, SIZE) == block_hashes(prompt, SIZE)
    assert hashed == [5 * CHUNK + 40, 40, CHUNK + 40, 40, CHUNK, 40]


def test_other_adapters_salts_and_block_sizes_are_other_prompts(hashed: list[int]) -> None:
    known = KnownHashes()
    prompt = array("I", range(2 * CHUNK))
    known.block_hashes(prompt, SIZE)
    for lora, salt, size in (("a", None, SIZE), (None, "a", SIZE), (None, None, SIZE // 2)):
        expected = block_hashes(prompt, size, lora=lora, salt=salt)
        assert known.block_hashes(prompt, size, lora=lora, salt=salt) == expected
    assert hashed == [2 * CHUNK] * 4


def test_the_longest_unused_chunks_go() -> None:
    known = KnownHashes()
    known.block_hashes(array("I", range(2 * CHUNK)), SIZE)
    known = KnownHashes(bytes_max=known.bytes)
    known.block_hashes(array("I", range(2 * CHUNK)), SIZE)
    assert len(known) == 2
    known.block_hashes(array("I", range(CHUNK)), SIZE)
    known.block_hashes(array("I", range(9, CHUNK + 9)), SIZE)
    assert len(known) == 2
    with mock.patch.object(known_hashes, "local_hashes", wraps=local_hashes) as hashing:
        known.block_hashes(array("I", range(CHUNK)), SIZE)
    assert len(hashing.call_args[0][0]) == 0
