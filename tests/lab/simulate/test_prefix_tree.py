"""Do names of blocks agree exactly as far as prompts do, whatever the sizes of the trace's blocks and the engine's?"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_lab.simulate.prefix_tree import PrefixTree
from penstock_lab.traffic.traffic_request import ChatMessage, TrafficRequest
from tests.lab.traffic.shared_tokens import shared_tokens

SIZES = st.sampled_from([(512, 64), (16, 64), (16, 16), (48, 32), (64, 48), (7, 5), (512, 100)])


def request(ids: list[int], unit: int, cut: int) -> TrafficRequest:
    return TrafficRequest(at=0.0, isl=len(ids) * unit - cut, osl=1, hash_ids=ids, block_size=unit)


@given(SIZES, st.integers(0, 2**32), st.integers(2, 12))
def test_two_prompts_share_names_as_far_as_they_share_whole_blocks(sizes: tuple[int, int], seed: int, n: int) -> None:
    unit, size = sizes
    rng = random.Random(seed)
    names = PrefixTree(size)
    base = [rng.randrange(5) for _ in range(n)]
    prompts = []
    for _ in range(5):
        keep = rng.randrange(n + 1)
        ids = base[:keep] + [rng.randrange(5) for _ in range(rng.randrange(1, 6))]
        prompts.append(request(ids, unit, rng.randrange(unit)))
    found = [names.blocks(prompt) for prompt in prompts]
    for one, mine in zip(prompts, found, strict=True):
        assert len(mine) == one.isl // size
        assert len(set(mine)) == len(mine)
        for other, theirs in zip(prompts, found, strict=True):
            depth = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
            assert depth == shared_tokens(one, other) // size
            assert not set(mine[depth:]) & set(theirs[depth:]), "a name stands for its whole prefix"


def test_names_are_a_function_of_the_order_alone() -> None:
    prompts = [request([1, 2, 3], 16, 0), request([1, 2, 4], 16, 3), request([9], 16, 0)]
    one, other = PrefixTree(16), PrefixTree(16)
    assert [one.blocks(p) for p in prompts] == [other.blocks(p) for p in prompts]


def test_prompts_of_different_traces_share_nothing() -> None:
    names = PrefixTree(16)
    assert not set(names.blocks(request([1, 2], 32, 0))) & set(names.blocks(request([1, 2], 16, 0)))


def test_a_prompt_without_ids_shares_nothing() -> None:
    names = PrefixTree(16)
    bare = TrafficRequest(at=0.0, isl=40, osl=1)
    assert len(names.blocks(bare)) == 2
    assert not set(names.blocks(bare)) & set(names.blocks(bare))


@pytest.mark.parametrize("size", [8, 16, 32, 12])
def test_where_ids_end_before_the_prompt_only_what_they_cover_has_names(size: int) -> None:
    names = PrefixTree(size)
    short = TrafficRequest(at=0.0, isl=100, osl=1, hash_ids=[5, 6], block_size=16)
    longer = TrafficRequest(at=0.0, isl=100, osl=1, hash_ids=[5, 6, 7, 8, 9, 10], block_size=16)
    found = names.blocks(short)
    assert len(found) == 32 // size and names.blocks(longer)[: len(found)] == found


def test_token_prompts_are_hashed_as_a_live_router_does() -> None:
    names = PrefixTree(4)
    one = TrafficRequest(at=0.0, isl=9, osl=1, token_ids=list(range(9)))
    other = TrafficRequest(at=0.0, isl=9, osl=1, token_ids=[*range(5), 7, 7, 7, 7])
    assert names.blocks(one)[0] == names.blocks(other)[0] and names.blocks(one)[1] != names.blocks(other)[1]


def test_text_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        PrefixTree(4).blocks(TrafficRequest(at=0.0, isl=9, osl=1, messages=[ChatMessage("user", "hello")]))
