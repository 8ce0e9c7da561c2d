"""Do arrivals keep their rate, workloads their order and sharing, and slices what they promise?"""

import itertools
import random
import statistics
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.reading.units import parse_number
from penstock.kernel.errors import ConfigError
from penstock_lab.traffic import arrivals, trace_slices
from penstock_lab.traffic.arrival_patterns import parse_arrivals
from penstock_lab.traffic.hit_rate_bound import infinite_cache_bound
from penstock_lab.traffic.lengths import Empirical, Fixed, Lognormal
from penstock_lab.traffic.planned_sessions import Form
from penstock_lab.traffic.prompt_maker import PromptMaker
from penstock_lab.traffic.traffic_request import TrafficRequest
from penstock_lab.traffic.workloads import Coding, Name, Plain, plain, workload
from tests.lab.traffic.shared_tokens import shared_tokens

KINDS = ["poisson", "gamma", "constant", "bursts"]


@pytest.mark.parametrize("kind", KINDS)
def test_arrivals_ascend_keep_their_rate_and_their_seed(kind: str) -> None:
    def times(seed: int) -> list[float]:
        return list(itertools.islice(parse_arrivals(kind, parse_number).stream(50.0, random.Random(seed)), 60_000))

    found = times(1)
    assert found == sorted(found) == times(1)
    assert len(found) / found[-1] == pytest.approx(50.0, rel=0.1)


def test_gamma_gaps_are_as_bursty_as_asked() -> None:
    found = list(itertools.islice(arrivals.gamma(10.0, 3.0, random.Random(2)), 50_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(found)]
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(3.0, rel=0.1)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="rate"):
        next(arrivals.poisson(0.0, random.Random(0)))


def test_lengths_stay_in_range_and_follow_their_weights() -> None:
    rng = random.Random(3)
    drawn = sorted(Lognormal(100, 1.0, 10, 500).sample(rng) for _ in range(4001))
    assert drawn[0] >= 10
    assert drawn[-1] <= 500
    assert drawn[2000] == pytest.approx(100, rel=0.1)
    observed = Empirical.of_histogram({8: 3, 4: 1, 6: 0})
    counts = [observed.sample(rng) for _ in range(8000)]
    assert set(counts) == {4, 8}
    assert counts.count(8) / 8000 == pytest.approx(0.75, abs=0.03)
    assert Fixed(9).sample(rng) == 9
    with pytest.raises(ValueError, match="at least one"):
        Empirical([])


@pytest.mark.parametrize("form", ["tokens", "text"])
@pytest.mark.parametrize("name", get_args(Name))
def test_a_workload_ascends_keeps_its_rate_and_its_seed(name: Name, form: Form) -> None:
    if (name, form) == ("images", "text"):
        with pytest.raises(ConfigError, match="no form of text"):
            next(workload(name, 20.0, random.Random(1), form=form))
        return

    def take(seed: int, count: int) -> list[TrafficRequest]:
        return list(itertools.islice(workload(name, 20.0, random.Random(seed), form=form), count))

    count = (10 if name == "coding" else 300) if form == "text" else 4000
    found = take(1, count)
    assert [each.at for each in found] == sorted(each.at for each in found)
    assert found[:50] == take(1, min(50, count))
    if form == "tokens":
        for part in (found[: count // 2], found[count // 2 :]):  # no slow start while sessions gather
            assert (len(part) - 1) / (part[-1].at - part[0].at) == pytest.approx(20.0, rel=0.25)
        assert 0.0 <= found[0].at < 2.0
        assert all(-(-each.isl // each.block_size) == len(each.hash_ids) for each in found)
    else:
        assert all(each.messages and not each.hash_ids for each in found)


def test_programs_of_coding_agents_share_what_is_theirs_and_grow_long() -> None:
    found = list(itertools.islice(workload("coding", 5.0, random.Random(5)), 6000))
    assert max(each.isl for each in found) > 120_000
    assert all(each.isl + each.osl <= Coding().context_max for each in found)
    assert statistics.fmean(each.osl for each in found) == pytest.approx(1000, rel=0.1)
    last: dict[str, TrafficRequest] = {}
    first: dict[str, TrafficRequest] = {}
    grown = shared = 0
    for each in found:
        assert each.session is not None and each.program is not None and each.session.startswith(f"{each.program}/")
        before = last.get(each.session)
        if before is not None:
            assert each.hash_ids[: len(before.hash_ids)] == before.hash_ids and each.turn == before.turn + 1
            assert each.think is not None
            grown += 1
        elif each.program in first and each.session != first[each.program].session:
            other = first[each.program]
            assert shared_tokens(each, other) > 6000  # system prompt, tools and project
            shared += 1
        last[each.session] = each
        first.setdefault(each.program, each)
    assert grown > 1000 and shared > 100
    pauses = sorted(each.think for each in found if each.think is not None)
    assert pauses[len(pauses) // 2] < 5.0 and pauses[-len(pauses) // 100] > 60.0  # a heavy tail


def test_later_turns_extend_the_prompt_of_earlier_ones() -> None:
    last: dict[str, TrafficRequest] = {}
    turns = 0
    for each in itertools.islice(workload("agent", 50.0, random.Random(4)), 2000):
        assert each.session is not None
        before = last.get(each.session)
        if before is not None:
            turns += 1
            assert each.turn == before.turn + 1
            assert each.hash_ids[: len(before.hash_ids)] == before.hash_ids
        last[each.session] = each
    assert turns > 500


@pytest.mark.parametrize(("name", "least"), [("chat", 0.4), ("rag", 0.1), ("agent", 0.8), ("tenants", 0.8)])
def test_workloads_share_as_their_kind_does(name: Name, least: float) -> None:
    bound = infinite_cache_bound(itertools.islice(workload(name, 20.0, random.Random(5)), 1000), 64)
    assert bound is not None
    assert least < bound < 1.0


def test_plain_requests_are_exactly_as_long_as_asked_and_share_nothing() -> None:
    shape = Plain(prompt=Fixed(1000), answer=Fixed(50))
    found = list(itertools.islice(plain(20.0, random.Random(5), shape=shape), 500))
    assert {(each.isl, each.osl, each.session, each.kind) for each in found} == {(1000, 50, None, "fixed")}
    assert infinite_cache_bound(found, 16) == 0.0


def test_tenants_share_their_system_prompts_only() -> None:
    shape = Plain(prompt=Fixed(100), tenants=3, system_length=Fixed(64))
    found = list(itertools.islice(plain(20.0, random.Random(5), shape=shape, kind="tenants"), 300))
    assert {(each.isl, each.kind) for each in found} == {(164, "tenants")}
    firsts = [tuple(each.hash_ids[:4]) for each in found]
    assert len(set(firsts)) == 3
    assert (
        firsts.count(max(firsts, key=firsts.count)) > 300 * 0.45
    )  # the first tenant of three has 6/11 of the requests
    assert infinite_cache_bound(found, 16) == pytest.approx(64 / 164, rel=0.02)
    texts = list(itertools.islice(plain(20.0, random.Random(5), shape=shape, form="text"), 300))
    assert len({each.messages[0].content for each in texts if each.messages}) == 3


def test_text_turns_share_their_text() -> None:
    by_session: dict[str, list[TrafficRequest]] = {}
    for each in itertools.islice(workload("chat", 20.0, random.Random(6), form="text"), 400):
        assert each.session is not None
        by_session.setdefault(each.session, []).append(each)
    pairs = [pair for turns in by_session.values() for pair in itertools.pairwise(turns)]
    assert len(pairs) > 50
    for before, after in pairs:
        assert before.messages
        assert after.messages
        assert after.messages[: len(before.messages)] == before.messages


def at(times: list[float]) -> list[TrafficRequest]:
    return [TrafficRequest(at=time, isl=1, osl=1, hash_ids=[index]) for index, time in enumerate(times)]


def test_slices_cut_shift_and_speed_up() -> None:
    trace = at([0.0, 1.0, 2.0, 3.0])
    cut = list(trace_slices.rebase(trace_slices.by_time(trace, 1.0, 3.0), 1.0))
    assert [(each.at, each.hash_ids) for each in cut] == [(0.0, [1]), (1.0, [2])]
    assert [each.at for each in trace_slices.scale_rate(trace, 4.0)] == [0.0, 0.25, 0.5, 0.75]
    assert [each.at for each in trace_slices.by_count(trace, 2, skip=1)] == [1.0, 2.0]
    assert [each.at for each in trace_slices.rebase(trace_slices.by_count(trace, None, skip=2))] == [0.0, 1.0]


@given(st.lists(st.sampled_from([0.0, 3.0, 6.0, 9.0]), max_size=20).map(sorted))
def test_ties_are_spread_without_changing_the_order(times: list[float]) -> None:
    before = at(times)
    after = list(trace_slices.spread_ties(before))
    assert [each.hash_ids for each in after] == [each.hash_ids for each in before]
    assert [each.at for each in after] == sorted(each.at for each in after)
    for old, new in zip(before, after, strict=True):
        assert old.at <= new.at < old.at + 9.0
    early = [each.at for each in after if each.at < (times[-1] if times else 0.0)]
    assert len(set(early)) == len(early)


def test_workload_prompts_become_tokens() -> None:
    maker = PromptMaker(1)
    for each in itertools.islice(workload("rag", 5.0, random.Random(9)), 5):
        assert len(maker.tokens(each)) == each.isl


def test_conversations_are_dealt_evenly() -> None:
    trace = list(itertools.islice(workload("chat", 20.0, random.Random(7)), 4000))
    parts = trace_slices.deal_conversations(trace, 8)
    assert sorted((each.at, each.session) for part in parts for each in part) == [(e.at, e.session) for e in trace]
    owners = [{each.session for each in part} for part in parts]
    assert sum(len(names) for names in owners) == len(set().union(*owners))
    assert max(len(part) for part in parts) - min(len(part) for part in parts) < 0.05 * len(trace) / 8
    bounds = [infinite_cache_bound(part, 64) or 0.0 for part in parts]
    assert max(bounds) - min(bounds) < 0.05
    with pytest.raises(ValueError, match="hash ids"):
        trace_slices.deal_conversations([TrafficRequest(at=0, isl=1, osl=1)], 2)
