"""Where requests go by what workers hold: exact, predicted, approximate; affinity, latency cost, several routers."""

import msgspec
import pytest

from penstock.kernel.hashing import SCHEME, block_hashes
from penstock.kernel.machine import SECOND, Woken
from penstock.kernel.values import KvRemoved, KvStored, RequestId, Target, WorkerId
from penstock.router.events import (
    Dispatch,
    Finished,
    FirstToken,
    KvObserved,
    KvSourceLost,
    OperatorNote,
    PeerGone,
    PeerUpdate,
    Preferences,
    Publish,
    ReplayEnded,
    ReplayWanted,
    WorkerJoined,
    WorkerLeft,
    WorkerMeasured,
)
from penstock.router.kv_index.kv_event_stream import COMPARED
from penstock.router.router import Router
from penstock.router.settings import (
    AffinityMode,
    AffinitySettings,
    CostSettings,
    IndexSettings,
    QueueSettings,
    RouterSettings,
)
from penstock.router.status import findings
from penstock.router.status_rows import WorkerStatus
from penstock.router.workers.worker_events import STALE_AFTER
from penstock.testing import RouterWorld, arrived, card, only, prompt
from penstock.testing.router_world import BLOCK

A, B = WorkerId("a"), WorkerId("b")
TELLING = {"events": ("tcp://x",), "replay": ("tcp://y",), "hash_scheme": SCHEME}


def two(**settings: object) -> RouterWorld:
    return RouterWorld(card("a", **TELLING), card("b", **TELLING), **settings)


def stored(worker: WorkerId, tokens: list[int], sequence: int = 0, epoch: int = 1) -> KvObserved:
    event = KvStored(hashes=list(block_hashes(tokens, BLOCK)), block_size=BLOCK)
    return KvObserved(worker=worker, rank=0, epoch=epoch, sequence=sequence, events=[event])


def sent(world: RouterWorld, name: str, tokens: list[int], **changes: object) -> Dispatch:
    return only(world.post(arrived(name, tokens, **changes)), Dispatch)


def finish(world: RouterWorld, name: str) -> None:
    world.post(Finished(id=RequestId(name), attempt=1, tokens=1))


def test_a_prompt_goes_to_the_worker_that_holds_it_and_explain_says_so() -> None:
    world = two()
    text = prompt(1, 160)
    world.post(stored(B, text))
    dispatch = sent(world, "r", text)
    assert dispatch.target.worker == "b"
    decision = dispatch.decision
    assert decision.expected_cached_tokens == 144, "the last block is computed in any case"
    costs = {cost.target.worker: cost for cost in decision.candidates}
    assert costs[B].overlap_blocks == 10 and costs[B].index == "exact" and costs[A].overlap_blocks == 0
    assert "10 blocks cached" in decision.reason


def answered(world: RouterWorld, count: int, cached: int, tokens: list[int]) -> list[object]:
    effects: list[object] = []
    for _ in range(count):
        name = RequestId(f"r{world.now}")
        world.post(arrived(name, tokens), after=1.0)
        effects += world.post(Finished(id=name, attempt=1, tokens=1, cached=cached))
    return effects


def test_the_status_counts_what_engines_hold_and_what_running_requests_use_of_it() -> None:
    tells = {"events": ("tcp://x", "tcp://y"), "hash_scheme": SCHEME, "ranks": 2}
    world = RouterWorld(card("a", **tells), card("b"))
    text = prompt(1, 160)

    def shown() -> dict[str, WorkerStatus]:
        return {row.id: row for row in world.router.status(world.now).workers}

    world.post(stored(A, text))
    world.post(msgspec.structs.replace(stored(A, text[:48]), rank=1))
    assert (shown()["a"].resident_blocks, shown()["a"].active_blocks) == (13, 0)
    assert shown()["a"].kv_blocks == 2000, "each rank has a cache"
    assert shown()["b"].resident_blocks is None, "it announces nothing, which is not nothing"
    assert sent(world, "r", [*text, *prompt(2, 48)]).target == Target(A)
    assert (shown()["a"].resident_blocks, shown()["a"].active_blocks) == (13, 13), "what is computed is announced later"
    finish(world, "r")
    gone = KvRemoved(hashes=list(block_hashes(text, BLOCK))[6:])
    world.post(KvObserved(worker=A, rank=0, epoch=1, sequence=1, events=[gone]))
    assert (shown()["a"].resident_blocks, shown()["a"].active_blocks) == (9, 0)
    world.post(KvSourceLost(worker=A, rank=0, reason="gone"))
    assert shown()["a"].resident_blocks == 3, "of a rank that is not heard nothing is claimed"


def test_an_engine_that_has_less_than_it_announced_is_named_and_asked_anew() -> None:
    world = RouterWorld(card("a", **TELLING))
    text = prompt(1, 160)
    world.post(stored(A, text))
    answered(world, COMPARED, 144, text)
    assert not findings(world.router, world.now)
    wanted = only(answered(world, COMPARED, 0, text), ReplayWanted)
    assert wanted.first == 0 and world.router.pools["m"].index.kv_state(Target(A)) == "approximate"
    [finding] = [each for each in findings(world.router, world.now) if "less cached" in each.text]
    assert "a has less cached" in finding.text and "0 tokens of a prompt where 144 were expected" in finding.text
    assert "prefix caching may be off" in finding.hint
    world.post(ReplayEnded(id=wanted.id, batches=[stored(A, text)]))
    answered(world, COMPARED, 144, text)
    assert not findings(world.router, world.now)


def test_in_a_full_cache_what_made_room_for_the_answer_itself_is_no_excuse() -> None:
    def lost(blocks: int, window: int = 0) -> list[object]:
        """Each answer has none of its ten blocks; so many other ones are evicted while it runs, of a window as well."""
        world = RouterWorld(card("a", **TELLING))
        text, spare = prompt(1, 160), list(range(1, 1000))
        world.post(stored(A, text))
        world.post(KvObserved(worker=A, rank=0, epoch=1, sequence=1, events=[KvStored(hashes=spare, block_size=BLOCK)]))
        effects: list[object] = []
        for number in range(COMPARED):
            name = RequestId(f"r{number}")
            world.post(arrived(name, text), after=1.0)
            gone = [KvRemoved(hashes=[spare.pop() for _ in range(blocks)])]
            gone += [KvRemoved(hashes=[spare[-1]], window=window)] if window else []
            world.post(KvObserved(worker=A, rank=0, epoch=1, sequence=number + 2, events=gone))
            effects += world.post(Finished(id=name, attempt=1, tokens=1, cached=0))
        return [effect for effect in effects if isinstance(effect, ReplayWanted)]

    assert len(lost(11)) == 1, "one more than its own ten blocks"
    assert lost(20) == [], "those of its own prompt may have been among them"
    assert lost(11, window=1) == [], "without that state the rest is of no use"


def test_blocks_of_another_size_than_the_engine_reported_are_a_finding() -> None:
    world = RouterWorld(card("a", **TELLING))
    event = KvStored(hashes=list(block_hashes(prompt(1, 160), 2 * BLOCK)), block_size=2 * BLOCK)
    world.post(KvObserved(worker=A, rank=0, epoch=1, sequence=0, events=[event]))
    [finding] = findings(world.router, world.now)
    assert f"blocks of another size than {BLOCK}" in finding.text


def test_removed_blocks_and_gone_workers_do_not_count() -> None:
    world = two()
    text = prompt(1, 160)
    world.post(stored(B, text))
    tail = list(block_hashes(text, BLOCK))[4:]
    world.post(KvObserved(worker=B, rank=0, epoch=1, sequence=1, events=[KvRemoved(hashes=tail[::-1])]))
    costs = {c.target.worker: c for c in sent(world, "r", text).decision.candidates}
    assert costs[B].overlap_blocks == 4
    finish(world, "r")
    world.post(WorkerLeft(worker=B, epoch=1, reason="crash"))
    world.post(WorkerJoined(card=card("b", epoch=2, **TELLING)))
    costs = {
        c.target.worker: c
        for c in sent(
            world,
            "s",
            text,
        ).decision.candidates
    }
    assert costs[B].overlap_blocks == 0


def test_siblings_go_together_before_the_first_event_is_back() -> None:
    world = two(index=IndexSettings(predicted_ttl=5.0))
    text = prompt(2, 320)
    first = sent(world, "r0", text)
    finish(world, "r0")
    second = sent(world, "r1", text)
    assert second.target == first.target
    assert {c.index for c in second.decision.candidates} == {"predicted", "none"}
    finish(world, "r1")
    world.post(Woken(), after=6.0)
    assert {c.index for c in sent(world, "r2", text).decision.candidates} == {"none"}


def test_a_worker_without_events_is_known_by_routing_history_and_that_is_said() -> None:
    world = RouterWorld(card("a"), card("b"))
    text = prompt(3, 320)
    first = sent(world, "r0", text)
    finish(world, "r0")
    again = sent(world, "r1", text)
    assert again.target == first.target and again.decision.candidates[0].index in ("approximate", "none")
    said = [f for f in findings(world.router, world.now) if "without an event source" in f.text]
    assert said and "a, b" in said[0].text
    notes = [e.text for e in world.effects if isinstance(e, OperatorNote) and e.kind == "worker_joined"]
    assert all("guessed" in text for text in notes)


def test_text_blocks_meet_only_routing_history() -> None:
    world = two()
    text = prompt(4, 160)
    world.post(stored(B, text))
    decision = sent(world, "r", text, text=True).decision
    assert all(cost.overlap_blocks == 0 for cost in decision.candidates)
    finish(world, "r")
    again = sent(world, "s", text, text=True).decision
    assert max(cost.overlap_blocks for cost in again.candidates) == 10


def test_without_weight_on_overlap_no_index_is_kept() -> None:
    for settings in ({"cost": CostSettings(overlap_credit=0, host_credit=0, disk_credit=0)}, {"mode": "round_robin"}):
        world = two(**settings)
        pool = world.router.pools["m"]
        assert pool.index.exact is None and pool.index.history is None and not pool.index.streams
        world.post(stored(B, prompt(1)))
        sent(world, "r", prompt(1))


def test_a_gap_is_asked_for_and_healed() -> None:
    world = two()
    text = prompt(5, 160)
    world.post(stored(B, prompt(6), 0))
    wanted = only(world.post(stored(B, prompt(7), 2)), ReplayWanted)
    assert (wanted.worker, wanted.first) == ("b", 1)
    world.post(ReplayEnded(id=wanted.id, batches=[stored(B, text, 1)]))
    assert sent(world, "r", text).decision.expected_cached_tokens == 144
    assert world.router.pools["m"].index.kv_state(Target(B)) == "exact"


def test_a_gap_beyond_replay_drops_what_was_known_and_says_so() -> None:
    world = two()
    text = prompt(5, 160)
    world.post(stored(B, text, 0))
    wanted = only(world.post(stored(B, prompt(7), 2)), ReplayWanted)
    world.post(ReplayEnded(id=wanted.id, batches=None))
    assert sent(world, "r", text).decision.expected_cached_tokens == 0
    assert world.router.pools["m"].index.kv_state(Target(B)) == "approximate"
    assert any("lost beyond replay" in f.text for f in findings(world.router, world.now))


def test_an_event_source_that_is_gone_is_said() -> None:
    world = two()
    world.post(stored(B, prompt(5), 0))
    world.post(KvSourceLost(worker=B, rank=0, reason="socket closed"))
    assert world.router.pools["m"].index.kv_state(Target(B)) == "approximate"


def test_events_of_a_former_epoch_are_dropped() -> None:
    world = two()
    world.post(WorkerJoined(card=card("b", epoch=2, **TELLING)))
    before = world.router.dropped
    world.post(stored(B, prompt(1), epoch=1))
    assert world.router.dropped == before + 1


def test_a_requests_own_credit_and_temperature_override_the_clusters() -> None:
    world = two()
    text = prompt(1, 160)
    world.post(stored(B, text))
    decision = sent(world, "r", text, preferences=Preferences(overlap_credit=0.0, temperature=2.0)).decision
    totals = {cost.total for cost in decision.candidates}
    assert len(totals) == 1 and decision.temperature == 2.0


def test_hard_affinity_keeps_a_session_at_home_while_that_lives() -> None:
    world = two(affinity=AffinitySettings(mode="hard", ttl=60.0))
    wish = Preferences(session="s")
    home = sent(world, "r0", prompt(0), preferences=wish).target
    for number in range(1, 6):
        assert sent(world, f"r{number}", prompt(number, 300), preferences=wish).target == home
    world.post(WorkerLeft(worker=home.worker, epoch=1, reason="crash"))
    assert sent(world, "r9", prompt(9), preferences=wish).target != home


def test_soft_affinity_is_a_discount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.selection.select.SESSION_DISCOUNT", 0.5)
    world = two(affinity=AffinitySettings(mode="soft"))
    wish = Preferences(session="s")
    home = sent(world, "r0", prompt(0, 32), preferences=wish).target
    again = sent(world, "r1", prompt(1, 320), preferences=wish)
    assert again.target == home
    assert [c.discount for c in again.decision.candidates if c.target == home] == [0.5]


@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_a_new_session_is_drawn_to_its_programs_worker_but_not_pinned_there(
    mode: AffinityMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.router.selection.select.SESSION_DISCOUNT", 0.5)
    world = two(affinity=AffinitySettings(mode=mode))
    home = sent(world, "r0", prompt(0, 320), preferences=Preferences(session="main", program="p")).target
    second = sent(world, "r1", prompt(1, 320), preferences=Preferences(session="sub 1", program="p"))
    assert [c.discount for c in second.decision.candidates if c.target == home] == [0.5]
    assert second.decision.mode != "pinned"


def test_an_idle_session_is_forgotten() -> None:
    world = two(affinity=AffinitySettings(mode="hard", ttl=1.0))
    pool = world.router.pools["m"]
    sent(world, "r0", prompt(0), preferences=Preferences(session="s"))
    assert pool.affinity.target("s", world.now) is not None
    assert pool.affinity.target("s", world.now + 2 * SECOND) is None


def test_latency_cost_uses_what_a_worker_measured_of_itself() -> None:
    world = two(cost=CostSettings(kind="latency"))
    world.post(WorkerMeasured(worker=A, prefill_intercept=0.0, prefill_slope=1e-3, decode_base=0, decode_slope=1e-9))
    world.post(WorkerMeasured(worker=B, prefill_intercept=0.0, prefill_slope=1e-4, decode_base=0, decode_slope=1e-9))
    dispatch = sent(world, "r", prompt(1, 160))
    costs = {c.target.worker: c for c in dispatch.decision.candidates}
    assert dispatch.target.worker == "b"
    assert round(costs[A].prefill) == 160 and round(costs[B].prefill) == 16 and costs[A].unit == "ms"


def test_latency_cost_learns_from_first_tokens() -> None:
    world = RouterWorld(card("a"), cost=CostSettings(kind="latency"))
    for number in range(20):
        tokens = 64 + 32 * number
        world.post(arrived(f"r{number}", prompt(number, tokens)))
        world.post(FirstToken(id=RequestId(f"r{number}"), attempt=1), after=0.01 + tokens * 2e-3)
        finish(world, f"r{number}")
    cost = sent(world, "s", prompt(99, 640)).decision.candidates[0]
    assert abs(cost.prefill - (10 + 640 * 2)) < 100


def test_another_routers_placements_count_as_load_until_it_is_gone() -> None:
    ours, theirs = RouterWorld(card("a"), card("b")), Router(RouterSettings(), name="other", seed=3, shared=True)
    for worker in ("a", "b"):
        theirs.handle(0, WorkerJoined(card=card(worker)))
    effects = theirs.handle(0, arrived("x", prompt(1, 640)))
    placed, there = only(effects, Publish), only(effects, Dispatch).target
    ours.post(PeerUpdate(router="other", placement=placed.placement))
    assert ours.router.pools["m"].active.load(there).requests == 1
    assert sent(ours, "r", prompt(2, 64)).target != there
    for effect in theirs.handle(1, FirstToken(id=RequestId("x"), attempt=1)):
        if isinstance(effect, Publish):
            ours.post(PeerUpdate(router="other", placement=effect.placement))
    assert ours.router.pools["m"].active.load(there).prefill_tokens == 0
    ours.post(PeerGone(router="other"))
    assert ours.router.pools["m"].active.load(there).requests == 0


def test_a_silent_peers_request_expires() -> None:
    world = RouterWorld(card("a"))
    other = Router(RouterSettings(), shared=True)
    other.handle(0, WorkerJoined(card=card("a")))
    placement = only(other.handle(0, arrived("x")), Publish).placement
    world.post(PeerUpdate(router="other", placement=placement))
    world.post(Woken(), after=STALE_AFTER + 0.5)
    assert len(world.router.pools["m"].active) == 0


def test_the_queue_counts_the_best_overlap_as_done_work() -> None:
    world = RouterWorld(card("a", **TELLING), queue=QueueSettings(threshold=0.1, policy="wspt"))
    cached, fresh = prompt(1, 640), prompt(2, 320)
    world.post(stored(A, cached))
    sent(world, "busy", prompt(3, 320))
    world.post(arrived("fresh", fresh))
    world.post(arrived("cached", cached))
    effects = world.post(FirstToken(id=RequestId("busy"), attempt=1))
    order = [effect.id for effect in effects if isinstance(effect, Dispatch)]
    assert order[0] == "cached", "it has 16 tokens to compute against 320"
