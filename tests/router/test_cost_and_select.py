"""Costs by hand, and the choice that follows from them."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any, get_args
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from penstock.kernel.tiers.load_worth import LoadCosts
from penstock.kernel.values import Prompt, RequestId, Target, WorkerId, plain
from penstock.router.events import Cost
from penstock.router.kv_index.indexer import SOURCES, HeldBlocks, HistoryIndexer, column_of
from penstock.router.kv_index.kv_event_stream import KvEventStream
from penstock.router.model_pool import ModelPool
from penstock.router.selection.candidate import Candidate, RequestDemand, Speed
from penstock.router.selection.cost import (
    COSTS,
    NOTHING,
    TOTALS,
    TRANSFER_MS_PER_BLOCK,
    Candidates,
    CostTable,
    active_requests_of,
    block_cost,
    cached_beside_most,
    latency_cost,
    most_cached,
    totals_of,
)
from penstock.router.selection.select import discounted, probabilities, select
from penstock.router.settings import CostName, CostSettings, RouterSettings
from penstock.router.workers.active_sequences import ActiveSequences, TargetLoad
from tests.depth import deep
from tests.kernel.test_load_worth import COSTS as COSTS_REPORTED

SPEED = Speed(0.005, 1e-4, 1e-6)
NAMES = ["a", "b", "c", "d"]


def target(name: str) -> Target:
    return Target(WorkerId(name))


def demand(blocks: int = 10, size: int = 16, **changes: object) -> RequestDemand:
    fields: dict[str, object] = {
        "prompt": Prompt(blocks * size, list(range(1, blocks + 1))),
        "unhashed_blocks": 0,
        "block_size": size,
        "osl": 100.0,
        "least_prefill": 0,
        "overlap_credit": 1.0,
    }
    return RequestDemand(**{**fields, **changes})  # type: ignore[arg-type]


def load(prefill: int = 0, blocks: int = 0, requests: int = 0) -> TargetLoad:
    made = TargetLoad()
    made.prefill_tokens, made.unhashed_blocks, made.requests = prefill, blocks, requests
    return made


def candidate(name: str = "a", overlap: HeldBlocks | None = None, on: TargetLoad | None = None) -> Candidate:
    return Candidate(target(name), overlap or HeldBlocks(), on or load(), SPEED)


def test_the_fields_formula_by_hand() -> None:
    # (32 queued + 160 own) / 16 = 12 blocks of prefill, 4 of them cached; 7 blocks in use and 10 to come.
    cost = block_cost(demand(), candidate(overlap=HeldBlocks(4), on=load(32, 7, 2)), CostSettings())
    assert cost.total == 12 - 4 + 7 + 10
    assert (cost.prefill, cost.queue, cost.decode) == (6.0, 2.0, 17.0)
    assert cost.overlap_tokens == 64


def test_weights_scale_their_terms() -> None:
    settings = CostSettings(prefill_scale=2.0, request_weight=3.0, host_credit=0.5, disk_credit=0.25)
    cost = block_cost(demand(), candidate(overlap=HeldBlocks(4, 2, 4), on=load(0, 0, 2)), settings)
    assert cost.total == 2 * (10 - 4 - 1 - 1) + 10 + 3 * 2


def test_credit_fades_on_the_busier_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.selection.cost.CREDIT_DECAY", 1.0)
    busy = block_cost(demand(), candidate(overlap=HeldBlocks(10), on=load(160)), CostSettings())
    assert busy.total == pytest.approx(10 + 10 - 10 / (1 + 1) + 10)
    usual = block_cost(demand(least_prefill=160), candidate(overlap=HeldBlocks(10), on=load(160)), CostSettings())
    assert usual.total == pytest.approx(10 + 10 - 10 + 10), "all are as busy, so nothing fades"


def test_terms_add_up_to_the_total() -> None:
    for price in (block_cost, latency_cost):
        cost = price(demand(), candidate(overlap=HeldBlocks(3, 1), on=load(64, 5, 1)), CostSettings())
        assert cost.total == pytest.approx(cost.prefill + cost.queue + cost.decode + cost.transfer)


def test_a_full_hit_still_computes_the_last_block() -> None:
    assert block_cost(demand(), candidate(overlap=HeldBlocks(10)), CostSettings()).overlap_tokens == 144


def test_latency_by_hand() -> None:
    cost = latency_cost(demand(), candidate(overlap=HeldBlocks(2, 1), on=load(1000, 20, 3)), CostSettings())
    assert cost.prefill == pytest.approx(5 + 0.1 * (160 - 48))
    assert cost.queue == pytest.approx(100.0)
    assert cost.transfer == pytest.approx(TRANSFER_MS_PER_BLOCK)
    assert cost.decode == pytest.approx(1e3 * 1e-6 * 30 * 100)


def costs(*totals: float, running: list[int] | None = None) -> list[Cost]:
    return [
        Cost(
            target=target(NAMES[i]),
            unit="blocks",
            total=total,
            prefill=total,
            decode=0,
            queue=0,
            transfer=0,
            overlap_blocks=0,
            overlap_tokens=0,
            active_requests=running[i] if running else 0,
            active_prefill_tokens=0,
            active_blocks=0,
        )
        for i, total in enumerate(totals)
    ]


def test_kv_takes_the_cheapest_and_says_by_how_much() -> None:
    choice = select("kv", costs(5, 3, 9), random.Random(0))
    assert choice.cost.target.worker == "b" and "next a at 5.0" in choice.reason


def test_ties_are_drawn_evenly() -> None:
    rng = random.Random(0)
    drawn = Counter(select("kv", costs(1, 1, 1, 2), rng).cost.target.worker for _ in range(3000))
    assert set(drawn) == {"a", "b", "c"} and min(drawn.values()) > 850


def test_round_robin_takes_turns() -> None:
    order = [select("round_robin", costs(1, 2, 3), random.Random(0), turn=n).cost.target.worker for n in range(6)]
    assert order == ["a", "b", "c"] * 2


def test_least_loaded_and_power_of_two_look_at_running_requests() -> None:
    some = costs(0, 0, 0, 0, running=[4, 1, 3, 2])
    assert select("least_loaded", some, random.Random(0)).cost.target.worker == "b"
    rng = random.Random(0)
    drawn = Counter(select("power_of_two", some, rng).cost.target.worker for _ in range(2000))
    assert drawn["a"] == 0 and drawn["b"] > drawn["d"] > drawn["c"]


def test_random_uses_everyone() -> None:
    rng = random.Random(0)
    assert {select("random", costs(1, 9, 9), rng).cost.target.worker for _ in range(100)} == {"a", "b", "c"}


def test_no_candidates_is_an_error() -> None:
    with pytest.raises(ValueError, match="no candidates"):
        select("kv", [], random.Random(0))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.floats(0.01, 10))
def test_probabilities_sum_to_one_and_fall_with_cost(totals: list[float], temperature: float) -> None:
    shares = probabilities(totals, temperature)
    assert sum(shares) == pytest.approx(1.0)
    ranked = sorted(zip(totals, shares))
    assert all(a[1] >= b[1] - 1e-12 for a, b in pairwise(ranked))


def test_low_temperature_is_nearly_the_cheapest_and_high_is_nearly_even() -> None:
    assert probabilities([1.0, 2.0], 0.01)[0] > 0.999
    assert probabilities([1.0, 2.0], 100.0)[0] == pytest.approx(0.5, abs=0.01)


def test_active_sequences_feed_the_cost() -> None:
    active = ActiveSequences()

    active.place(RequestId("r"), target("a"), prefill_tokens=160, blocks=[1, 2, 3], unhashed_blocks=0, now=0)
    cost = block_cost(demand(), Candidate(target("a"), HeldBlocks(), active.load(target("a")), SPEED), CostSettings())
    assert cost.total == 20 + 10  # three of the ten blocks are in use there already


NUMBERS = st.floats(0, 5, allow_subnormal=False)
CANDIDATE = st.fixed_dictionaries(
    {
        "queued": st.integers(0, 50_000),
        "requests": st.integers(0, 40),
        "unhashed": st.integers(0, 500),
        "shared": st.integers(0, 12),
        "held": st.tuples(*map(st.integers, (0, 0, 0), (12, 3, 3)), st.just("exact"), st.integers(0, 3)),
        "speed": st.tuples(st.floats(0, 0.1), st.floats(1e-6, 1e-2), st.floats(0, 1e-4)),
        "distance": st.sampled_from([1.0, 2.0, 8.0, 0.3]),
        "adapter": st.sampled_from([0.0, 0.0, 0.7, 3.0]),
    }
)


@given(
    st.lists(CANDIDATE, min_size=1, max_size=40),
    st.builds(
        CostSettings,
        kind=st.sampled_from(["blocks", "latency"]),
        host_credit=NUMBERS,
        disk_credit=NUMBERS,
        prefill_scale=NUMBERS,
        decode_scale=NUMBERS,
        transfer_scale=NUMBERS,
        request_weight=NUMBERS,
    ),
    st.tuples(st.integers(0, 12), st.integers(1, 3_000), st.integers(1, 100)),
    st.tuples(NUMBERS, st.floats(1, 3_000), st.booleans(), NUMBERS, st.sampled_from([0.0, 1.0])),
)
def test_columns_price_as_one_by_one_does(
    found: list[dict[str, Any]],
    settings: CostSettings,
    sizes: tuple[int, int, int],
    wishes: tuple[float, float, bool, float, float],
) -> None:
    (blocks, isl, size), (credit, osl, handed, ms, decay) = sizes, wishes
    chain = list(range(1, blocks + 1))
    asked = RequestDemand(
        prompt=Prompt(isl, chain),
        unhashed_blocks=isl % 3,
        block_size=size,
        osl=osl,
        least_prefill=min(one["queued"] if one["requests"] else 0 for one in found),
        overlap_credit=credit,
        handed=handed,
        ms_per_block=ms,
    )
    active = ActiveSequences()
    targets = [(target(f"w{place}"), None) for place in range(len(found))]
    for (to, _), one in zip(targets, found):
        for number in range(one["requests"]):
            active.place(
                RequestId(f"{to}.{number}"),
                to,
                prefill_tokens=0 if number else one["queued"],
                blocks=chain[: one["shared"]],
                unhashed_blocks=0 if number else one["unhashed"],
                now=0,
            )
    held = {to: HeldBlocks(*one["held"]) for (to, _), one in zip(targets, found)}
    held = {to: one for to, one in held.items() if one.total or one.costly}
    with mock.patch("penstock.router.selection.cost.CREDIT_DECAY", decay):
        price = COSTS[settings.kind]
        rows = [
            price(
                asked,
                Candidate(
                    to, held.get(to, NOTHING), active.load(to), Speed(*one["speed"]), one["distance"], one["adapter"]
                ),
                settings,
            )
            for (to, _), one in zip(targets, found)
        ]
        columns = active.columns("aggregated", targets)
        held_by_target = [held.get(to, NOTHING) for to, _ in targets]
        tiers = [np.array([one[tier] for one in held_by_target]) for tier in (0, 1, 2, 4)]
        table = CostTable(
            asked,
            settings,
            targets,
            columns.place,
            Candidates(
                columns.numbers.copy(),
                active.shared(columns, chain),
                tiers[0],
                tiers[1:] if any(tier.any() for tier in tiers[1:]) else [],
                np.array([SOURCES.index(one.source) for one in held_by_target]),
                np.array([one["speed"] for one in found]).T,
                np.array([one["distance"] for one in found]),
                np.array([one["adapter"] for one in found]),
            ),
        )
        active.check()
        assert list(table) == rows and [table[place] for place in range(len(rows))] == rows and len(table) == len(rows)
        assert totals_of(table) == totals_of(rows) and active_requests_of(table) == active_requests_of(rows)
        assert msgspec.json.encode(table, enc_hook=plain) == msgspec.json.encode(rows)
        for mode in ("kv", "least_loaded", "power_of_two"):
            for temperature in (0.0, 0.5):
                choices = [select(mode, costs, random.Random(1), temperature=temperature) for costs in (table, rows)]
                assert choices[0] == choices[1]
        home = targets[len(rows) // 2][0]
        assert discounted(table, home) == discounted(rows, home) and discounted(table, None) is table


@given(st.tuples(*[st.integers(0, 3)] * 2), st.tuples(*[st.sampled_from([0, 0.0, 3, 1.5])] * 5))
def test_a_table_is_digested_with_its_numbers_as_they_are(held: tuple[int, int], numbers: tuple[float, ...]) -> None:
    """In the compiled build, too: both write the same journal."""
    targets = [(target("w0"), None), (target("w1"), None)]
    candidates = Candidates(np.zeros((3, 2), dtype=np.int64), 0, held[0], [], held[1], numbers[:3], *numbers[3:])
    table = CostTable(
        demand(), CostSettings(), targets, {to: place for place, (to, _) in enumerate(targets)}, candidates
    )
    assert table.content[-7:] == [repr(number).encode() for number in (*held, *numbers)]


HELD = st.fixed_dictionaries({name: st.tuples(*[st.integers(0, 5)] * 3) for name in NAMES})
DEPTHS = st.fixed_dictionaries({name: st.integers(0, 8) for name in NAMES})
PRICED = st.dictionaries(st.sampled_from(NAMES), COSTS_REPORTED)
OFTEN = st.sampled_from([True, True, True, False])


@hypothesis_settings(max_examples=deep(300), deadline=None)
@given(HELD, st.none() | DEPTHS, st.none() | DEPTHS, st.sets(st.sampled_from(NAMES)), OFTEN, OFTEN, PRICED)
def test_columns_say_what_the_overlap_by_name_says(
    held: dict[str, tuple[int, int, int]],
    guessed: dict[str, int] | None,
    predicted: dict[str, int] | None,
    known: set[str],
    hashed: bool,
    hears: bool,
    priced: dict[str, LoadCosts],
) -> None:
    place = {target(name): at for at, name in enumerate(reversed(NAMES))}
    pool = ModelPool("m", RouterSettings(mode="kv"))
    pool.index.streams = {target(name): KvEventStream() for name in known}
    pool.index.exact = mock.Mock(**{"windowed.return_value": False}) if hears else None
    if pool.index.exact is not None:
        pool.index.exact.overlap.return_value = {
            target(name): HeldBlocks(*tiers) for name, tiers in held.items() if any(tiers)
        }
        columns = [np.array([held[to.worker][tier] for to in place]) for tier in range(3)]
        pool.index.exact.columns.return_value = columns[0], columns[1:] if columns[1].any() or columns[2].any() else []
    pool.index.history, pool.index.predicted = (
        None if depths is None else mock.Mock(spec=HistoryIndexer) for depths in (guessed, predicted)
    )
    for index, depths in ((pool.index.history, guessed), (pool.index.predicted, predicted)):
        if index is not None and depths is not None:
            index.overlap.return_value = {target(name): depth for name, depth in depths.items() if depth}
            index.column.return_value = column_of(index.overlap.return_value, place)
    pool.index.block_size = 8
    prompt = Prompt(64, [1, 2, 3], estimated=not hashed)
    for name, costs in priced.items():
        pool.index.tier_costs.report(WorkerId(name), costs)

    device, lower, source = pool.index.overlap_columns(prompt, place, 0)

    nothing = np.zeros(len(place), dtype=int)
    device, source = nothing + device, nothing + source
    host, disk, costly = [*lower, nothing, nothing, nothing][:3]
    made = {
        to: HeldBlocks(int(device[at]), int(host[at]), int(disk[at]), SOURCES[source[at]], int(costly[at]))
        for to, at in place.items()
    }
    assert {to: one for to, one in made.items() if one != NOTHING} == pool.index.overlaps(prompt, 0)


def test_only_what_a_worker_would_load_counts_in_the_cost() -> None:
    slow = LoadCosts(compute=1e-3, host_start=1e-3, host_token=1e-4, disk_start=1e-2, disk_token=2e-3)
    pool, a, b = ModelPool("m", RouterSettings(mode="kv")), target("a"), target("b")
    pool.index.block_size = 16
    pool.index.exact = mock.Mock(**{"windowed.return_value": False})
    pool.index.exact.overlap.return_value = {a: HeldBlocks(2, 3, 9), b: HeldBlocks(2, 3, 9)}
    pool.index.tier_costs.report(a.worker, slow)
    prompt = Prompt(40 * 16, list(range(20)))
    assert pool.index.overlaps(prompt, 0) == {a: HeldBlocks(2, 3, 0, costly=9), b: HeldBlocks(2, 3, 9)}
    full = Prompt(14 * 16, list(range(14)))  # of its 14 blocks the last is computed anyway
    fast = msgspec.structs.replace(
        slow, disk_start=5.3e-3 * 16, disk_token=1e-4
    )  # pays for nine of them, not for eight
    pool.index.tier_costs.report(a.worker, fast)
    assert pool.index.overlaps(prompt, 0)[a].disk == 9 and pool.index.overlaps(full, 0)[a].disk == 9
    pool.index.tier_costs.report(a.worker, msgspec.structs.replace(fast, disk_start=6.8e-3 * 16))
    assert pool.index.overlaps(prompt, 0)[a].disk == 9
    assert pool.index.overlaps(full, 0)[a] == HeldBlocks(2, 3, 0, costly=9)
    restored = ModelPool("m", RouterSettings(mode="kv"))
    restored.index.tier_costs.restore(pool.index.tier_costs.snapshot())
    assert restored.index.tier_costs.costs == pool.index.tier_costs.costs
    pool.index.tier_costs.drop(a.worker)
    assert pool.index.overlaps(full, 0)[a] == pool.index.overlaps(full, 0)[b]


def test_a_prediction_counts_no_block_of_a_lower_tier_twice() -> None:
    pool, a = ModelPool("m", RouterSettings(mode="kv")), target("a")
    pool.index.exact = mock.Mock(**{"windowed.return_value": False})
    pool.index.exact.overlap.return_value = {a: HeldBlocks(2, 3, 9)}
    pool.index.predicted = mock.Mock(spec=HistoryIndexer)
    for depth, expected in ((4, (4, 1, 9)), (8, (8, 0, 6)), (20, (20, 0, 0))):
        pool.index.predicted.overlap.return_value = {a: depth}
        assert pool.index.overlaps(Prompt(640, [1, 2, 3]), 0)[a][:3] == expected


def test_every_cost_function_has_its_columns() -> None:
    assert TOTALS.keys() == COSTS.keys() == set(get_args(CostName))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=24, max_size=40), st.integers(0, 23))
def test_what_is_cached_beside_the_most_is_the_same_of_columns_and_rows(held: list[tuple[int, int]], at: int) -> None:
    targets = [(target(f"w{number}"), None) for number in range(len(held))]
    loads = np.zeros((3, len(held)), dtype=np.int64)
    demand = RequestDemand(Prompt(100, [1, 2, 3, 4]), 0, 16, 10.0, 0, 1.0)
    tiers = np.array(held).T
    candidates = Candidates(loads, 0, tiers[0], [tiers[1], loads[0]], 1, (0.0, 0.0, 0.0), 1.0)
    table = CostTable(demand, CostSettings(), targets, {to: place for place, (to, _) in enumerate(targets)}, candidates)
    chosen = targets[at][0]
    assert cached_beside_most(table, chosen) == cached_beside_most(list(table), chosen)
    assert table.most_cached() == most_cached(list(table))
