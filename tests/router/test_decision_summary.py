"""Decisions written down: at most 2 KB over any fleet, and whole where they are recorded whole."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.frontend.admin import request_history
from penstock.frontend.admin.request_history import RequestHistory
from penstock.kernel.journal_frames import digest_of
from penstock.kernel.machine import SECOND
from penstock.kernel.values import Target, WorkerId, plain
from penstock.router.events import Decision, Dispatch, Excluded, WorkerJoined
from penstock.router.selection.cost import most_cached, place_of, ranked, second_of
from penstock.router.selection.decision_summary import BYTES_MAX, DecisionSummaries, restored, whole
from penstock.testing.router_world import RouterWorld, arrived, card, prompt

SIZES = (1, 4, 5, 23, 24, 100, 2000)


def decided(workers: int, requests: int = 6) -> list[Decision]:
    """Return decisions over a fleet whose workers hold more and more of some prompts."""
    world = RouterWorld()
    for number in range(workers):
        world.router.handle(0, WorkerJoined(card=card(f"main-{number}")))
    found = []
    for number in range(requests):
        effects = world.router.handle(number, arrived(f"r{number}", prompt(number % 3, 160)))
        found += [effect.decision for effect in effects if isinstance(effect, Dispatch)]
    return found


def as_json(decision: Decision) -> object:
    return msgspec.json.decode(msgspec.json.encode(decision, enc_hook=plain))


@pytest.mark.parametrize("workers", SIZES)
def test_a_line_is_short_and_has_who_was_chosen_who_came_next_and_who_held_most(workers: int) -> None:
    for decision in decided(workers):
        short, *_ = DecisionSummaries().lines(decision)
        found = msgspec.json.decode(short, type=Decision)
        assert len(short) <= BYTES_MAX
        assert len(found.candidates) + found.left_out == workers
        targets, costs = [one.target for one in found.candidates], decision.candidates
        chosen = place_of(costs, decision.chosen)
        assert chosen is not None and decision.chosen in targets
        assert costs[most_cached(costs)].target in targets
        if workers > 1:
            assert second_of(costs, chosen)[0] in targets
        by_target = {one.target: one for one in costs}
        assert all(one == by_target[one.target] for one in found.candidates)


@pytest.mark.parametrize("workers", SIZES)
def test_what_is_recorded_whole_comes_back_whole(workers: int) -> None:
    for decision in decided(workers):
        decision = msgspec.structs.replace(
            decision, excluded=[Excluded(target=Target(WorkerId(f"x-{one}")), reason="is full") for one in range(7)]
        )
        _, recorded, _ = DecisionSummaries(lambda: 1.0).lines(decision)
        assert as_json(msgspec.json.decode(whole(recorded), type=Decision)) == as_json(decision)
        assert restored(decision) is decision


def test_one_decision_of_a_model_is_recorded_whole_in_each_second_and_a_share_of_all() -> None:
    decision = decided(100, 1)[0]

    def tables(share: float, count: int = 200) -> int:
        summaries = DecisionSummaries(lambda: share)
        made = [
            msgspec.structs.replace(decision, at=number * SECOND // 40, request=f"r{number}") for number in range(count)
        ]
        return sum(b'"table":""' not in summaries.lines(one)[1] for one in made)

    assert tables(0.0) == 5
    assert tables(1.0) == 200
    assert 60 < tables(0.5) < 140


@given(
    reasons=st.lists(st.integers(0, 12), max_size=60),
    words=st.text(max_size=300),
)
@settings(max_examples=60, deadline=None)
def test_every_exclusion_is_counted_by_its_reason(reasons: list[int], words: str) -> None:
    decision = msgspec.structs.replace(
        decided(2, 1)[0],
        reason=words,
        excluded=[
            Excluded(target=Target(WorkerId(f"w-{place}")), reason=f"{words} {one}")
            for place, one in enumerate(reasons)
        ],
    )
    short, *_ = DecisionSummaries().lines(decision)
    found = msgspec.json.decode(short, type=Decision)
    assert sum(1 + one.others for one in found.excluded) == len(reasons)
    assert len(found.excluded) <= 4
    assert len(short) <= BYTES_MAX


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0]), min_size=24, max_size=80), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_the_cheapest_of_columns_are_those_of_rows(totals: list[float], count: int) -> None:
    table = decided(len(totals), 1)[0].candidates
    table.total[:] = totals  # type: ignore[attr-defined]
    table.scored({})  # type: ignore[attr-defined]  # it forgets what it knew of them
    rows = [msgspec.structs.replace(row, total=total) for row, total in zip(table, totals, strict=True)]
    assert ranked(table, count) == ranked(rows, count)


def test_equal_decisions_have_equal_digests_and_no_row_is_made_for_them() -> None:
    first, again = decided(60), decided(60)
    assert [digest_of(one) for one in first] == [digest_of(one) for one in again]
    changed = decided(60)[0]
    changed.candidates.total[7] += 1e-9  # type: ignore[attr-defined]
    assert digest_of(changed) != digest_of(first[0])


def test_a_history_keeps_the_newest_decisions_whole_within_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = decided(200, 12)
    monkeypatch.setattr(request_history, "WHOLE_MAX", 5 * max(map(request_history._bytes_of, made)))
    history = RequestHistory()
    for decision in made:
        history.decided(decision)

    def listed(request: str) -> int:
        found = history.explain(request)
        assert found is not None
        return len(msgspec.json.decode(found.decisions[0])["candidates"])

    assert [listed(decision.request) for decision in made[-5:]] == [200] * 5
    assert all(listed(decision.request) <= 4 for decision in made[:-5])
    assert len(history.last_decisions(50)) == 12
