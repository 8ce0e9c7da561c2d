"""Do prompts share exactly the prefixes that their hash ids say, and does the infinite cache count them right?"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.hashing import block_hashes
from penstock_lab.traffic.hit_rate_bound import InfiniteCache, infinite_cache_bound
from penstock_lab.traffic.prompt_maker import PromptMaker
from penstock_lab.traffic.traffic_request import TrafficRequest
from tests.lab.traffic.shared_tokens import shared_tokens


def request(ids: list[int], isl: int, size: int) -> TrafficRequest:
    return TrafficRequest(at=0.0, isl=isl, osl=1, hash_ids=ids, block_size=size)


@st.composite
def prompts(draw: st.DrawFn, size: int) -> TrafficRequest:
    """Few ids, so that prompts meet; the last block is cut at any length."""
    ids = draw(st.lists(st.sampled_from([0, 1, 2, 3, 252, 253, 254, (1 << 64) - 1]), min_size=1, max_size=6))
    cut = draw(st.integers(1, size))
    return request(ids, (len(ids) - 1) * size + cut, size)


ranges = st.sampled_from([(3, 256), (0, 2), (100, 100_000), (0, 7)])


@given(one=prompts(64), other=prompts(64), seed=st.integers(0, 1 << 64), tokens=ranges)
def test_two_prompts_share_what_their_ids_share(
    one: TrafficRequest, other: TrafficRequest, seed: int, tokens: tuple[int, int]
) -> None:
    maker = PromptMaker(seed, tokens=tokens)
    mine, theirs = maker.tokens(one), maker.tokens(other)
    assert (len(mine), len(theirs)) == (one.isl, other.isl)
    assert all(tokens[0] <= token < tokens[1] for token in mine)
    promised = shared_tokens(one, other)
    assert mine[:promised] == theirs[:promised]
    end = min(promised + maker.distinct_after, one.isl, other.isl)
    if end == promised + maker.distinct_after and one.block_size >= maker.distinct_after:
        assert mine[promised:end] != theirs[promised:end]


@given(one=prompts(64), other=prompts(64), block=st.sampled_from([16, 32, 64]))
def test_sharing_is_exact_in_the_engines_blocks(one: TrafficRequest, other: TrafficRequest, block: int) -> None:
    maker = PromptMaker(7)
    mine, theirs = (block_hashes(maker.tokens(each), block) for each in (one, other))
    agreeing = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
    )
    assert agreeing == shared_tokens(one, other) // block


@given(one=prompts(32))
def test_json_is_the_same_prompt(one: TrafficRequest) -> None:
    maker = PromptMaker(3)
    assert msgspec.json.decode(maker.json(one)) == maker.tokens(one)


def test_blocks_are_remade_alike_after_they_were_dropped() -> None:
    small, large = PromptMaker(5, blocks_cached=1), PromptMaker(5)
    wanted = request([1, 2, 1, 3, 2], 5 * 512 - 100, 512)
    assert small.tokens(wanted) == large.tokens(wanted) == small.tokens(wanted)
    assert PromptMaker(6).tokens(wanted) != large.tokens(wanted)


def test_what_has_no_tokens_says_so() -> None:
    with pytest.raises(ValueError, match="do not cover"):
        PromptMaker().tokens(request([1], 513, 512))
    with pytest.raises(ValueError, match="only a tokenizer"):
        PromptMaker().tokens(TrafficRequest(at=0, isl=5, osl=1, messages=[]))
    with pytest.raises(ValueError, match="range"):
        PromptMaker(tokens=(5, 6))


@given(st.lists(prompts(32), max_size=12), st.sampled_from([8, 16, 32, 48, 64]))
def test_infinite_cache_agrees_with_a_set_of_all_prefixes(requests: list[TrafficRequest], block: int) -> None:
    """The naive twin holds the tokens of every block-aligned prefix that was ever seen."""
    maker = PromptMaker(1)
    seen: set[tuple[int, ...]] = set()
    cache = InfiniteCache(block)
    hits = tokens = 0
    for each in requests:
        prompt = tuple(maker.tokens(each))
        depth = 0
        while depth + block < len(prompt) and prompt[: depth + block] in seen:
            depth += block
        seen.update(prompt[:end] for end in range(block, len(prompt) + 1, block))
        assert cache.hit(each) == depth
        hits, tokens = hits + depth, tokens + len(prompt)
    assert cache.share == (hits / tokens if tokens else None)
    by_tokens = InfiniteCache(block)
    for each in requests:
        by_tokens.hit(TrafficRequest(at=0, isl=each.isl, osl=1, token_ids=maker.tokens(each)))
    assert by_tokens.hits == hits


def test_bound_of_the_same_prompt_twice_leaves_its_last_token() -> None:
    same = request([1, 2], 1024, 512)
    assert infinite_cache_bound([same, same], 64) == (1024 - 64) / 2048
    assert infinite_cache_bound([], 64) is None
