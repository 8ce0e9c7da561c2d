"""Prefill on one worker, decode on another: which way a request goes, and that nothing stays held."""

import msgspec
import pytest

from penstock.kernel.machine import MILLISECOND, SECOND, Wake, Woken
from penstock.kernel.values import (
    NOTHING_PROMISED,
    LatencyTargets,
    MediaItem,
    RequestId,
    Slo,
    SloClass,
    WorkerCard,
    WorkerId,
)
from penstock.router.events import (
    Abort,
    Cancelled,
    Closed,
    Dispatch,
    Failed,
    Finished,
    FirstToken,
    OperatorNote,
    Preferences,
    Publish,
    Release,
    Staged,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerMeasured,
)
from penstock.router.pool_tables import EMBEDDING_BYTES
from penstock.router.settings import AffinitySettings, DecodeSettings, HandoffSettings, PrefillSettings
from penstock.router.stage_graph import FINAL, GRAPH, StagePath, remote_prefill, splits
from penstock.testing import RouterWorld, arrived, card, none, only, prompt
from penstock.testing.router_world import BLOCK

R = RequestId("r")
CAT, DOG = MediaItem("cat", 100), MediaItem("dog", 100)
ALWAYS = HandoffSettings(conditional="off")


def p(name: str, **changes: object):
    return card(name, **{"role": "prefill", "handoff": "completed", **changes})


def d(name: str, **changes: object):
    return card(name, **{"role": "decode", "handoff": "completed", **changes})


def split(**changes: object) -> RouterWorld:
    return RouterWorld(p("p0"), d("d0"), **{"handoff": ALWAYS, **changes})


def test_the_graph_ends_with_those_who_answer() -> None:
    assert set(FINAL) == {"decode", "aggregated"}
    assert all(set(following) <= set(GRAPH) for following in GRAPH.values())
    assert splits({"prefill", "decode"}) and splits({"encode", "aggregated"})
    assert not splits({"aggregated"}) and not splits({"prefill"}) and not splits({"decode", "aggregated"})


def test_a_request_is_prefilled_handed_over_and_answered() -> None:
    world = split()
    first = only(world.post(arrived("r")), Dispatch)
    assert (first.stage, first.target.worker, first.attempt) == ("prefill", "p0", 1)
    assert first.handoff is not None and first.handoff.source is None
    assert "remote prefill" in first.decision.flow
    second = only(world.post(Staged(id=R, attempt=1, cached=16), after=0.2), Dispatch)
    assert (second.stage, second.target.worker, second.attempt) == ("decode", "d0", 2)
    assert second.handoff is not None and second.handoff.source is not None
    assert (second.handoff.source.id, second.handoff.source_attempt) == ("p0", 1)
    assert second.handoff.key == first.handoff.key
    world.post(FirstToken(id=R, attempt=2), after=0.1)
    closed = only(world.post(Finished(id=R, attempt=2, tokens=5, cached=0), after=0.5), Closed)
    assert (closed.outcome, closed.cached, closed.osl) == ("ok", 16, 5), "what the prefill had cached is what counts"
    assert [(leg.role, leg.target.worker) for leg in closed.legs] == [("prefill", "p0"), ("decode", "d0")]
    assert [leg.last for leg in closed.legs] == [SECOND // 5, SECOND * 8 // 10]
    assert none(world.effects, Release)
    assert world.router.pools["m"].counts.handoffs["done"] == 1


def test_load_counts_where_the_work_is() -> None:
    world = split()
    active = world.router.pools["m"].active
    first = only(world.post(arrived("r", 64)), Dispatch)
    assert active.load(first.target).prefill_tokens == 64
    second = only(world.post(Staged(id=R, attempt=1)), Dispatch)
    assert active.load(first.target).prefill_tokens == 0
    assert active.load(first.target).blocks == 4, "it holds the KV until that has been fetched"
    assert active.load(second.target).prefill_tokens == 0 and active.load(second.target).blocks == 4
    world.post(FirstToken(id=R, attempt=2))
    assert active.load(first.target).blocks == 0
    world.post(Finished(id=R, attempt=2, tokens=1))
    assert len(active) == 0


def test_other_routers_hear_of_both_legs() -> None:
    world = split()
    world.router.shared = True
    world.post(arrived("r"))
    world.post(Staged(id=R, attempt=1))
    world.post(FirstToken(id=R, attempt=2))
    world.post(Finished(id=R, attempt=2, tokens=1))
    told = [e.placement for e in world.effects if isinstance(e, Publish)]
    by_worker = {worker: [t.step for t in told if t.target.worker == worker] for worker in ("p0", "d0")}
    assert by_worker == {"p0": ["placed", "first", "ended"], "d0": ["placed", "first", "ended"]}
    assert len({t.id for t in told}) == 2


def test_a_short_prompt_goes_straight_to_decode() -> None:
    world = RouterWorld(p("p0"), d("d0"), handoff=HandoffSettings(conditional="thresholds"))
    tokens = prompt(1, 4096)
    long = only(world.post(arrived("long", tokens)), Dispatch)
    assert long.stage == "prefill" and "4096 of 4096 tokens are new" in long.decision.flow
    world.post(Staged(id=RequestId("long"), attempt=1))
    world.post(Finished(id=RequestId("long"), attempt=2, tokens=1))
    again = only(world.post(arrived("again", [*tokens, *prompt(2, 64)])), Dispatch)
    assert (again.stage, again.target.worker) == ("aggregated", "d0")
    assert "64 of 4160 tokens are new on d0, below 2048 and 0.7" in again.decision.flow


def test_both_bounds_of_the_length_rule_are_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.stage_graph.NEW_SHARE_MAX", 0.5)
    settings = HandoffSettings(conditional="thresholds", new_tokens_max=100)

    def way(new: int) -> StagePath:
        return StagePath(worker="w", new=new, queued=0, running=0, ttft_ms=0, stall_ms=0, itl_ms=0)

    assert not remote_prefill(settings, NOTHING_PROMISED, 200, way(200), way(99))[0]
    assert remote_prefill(settings, NOTHING_PROMISED, 300, way(300), way(100))[0], "100 are not fewer than 100"
    assert remote_prefill(settings, NOTHING_PROMISED, 198, way(198), way(99))[0], "a half is not less than a half"


@pytest.mark.parametrize(
    ("queued", "running", "remote"), [(0, 5, True), (3000, 5, True), (30_000, 5, False), (3000, 0, False)]
)
def test_busy_prefill_workers_lose_to_a_decode_worker_that_would_be_slowed_less(
    queued: int, running: int, remote: bool
) -> None:
    there = StagePath(worker="p", new=4000, queued=queued, running=0, ttft_ms=0, stall_ms=0, itl_ms=0)
    here = StagePath(worker="d", new=4000, queued=0, running=running, ttft_ms=0, stall_ms=0, itl_ms=0)
    found, why = remote_prefill(HandoffSettings(), NOTHING_PROMISED, 4000, there, here)
    assert found is remote
    assert f"{queued + 4000} tokens until it is done on p" in why


def test_with_a_service_level_it_is_predicted_milliseconds() -> None:
    slo = LatencyTargets(0.5, 0.02)

    def decided(remote: StagePath, local: StagePath) -> tuple[bool, str]:
        return remote_prefill(HandoffSettings(conditional="slo"), slo, 4000, remote, local)

    def way(name: str, ttft: float, running: int = 0, stall: float = 0.0, itl: float = 0.0) -> StagePath:
        return StagePath(worker=name, new=4000, queued=0, running=running, ttft_ms=ttft, stall_ms=stall, itl_ms=itl)

    assert decided(way("p", 400), way("d", 300, running=8, stall=200, itl=30))[0]
    late, why = decided(way("p", 900), way("d", 300, running=2, stall=200, itl=15))
    assert not late and "the latter keeps more of the SLO" in why
    assert decided(way("p", 400), way("d", 300, running=2, stall=200, itl=15))[0], "400 < 300 + 2 * 200"
    assert not decided(way("p", 400), way("d", 300))[0], "nobody is held up"


def test_measured_speeds_decide_the_prediction() -> None:
    world = RouterWorld(p("p0"), d("d0"), slo=Slo(ttft=1.0), handoff=HandoffSettings(conditional="slo"))
    for worker, slope in (("p0", 1e-3), ("d0", 1e-5)):
        world.post(
            WorkerMeasured(
                worker=WorkerId(worker), prefill_intercept=0.0, prefill_slope=slope, decode_base=0.0, decode_slope=0.0
            )
        )
    dispatch = only(world.post(arrived("r", prompt(1, 4096))), Dispatch)
    assert dispatch.stage == "aggregated"
    assert "first token after 4" in dispatch.decision.flow and "41 ms by d0" in dispatch.decision.flow


def test_a_request_of_a_class_is_split_by_the_targets_of_its_class() -> None:
    slo = Slo(classes={"voice": SloClass(ttft=1.0)})
    world = RouterWorld(p("p0"), d("d0"), slo=slo, handoff=HandoffSettings(conditional="slo"))
    voice = arrived("v", prompt(1, 4096), preferences=Preferences(service_class="voice"))
    assert "first token after" in only(world.post(voice), Dispatch).decision.flow
    other = only(world.post(arrived("o", prompt(2, 4096))), Dispatch)
    assert "tokens until it is done" in other.decision.flow  # nothing is promised to it


def test_without_a_prefill_worker_the_decode_worker_does_it_all() -> None:
    world = RouterWorld(d("d0"), p("p0"), handoff=ALWAYS)
    world.post(WorkerDraining(worker=WorkerId("p0"), epoch=1))
    dispatch = only(world.post(arrived("r")), Dispatch)
    assert (dispatch.stage, dispatch.target.worker) == ("aggregated", "d0")
    assert "no prefill worker is available: p0 is draining" in dispatch.decision.flow


def test_without_a_worker_that_answers_a_prefill_worker_does() -> None:
    world = RouterWorld(p("p0"))
    dispatch = only(world.post(arrived("r")), Dispatch)
    assert (dispatch.stage, dispatch.target.worker) == ("aggregated", "p0")
    assert "no worker whose role is to answer is available (there is none)" in dispatch.decision.flow


def test_while_all_that_answer_are_drained_a_prefill_worker_does() -> None:
    world = split()
    world.post(WorkerDraining(worker=WorkerId("d0"), epoch=1))
    dispatch = only(world.post(arrived("r")), Dispatch)
    assert (dispatch.stage, dispatch.target.worker) == ("aggregated", "p0")
    assert "(d0 is draining)" in dispatch.decision.flow


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ((p("p0"), d("d0")), ""),
        ((p("p0"),), "prefill workers do all of it"),
        ((d("d0"),), "decode workers prefill by themselves"),
        ((p("p0"), card("a0")), "prefill workers of m get nothing to do"),
    ],
)
def test_half_a_hand_off_is_a_finding(workers: tuple[WorkerCard, ...], said: str) -> None:
    world = RouterWorld(*workers, handoff=ALWAYS, mode="round_robin")
    told = [finding.text for finding in world.router.status(world.now).findings]
    assert len(told) == bool(said) and all(said in text for text in told)


def test_what_can_not_be_split_is_done_by_one_worker() -> None:
    dispatch = only(split().post(arrived("r", whole=True)), Dispatch)
    assert (dispatch.stage, dispatch.target.worker) == ("aggregated", "d0")


def test_a_failed_prefill_is_done_where_it_is_decoded_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.model_pool.FALLBACK_SHARE", 0)
    monkeypatch.setattr("penstock.router.model_pool.FALLBACK_BURST", 1)
    world = RouterWorld(p("p0"), p("p1"), d("d0"), handoff=HandoffSettings(conditional="off"))
    world.post(arrived("r"))
    again = only(world.post(Failed(id=R, attempt=1, reason="it broke", retryable=True)), Dispatch)
    assert (again.stage, again.target.worker) == ("aggregated", "d0") and "it failed on p" in again.decision.flow
    assert world.router.pools["m"].counts.handoffs["fallback"] == 1
    assert "prefill_fallback" in [e.kind for e in world.effects if isinstance(e, OperatorNote)]
    world.post(Finished(id=R, attempt=2, tokens=1))
    other = RequestId("s")
    first = only(world.post(arrived("s", prompt(3))), Dispatch)
    failed = Failed(id=other, attempt=1, reason="connection refused", retryable=True, received=False)
    second = only(world.post(failed), Dispatch)
    assert second.stage == "prefill" and second.target != first.target, "the budget is spent: another prefill worker"
    third = only(world.post(msgspec.structs.replace(failed, attempt=2)), Dispatch)
    assert third.stage == "aggregated", "there is no third prefill worker"


def test_a_request_at_fault_is_not_tried_again() -> None:
    world = split()
    world.post(arrived("r"))
    closed = only(
        world.post(Failed(id=R, attempt=1, reason="no", retryable=False, worker_at_fault=False, status=400)), Closed
    )
    assert (closed.outcome, closed.fault, closed.status) == ("failed", "client", 400)


def test_a_prefill_that_holds_nothing_is_done_again_where_it_is_decoded() -> None:
    world = split()
    world.post(arrived("r"))
    dispatch = only(world.post(Staged(id=R, attempt=1, kv_retained=False)), Dispatch)
    assert (dispatch.stage, dispatch.handoff) == ("aggregated", None)
    assert world.router.pools["m"].counts.handoffs["empty"] == 1


def test_a_client_that_leaves_during_the_prefill_leaves_nothing_held() -> None:
    world = split()
    world.post(arrived("r"))
    effects = world.post(Cancelled(id=R))
    release = only(effects, Release)
    assert (release.attempt, release.source.id) == (1, "p0")
    assert release.target is not None and release.target.id == "d0"
    assert none(effects, Abort), "a prefill that is done this very moment would stay held"
    assert world.post(Staged(id=R, attempt=1)) == []


def test_a_client_that_leaves_before_the_first_token_of_decode_stops_only_that_leg() -> None:
    world = split()
    world.post(arrived("r"))
    world.post(Staged(id=R, attempt=1))
    effects = world.post(Cancelled(id=R))
    assert only(effects, Abort).attempt == 2 and none(effects, Release)


def test_kv_that_nobody_can_fetch_is_told() -> None:
    world = split()
    world.post(arrived("r"))
    world.post(WorkerDraining(worker=WorkerId("d0"), epoch=1))
    effects = world.post(Cancelled(id=R))
    assert only(effects, Release).target is None
    assert only(effects, OperatorNote).kind == "kv_stranded"


def test_a_done_prefill_waits_for_a_worker_that_answers() -> None:
    world = split()
    world.post(arrived("r"))
    world.post(WorkerDraining(worker=WorkerId("d0"), epoch=1))
    assert none(world.post(Staged(id=R, attempt=1)), Dispatch)
    dispatch = only(world.post(WorkerJoined(card=d("d1")), after=1.0), Dispatch)
    assert (dispatch.stage, dispatch.target.worker) == ("decode", "d1")


def test_a_done_prefill_waits_only_so_long_and_is_let_go() -> None:
    world = split()
    world.post(arrived("r"))
    world.post(WorkerDraining(worker=WorkerId("d0"), epoch=1))
    world.post(Staged(id=R, attempt=1))
    wake = [e for e in world.effects if isinstance(e, Wake)][-1]
    effects = world.post(Woken(), after=wake.at / SECOND + 1)
    assert only(effects, Closed).outcome == "failed"
    assert only(effects, Release).source.id == "p0"


def test_another_decode_worker_fetches_what_the_first_could_not() -> None:
    world = RouterWorld(p("p0"), d("d0"), d("d1"), d("d2"), handoff=ALWAYS)
    world.post(arrived("r"))
    first = only(world.post(Staged(id=R, attempt=1)), Dispatch)
    second = only(world.post(Failed(id=R, attempt=2, reason="it broke", retryable=True)), Dispatch)
    assert second.stage == "decode" and second.target != first.target
    third = world.post(Failed(id=R, attempt=3, reason="it broke", retryable=True))
    assert only(third, Dispatch).stage == "aggregated", "after two it is computed again"
    assert only(third, Release).source.id == "p0"


def test_kv_whose_holder_is_gone_is_computed_again() -> None:
    world = RouterWorld(p("p0"), d("d0"), d("d1"), handoff=ALWAYS)
    world.post(arrived("r"))
    world.post(Staged(id=R, attempt=1))
    world.post(WorkerLeft(worker=WorkerId("p0"), epoch=1, reason="killed"))
    effects = world.post(Failed(id=R, attempt=2, reason="could not fetch", retryable=True))
    assert only(effects, Dispatch).stage == "aggregated" and none(effects, Release)
    assert world.router.pools["m"].counts.handoffs["lost"] == 1


def test_a_worker_that_says_it_could_not_fetch_is_not_blamed_for_a_holder_that_died() -> None:
    """vLLM answers 500 where NIXL lost the other side, before anybody knows that this has died."""
    world = split()
    ids = [f"r{n}" for n in range(4)]
    for number, id in enumerate(ids):
        world.post(arrived(id, prompt(number)))
        world.post(Staged(id=RequestId(id), attempt=1))
    for id in ids:
        failed = Failed(id=RequestId(id), attempt=2, reason="server error", retryable=True, status=500)
        again = only(world.post(failed), Dispatch)
        assert (again.stage, again.target.worker) == ("aggregated", "d0"), "it computes what it could not fetch"
    assert world.router.roster.workers["d0"].breaker.failures == 0
    late = Failed(id=RequestId(ids[0]), attempt=3, reason="server error", retryable=True, status=500)
    again = only(world.post(late), Dispatch)
    world.post(FirstToken(id=RequestId(ids[0]), attempt=again.attempt))
    assert world.router.roster.workers["d0"].breaker.failures == 1, "what it does by itself is its own"


@pytest.mark.parametrize("protocol", ["completed", "bootstrap"])
def test_what_one_worker_could_not_fetch_another_one_does_first(protocol: str) -> None:
    workers = [p("p0", handoff=protocol), d("d0", handoff=protocol), d("d1", handoff=protocol)]
    world = RouterWorld(*workers, handoff=ALWAYS)
    sent = [e for e in world.post(arrived("r")) if isinstance(e, Dispatch)]
    if protocol == "completed":
        sent = [only(world.post(Staged(id=R, attempt=1)), Dispatch)]
    failed = Failed(id=R, attempt=2, reason="server error", retryable=True, status=500)
    again = [e for e in world.post(failed) if isinstance(e, Dispatch) and e.stage in FINAL]
    assert len(again) == 1 and again[0].target != sent[-1].target


@pytest.mark.parametrize("protocol", ["push", "bootstrap"])
def test_both_are_asked_at_once_where_the_protocol_wants_it(protocol: str) -> None:
    world = RouterWorld(p("p0", handoff=protocol), d("d0", handoff=protocol), handoff=ALWAYS)
    sent = [e for e in world.post(arrived("r")) if isinstance(e, Dispatch)]
    assert [(e.stage, e.attempt) for e in sent] == [("prefill", 1), ("decode", 2)]
    assert sent[0].handoff is not None and sent[1].handoff is not None
    assert sent[0].handoff.key == sent[1].handoff.key and 0 <= sent[0].handoff.key < 1 << 63
    world.post(Staged(id=R, attempt=1))
    world.post(FirstToken(id=R, attempt=2))
    assert only(world.post(Finished(id=R, attempt=2, tokens=3)), Closed).outcome == "ok"


def test_of_two_asked_at_once_the_failure_of_one_stops_the_other() -> None:
    world = RouterWorld(p("p0", handoff="bootstrap"), d("d0", handoff="bootstrap"), handoff=ALWAYS)
    world.post(arrived("r"))
    effects = world.post(Failed(id=R, attempt=1, reason="it broke", retryable=True))
    assert only(effects, Abort).attempt == 2
    again = only(effects, Dispatch)
    assert (again.stage, again.attempt) == ("aggregated", 3)
    world.post(Finished(id=R, attempt=3, tokens=1))
    other = RequestId("s")
    world.post(arrived("s", prompt(3)))
    effects = world.post(Failed(id=other, attempt=2, reason="it broke", retryable=True))
    assert only(effects, Abort).attempt == 1


def test_of_two_asked_at_once_both_are_stopped_with_the_client() -> None:
    world = RouterWorld(p("p0", handoff="bootstrap"), d("d0", handoff="bootstrap"), handoff=ALWAYS)
    world.post(arrived("r"))
    effects = world.post(Cancelled(id=R))
    assert sorted(e.attempt for e in effects if isinstance(e, Abort)) == [1, 2]


def test_images_are_encoded_first_where_somebody_does_that() -> None:
    world = RouterWorld(card("e0", role="encode"), p("p0"), d("d0"), handoff=ALWAYS)
    first = only(world.post(arrived("r", media=(CAT, DOG))), Dispatch)
    assert (first.stage, first.target.worker) == ("encode", "e0")
    second = only(world.post(Staged(id=R, attempt=1)), Dispatch)
    third = only(world.post(Staged(id=R, attempt=2)), Dispatch)
    assert [second.stage, third.stage] == ["prefill", "decode"]
    closed = only(world.post(Finished(id=R, attempt=3, tokens=1)), Closed)
    assert [leg.role for leg in closed.legs] == ["encode", "prefill", "decode"]
    plain = only(world.post(arrived("t")), Dispatch)
    assert plain.stage == "prefill"


def encoded(world: RouterWorld, name: str, *media: MediaItem) -> tuple[Dispatch | None, Closed, str]:
    """Run a request through: its encode leg, where it has one, its end, and why its last leg came."""
    id = RequestId(name)
    first = only(world.post(arrived(name, media=media)), Dispatch)
    last = only(world.post(Staged(id=id, attempt=1)), Dispatch) if first.stage == "encode" else first
    closed = only(world.post(Finished(id=id, attempt=last.attempt, tokens=1)), Closed)
    return (first if first is not last else None), closed, last.decision.flow


def test_the_same_content_is_encoded_once_whoever_asks() -> None:
    world = RouterWorld(*(card(f"e{number}", role="encode") for number in range(4)), card("a0"))
    leg, closed, flow = encoded(world, "r", CAT, DOG, CAT)
    assert leg is not None and leg.encode == (0, 1) and (closed.media, closed.media_cached) == (3, 1)
    assert "2 of 3" in flow and "by an encode worker" in flow
    leg, closed, flow = encoded(world, "s", DOG, CAT)
    assert leg is None and (closed.media, closed.media_cached) == (2, 2) and "encoded already" in flow
    leg, closed, _ = encoded(world, "t", CAT, MediaItem("cow"), MediaItem())
    assert leg is not None and leg.encode == (1, 2), "what has no name is encoded each time"
    assert world.router.pools["m"].counts.media == {"cached": 4, "encoded": 4, "failed": 0, "here": 0}
    assert encoded(world, "u")[1].media_cached is None, "nothing was asked of a text"


def test_content_that_is_being_encoded_goes_to_the_same_worker_from_any_router() -> None:
    workers = [card(f"e{number}", role="encode") for number in range(5)]
    targets = set()
    for order in (workers, workers[::-1]):
        world = RouterWorld(*order, card("a0"))
        for name in ("r", "s"):
            targets.add(only(world.post(arrived(name, media=(CAT,))), Dispatch).target)
    assert len(targets) == 1
    world = RouterWorld(*workers, card("a0"))
    spread = {only(world.post(arrived(f"r{n}", media=(MediaItem(f"{n}"),))), Dispatch).target.worker for n in range(40)}
    assert len(spread) == 5


def media_counts(world: RouterWorld) -> dict[str, int]:
    return world.router.pools["m"].counts.media


def test_only_what_was_encoded_counts_as_encoded() -> None:
    """Of several that ask at once the encode worker encodes each content once; the others find it in its cache."""
    world = RouterWorld(card("e0", role="encode"), card("a0"))
    asked = {"r": (CAT,), "s": (CAT, DOG), "t": (DOG, CAT), "u": (MediaItem(),), "v": (MediaItem(),)}
    for name, media in asked.items():
        assert only(world.post(arrived(name, media=media)), Dispatch).stage == "encode"
    for name in asked:
        last = only(world.post(Staged(id=RequestId(name), attempt=1)), Dispatch)
        world.post(Finished(id=RequestId(name), attempt=last.attempt, tokens=1))
    assert media_counts(world) == {"cached": 3, "encoded": 4, "failed": 0, "here": 0}


def test_what_no_engine_began_is_not_encoded_there() -> None:
    world = RouterWorld(card("e0", role="encode"), card("a0"))
    world.post(WorkerDraining(worker=WorkerId("e0"), epoch=1))
    gone = only(world.post(arrived("r", media=(CAT,))), Dispatch)
    world.post(Cancelled(id=gone.id))
    assert media_counts(world)["here"] == 0
    encoded(world, "s", CAT, DOG)
    assert media_counts(world) == {"cached": 0, "encoded": 0, "failed": 0, "here": 2}


def test_embeddings_are_bounded_in_bytes_and_the_latest_stay() -> None:
    room = HandoffSettings(embeddings=2 * 100 * EMBEDDING_BYTES)
    world = RouterWorld(card("e0", role="encode"), card("a0"), handoff=room)
    for name, item in (("r", CAT), ("s", DOG), ("t", CAT), ("u", MediaItem("cow", 100))):
        encoded(world, name, item)
    table = world.router.pools["m"].embeddings
    assert len(table) == 2 and table.bytes <= table.bytes_max
    assert encoded(world, "v", CAT)[0] is None, "it was asked for after the dog"
    assert encoded(world, "w", DOG)[0] is not None
    again = RouterWorld(card("e0", role="encode"), card("a0"), handoff=room)
    again.router.restore(world.router.snapshot())
    assert again.router.pools["m"].embeddings.missing([DOG, CAT, MediaItem("cow")]) == [2]


def test_nobody_waits_for_an_encoder_that_is_not_there() -> None:
    world = RouterWorld(card("e0", role="encode"), card("a0"))
    world.post(WorkerDraining(worker=WorkerId("e0"), epoch=1))
    leg, closed, flow = encoded(world, "r", CAT)
    assert leg is None and closed.media_cached == 0 and "by the worker that prefills" in flow


def test_an_encoder_that_fails_is_done_without() -> None:
    world = RouterWorld(card("e0", role="encode"), card("a0"))
    world.post(arrived("r", media=(CAT,)))
    dispatch = only(world.post(Failed(id=R, attempt=1, reason="it broke", retryable=True)), Dispatch)
    assert (dispatch.stage, dispatch.target.worker) == ("aggregated", "a0")


def test_each_stage_has_a_mode_of_its_own() -> None:
    world = RouterWorld(
        p("p0"),
        p("p1"),
        d("d0"),
        d("d1"),
        handoff=HandoffSettings(
            conditional="off",
            prefill=PrefillSettings(mode="round_robin"),
            decode=DecodeSettings(mode="least_loaded"),
        ),
    )
    seen = []
    for number in range(4):
        sent = only(world.post(arrived(f"r{number}", prompt(number))), Dispatch)
        seen.append(sent.target.worker)
        assert sent.decision.mode == "round_robin"
        after = only(world.post(Staged(id=RequestId(f"r{number}"), attempt=1)), Dispatch)
        assert after.decision.mode == "least_loaded"
    assert seen == ["p0", "p1", "p0", "p1"]


def test_a_hand_off_goes_near_and_where_part_of_it_is() -> None:
    near, far = {"rack": "a"}, {"rack": "b"}
    world = RouterWorld(
        p("p0", labels=near),
        d("d-far", labels=far),
        d("d-near", labels=near),
        handoff=HandoffSettings(conditional="off", distance={"rack": 4.0}),
    )
    world.post(arrived("r"))
    sent = only(world.post(Staged(id=R, attempt=1)), Dispatch)
    assert sent.target.worker == "d-near"
    terms = {cost.target.worker: cost.transfer for cost in sent.decision.candidates}
    assert terms["d-far"] == pytest.approx(4 * terms["d-near"]) and terms["d-near"] > 0


def test_a_session_has_a_home_for_each_stage() -> None:
    world = RouterWorld(p("p0"), p("p1"), d("d0"), d("d1"), handoff=ALWAYS, affinity=AffinitySettings(mode="hard"))
    homes = set()
    for number in range(4):
        name = f"r{number}"
        wish = Preferences(session="s")
        first = only(world.post(arrived(name, prompt(number), preferences=wish)), Dispatch)
        second = only(world.post(Staged(id=RequestId(name), attempt=1)), Dispatch)
        homes.add((first.target.worker, second.target.worker))
    assert len(homes) == 1


def test_pins_mean_the_stage_of_their_worker() -> None:
    world = RouterWorld(p("p0"), p("p1"), d("d0"), d("d1"), handoff=ALWAYS)
    wish = Preferences(worker=WorkerId("d1"), prefill=WorkerId("p1"))
    first = only(world.post(arrived("r", preferences=wish)), Dispatch)
    second = only(world.post(Staged(id=R, attempt=1)), Dispatch)
    assert (first.target.worker, second.target.worker) == ("p1", "d1")
    early = only(world.post(arrived("s", prompt(4), preferences=Preferences(worker=WorkerId("p1")))), Dispatch)
    assert (early.stage, early.target.worker) == ("prefill", "p1")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"handoff": "bootstrap"}, "hands KV over as bootstrap"),
        ({"layout": "b"}, "hands KV over as completed with layout b"),
        ({"handoff": None}, "says no way in which KV could be handed over"),
        ({"block_size": 2 * BLOCK}, "block_size 32 differs"),
    ],
)
def test_what_could_not_be_handed_over_is_refused_when_it_joins(other: dict[str, object], said: str) -> None:
    world = RouterWorld(p("p0", layout="a"))
    noted = only(world.post(WorkerJoined(card=d("d0", **other))), OperatorNote)
    assert noted.kind == "worker_refused" and said in noted.text
    assert world.router.roster.get(WorkerId("d0")) is None


def test_an_engine_that_changes_its_role_keeps_what_is_known_of_it() -> None:
    tokens = prompt(1, 64)
    world = RouterWorld(p("p0"), d("d0"), handoff=ALWAYS)
    world.post(arrived("r", tokens))
    world.post(Staged(id=R, attempt=1))
    world.post(FirstToken(id=R, attempt=2))
    world.post(Finished(id=R, attempt=2, tokens=1))
    world.post(WorkerDraining(worker=WorkerId("p0"), epoch=1))
    world.post(WorkerJoined(card=p("p0", epoch=2, started_epoch=1, role="aggregated")))
    again = only(world.post(arrived("again", [*tokens, *prompt(2, 16)])), Dispatch)
    costs = {cost.target.worker: cost.overlap_tokens for cost in again.decision.candidates}
    assert again.stage == "aggregated" and costs["p0"] == 64
    assert world.router.pools["m"].roles.workers == {"aggregated": 1, "decode": 1}


def test_kv_is_fetched_from_a_worker_that_has_changed_its_role_meanwhile() -> None:
    world = split()
    world.post(arrived("r"))
    world.post(WorkerJoined(card=p("p0", epoch=2, started_epoch=1, role="aggregated")))
    dispatch = only(world.post(Staged(id=R, attempt=1)), Dispatch)
    assert dispatch.stage == "decode" and dispatch.handoff is not None and dispatch.handoff.source is not None
    assert dispatch.handoff.source.id == "p0"


def test_when_all_of_one_layout_have_gone_another_may_come() -> None:
    world = RouterWorld(p("p0", layout="a"))
    world.post(WorkerLeft(worker=WorkerId("p0"), epoch=1, reason="replaced"))
    world.post(WorkerJoined(card=p("p1", layout="b")))
    assert world.router.roster.get(WorkerId("p1")) is not None


def test_a_router_that_is_restored_goes_on_with_its_hand_offs() -> None:
    world = split()
    world.post(arrived("r"))
    world.post(arrived("s", prompt(2)))
    world.post(Staged(id=R, attempt=1))
    saved = world.router.snapshot()
    other = split()
    other.router.restore(saved)
    other.router.check()
    assert other.router.snapshot() == saved
    events = [
        FirstToken(id=R, attempt=2),
        Staged(id=RequestId("s"), attempt=1),
        Finished(id=R, attempt=2, tokens=2),
        Cancelled(id=RequestId("s")),
    ]
    for event in events:
        now = world.now + MILLISECOND
        assert world.router.handle(now, event) == other.router.handle(now, event)


def test_kv_that_nobody_could_fetch_is_fetched_once_somebody_comes() -> None:
    world = split()
    world.post(arrived("r"))
    world.post(WorkerDraining(worker=WorkerId("d0"), epoch=1))
    assert only(world.post(Cancelled(id=R)), Release).target is None
    release = only(world.post(WorkerJoined(card=d("d1"))), Release)
    assert release.target is not None and (release.target.id, release.attempt) == ("d1", 1)
    assert none(world.post(WorkerJoined(card=d("d2"))), Release)


# --- workers that do nothing but their roles ----------------------------------------------------------------------


def pair(**changes: object) -> RouterWorld:
    """Return a world with a pair as SGLang has it: each side refuses a request without the other."""
    fixed = {"handoff": "bootstrap", "fixed_role": True}
    return RouterWorld(p("p0", **fixed), d("d0", **fixed), **changes)


def test_a_pair_splits_every_request_even_a_short_one() -> None:
    world = pair(handoff=HandoffSettings(conditional="thresholds"))
    first, second = (one for one in world.post(arrived("r", 16)) if isinstance(one, Dispatch))
    assert [(one.stage, one.target.worker) for one in (first, second)] == [("prefill", "p0"), ("decode", "d0")]
    assert first.decision.flow == "remote prefill: d0 does not prefill"
    world.post(Staged(id=R, attempt=1))
    world.post(FirstToken(id=R, attempt=2))
    world.post(Finished(id=R, attempt=2, tokens=1))
    again = world.post(arrived("again", 16))
    assert [one.stage for one in again if isinstance(one, Dispatch)] == ["prefill", "decode"], "all of it is cached"


@pytest.mark.parametrize("gone", ["p0", "d0"])
def test_half_a_pair_answers_nothing(gone: str) -> None:
    world = pair()
    world.post(WorkerLeft(worker=WorkerId(gone), epoch=1, reason="killed"))
    closed = only(world.post(arrived("r")), Closed)
    assert (closed.status, closed.code) == (503, "no_worker"), closed.reason
    status = world.router.status(world.now)
    assert any("requests wait, or are refused" in finding.text for finding in status.findings), status.findings


def test_a_failed_prefill_of_a_pair_is_never_done_by_the_one_that_decodes() -> None:
    fixed = {"handoff": "bootstrap", "fixed_role": True}
    world = RouterWorld(p("p0", **fixed), p("p1", **fixed), d("d0", **fixed))
    first = next(one for one in world.post(arrived("r")) if isinstance(one, Dispatch))
    sent = world.post(Failed(id=R, attempt=first.attempt, reason="no answer", retryable=True))
    stages = [(one.stage, one.target.worker) for one in sent if isinstance(one, Dispatch)]
    other = "p1" if first.target.worker == "p0" else "p0"
    assert stages == [("prefill", other), ("decode", "d0")]
    assert world.router.pools["m"].counts.handoffs["fallback"] == 0


def test_what_no_pair_can_answer_is_refused_once_with_its_reason() -> None:
    closed = only(pair().post(arrived("r", whole=True, undivided=True)), Closed)
    assert (closed.status, closed.fault) == (400, "client")
    assert "d0 goes on with one prefill each, which gives one answer to each prompt" in closed.reason
    both = pair().post(arrived("r", whole=True))
    assert [one.stage for one in both if isinstance(one, Dispatch)] == ["prefill", "decode"], "lists and echoes go"


def test_numbers_of_hand_offs_name_the_rank_that_prefills() -> None:
    world = pair()
    fixed = {"handoff": "bootstrap", "fixed_role": True, "ranks": 3}
    world.post(WorkerLeft(worker=WorkerId("p0"), epoch=1, reason="over"))
    world.post(WorkerJoined(card=p("p1", **fixed)))
    for turn in range(20):
        first = next(one for one in world.post(arrived(f"r{turn}")) if isinstance(one, Dispatch))
        assert first.handoff is not None and first.handoff.key % 3 == first.target.rank


def test_an_aggregated_worker_beside_a_pair_does_what_the_pair_can_not() -> None:
    world = pair()
    world.post(WorkerJoined(card=card("a0", fixed_role=True)))
    sent = only(world.post(arrived("r", whole=True, undivided=True)), Dispatch)
    assert (sent.stage, sent.target.worker) == ("aggregated", "a0")


def test_a_link_that_fails_while_both_sides_answer_is_avoided_and_named() -> None:
    fixed = {"handoff": "bootstrap", "fixed_role": True}
    world = RouterWorld(p("p0", **fixed), d("d0", **fixed), d("d1", **fixed))
    failed = 0
    for turn in range(40):
        sent = [one for one in world.post(arrived(f"r{turn}", prompt(turn))) if isinstance(one, Dispatch)]
        while (last := sent[-1]).target.worker == "d0":
            failed += 1
            broke = Failed(id=last.id, attempt=last.attempt, reason="KVTransferError", retryable=True, status=500)
            sent = [one for one in world.post(broke, after=120.0) if isinstance(one, Dispatch)]
        world.post(Staged(id=last.id, attempt=sent[-2].attempt))
        world.post(FirstToken(id=last.id, attempt=last.attempt))
        world.post(Finished(id=last.id, attempt=last.attempt, tokens=1))
    assert failed == 3, "then it gets none from p0 any more"
    (finding,) = [one for one in world.router.status(world.now).findings if one.level == "error"]
    assert "the last 3 hand-offs from p0 to d0 failed, although both answer: KVTransferError" in finding.text
    again = RouterWorld()
    again.router.restore(world.router.snapshot())
    assert again.router.pools["m"].roles.links == world.router.pools["m"].roles.links
    world.post(WorkerJoined(card=d("d0", epoch=2, **fixed)))
    assert world.router.pools["m"].roles.links == {}, "it was restarted"
