"""Do tenants share the fleet by tokens, each with a queue of its own that does not fill the others' room?"""

import copy

from penstock.kernel.machine import nanos
from penstock.kernel.values import Prompt, RequestId, Slo, Target, WorkerId
from penstock.router.events import (
    Arrived,
    Cancelled,
    Closed,
    Dispatch,
    Failed,
    Finished,
    FirstToken,
    PeerUpdate,
    Placement,
    Preferences,
    Publish,
    Resume,
    SettingsChanged,
    Staged,
)
from penstock.router.fair_queue import CROWDING, HELD, WINDOW, FairQueue, IdleOnly
from penstock.router.request_queue import QueuedRequest
from penstock.router.router import Router
from penstock.router.settings import HandoffSettings, QueueSettings, RouterSettings
from penstock.router.workers.active_sequences import TargetLoad
from penstock.testing.router_world import RouterWorld, arrived, card, prompt

SHARES = {"a": 1.0, "b": 1.0}


def world(seats: int = 1, length_max: int = 8, **more: object) -> RouterWorld:
    queue = QueueSettings(shares=SHARES, length_max=length_max)
    return RouterWorld(card("w", max_num_seqs=seats), queue=queue, **more)


def ask(w: RouterWorld, name: str, tenant: str | None, *, osl: int = 10, tokens: int = 64, strict: int = 0) -> None:
    wish = Preferences(osl=osl, strict=strict)
    w.post(arrived(name, prompt(hash(name) % 997, tokens), tenant=tenant, preferences=wish), after=0.001)


def finish(w: RouterWorld, name: str, tokens: int | None = None) -> str | None:
    """End a request, with the output that was expected where no other is said, and return the one that is sent next."""
    if tokens is None:
        tokens = w.router.requests[w.sent(name).id].event.preferences.osl
    effects = w.post(Finished(id=w.sent(name).id, attempt=1, tokens=tokens), after=1.0)
    return next((effect.id for effect in effects if isinstance(effect, Dispatch)), None)


def served(w: RouterWorld, first: str, count: int) -> list[str]:
    """Let requests end one after the other, and return who was served."""
    out = [first]
    for _ in range(count - 1):
        following = finish(w, out[-1])
        assert following is not None
        out.append(following)
    return out


def test_tenants_take_turns_however_many_requests_one_has_waiting() -> None:
    w = world()
    for number in range(5):
        ask(w, f"a{number}", "a")
    ask(w, "b0", "b")
    ask(w, "b1", "b")
    assert served(w, "a0", 6) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_share_is_counted_in_tokens_not_in_requests() -> None:
    w = world()
    ask(w, "first", "b", osl=10)
    for number in range(3):
        ask(w, f"a{number}", "a", osl=936)  # 1,000 tokens with the prompt
        ask(w, f"b{number}", "b", osl=436)  # 500
    order = served(w, "first", 7)
    assert order.index("b2") < order.index("a2") and order.index("b1") < order.index("a1")


def test_an_output_that_was_shorter_than_expected_is_given_back() -> None:
    w = world()
    ask(w, "a0", "a", osl=10_000)
    ask(w, "a1", "a")
    ask(w, "b0", "b", osl=100)
    ask(w, "b1", "b", osl=100)
    assert finish(w, "a0", tokens=10) == "b0"
    assert finish(w, "b0", tokens=100) == "a1", "a has had no more than b"


def test_a_flood_fills_its_own_room_only_and_is_refused_with_429() -> None:
    w = world(length_max=8)
    for number in range(7):
        ask(w, f"a{number}", "a")
    refused = w.ended("a5")
    assert (refused.status, refused.fault) == (429, "overloaded") and "share of the queue" in refused.reason
    for number in range(4):
        ask(w, f"b{number}", "b")
    assert not [e for e in w.effects if isinstance(e, Closed) and e.id.startswith("b")]


def test_tenants_without_a_weight_share_one() -> None:
    w = world(length_max=60)
    for number in range(3):
        ask(w, f"a{number}", "a")
        ask(w, f"x{number}", None)
        ask(w, f"y{number}", "unknown")
    order = served(w, "a0", 6)
    assert sum(name.startswith("a") for name in order) == 3


def test_a_strict_class_goes_before_every_tenants_others() -> None:
    w = world()
    ask(w, "a0", "a")
    ask(w, "b0", "b")
    ask(w, "a1", "a", strict=1)
    assert finish(w, "a0") == "a1"


def test_without_a_limit_that_workers_report_nothing_waits() -> None:
    w = RouterWorld(
        card("w", kv_blocks=None, max_num_batched_tokens=None), queue=QueueSettings(shares=SHARES, length_max=1)
    )
    for number in range(20):
        ask(w, f"a{number}", "a")
    assert len([e for e in w.effects if isinstance(e, Dispatch)]) == 20


def test_a_cancelled_request_leaves_no_tokens_in_service_and_no_place_in_the_queue() -> None:
    w = world()
    ask(w, "a0", "a")
    ask(w, "a1", "a")
    w.post(Cancelled(id=w.sent("a0").id))
    w.post(Cancelled(id=w.sent("a1").id))
    fair = w.router.pools["m"].fair
    assert fair is not None and fair.serving == {} and not fair.waiting


def test_a_restored_router_goes_on_with_the_same_shares() -> None:
    w = world(seats=2)
    for number in range(4):
        ask(w, f"a{number}", "a")
        ask(w, f"b{number}", "b", osl=200)
    saved = copy.deepcopy(w.router.snapshot())
    other = Router(w.router.settings, slo=Slo(), seed=1)
    other.restore(saved)
    other.check()
    end = Finished(id=w.sent("a0").id, attempt=1, tokens=3)
    assert other.handle(w.now + 5, end) == w.router.handle(w.now + 5, end)
    assert other.snapshot() == w.router.snapshot()


def test_shares_are_switched_on_and_off_in_a_running_router() -> None:
    w = RouterWorld(card("w", max_num_seqs=1), queue=QueueSettings(threshold=0.0))
    ask(w, "a0", "a")
    ask(w, "a1", "a")
    on = RouterSettings(queue=QueueSettings(shares=SHARES))
    w.post(SettingsChanged(settings=on, slo=Slo(), keys=("router.queue.shares",)))
    ask(w, "b0", "b")
    assert finish(w, "a0") == "a1"
    off = RouterSettings(queue=QueueSettings())
    w.post(SettingsChanged(settings=off, slo=Slo(), keys=("router.queue.shares",)))
    w.post(SettingsChanged(settings=on, slo=Slo(), keys=("router.queue.shares",)))
    w.post(Finished(id=w.sent("a1").id, attempt=1, tokens=1))
    w.post(Finished(id=w.sent("b0").id, attempt=1, tokens=1))
    fair = w.router.pools["m"].fair
    assert fair is not None and fair.serving == {}


def in_service(w: RouterWorld) -> dict[str, int]:
    fair = w.router.pools["m"].fair
    assert fair is not None
    return dict(fair.serving)


def test_a_hand_off_counts_its_tenants_tokens_once_and_releases_them_once() -> None:
    settings = {"handoff": HandoffSettings(conditional="off"), "queue": QueueSettings(shares=SHARES)}
    cards = (card("p0", role="prefill", handoff="completed"), card("d0", role="decode", handoff="completed"))
    w = RouterWorld(*cards, **settings)
    w.router.shared = True
    published = [each.placement for each in w.post(ask_of("r", "a")) if isinstance(each, Publish)]
    assert in_service(w) == {"a": 74} and w.sent("r").stage == "prefill"
    published += [
        each.placement
        for each in w.post(Staged(id=RequestId("r"), attempt=1, cached=0), after=0.2)
        if isinstance(each, Publish)
    ]
    assert w.sent("r").stage == "decode" and in_service(w) == {"a": 74}, "the second leg is no new work"
    assert [(each.tenant, each.work) for each in published if each.step == "placed"] == [("a", 74), (None, 0)]
    w.post(FirstToken(id=RequestId("r"), attempt=2), after=0.1)
    assert in_service(w) == {"a": 74}
    w.post(Finished(id=RequestId("r"), attempt=2, tokens=10), after=0.1)
    assert in_service(w) == {} and w.ended("r").outcome == "ok"


def test_a_prefill_that_is_lost_and_a_cancelled_decode_release_them_once() -> None:
    settings = {"handoff": HandoffSettings(conditional="off"), "queue": QueueSettings(shares=SHARES)}
    cards = (card("p0", role="prefill", handoff="completed"), card("d0", role="decode", handoff="completed"))
    w = RouterWorld(*cards, **settings)
    w.post(ask_of("r", "a"))
    w.post(Failed(id=RequestId("r"), attempt=1, reason="reset", retryable=True), after=0.1)
    assert in_service(w) == {"a": 74}, "it goes on, by itself or elsewhere"
    w.post(Cancelled(id=RequestId("r")), after=0.1)
    assert in_service(w) == {} and "r" not in w.router.requests


def test_a_migration_keeps_its_tenants_tokens_and_releases_them_once() -> None:
    w = RouterWorld(card("w0"), card("w1"), queue=QueueSettings(shares=SHARES))
    w.router.shared = True
    first = w.post(ask_of("r", "b"))
    assert in_service(w) == {"b": 74}
    w.post(FirstToken(id=RequestId("r"), attempt=1), after=0.1)
    point = Resume(prompt=Prompt(69), tokens=5)
    lost = Failed(id=RequestId("r"), attempt=1, reason="connection reset", retryable=False, resume=point)
    second = w.post(lost, after=0.1)
    assert w.sent("r").attempt == 2 and in_service(w) == {"b": 74}
    placed = [each.placement for each in (*first, *second) if isinstance(each, Publish)]
    assert [each.work for each in placed if each.step == "placed"] == [74, 0]
    w.post(Finished(id=RequestId("r"), attempt=1, tokens=5), after=0.1)  # the lost leg has nothing to release
    assert in_service(w) == {"b": 74}
    w.post(Finished(id=RequestId("r"), attempt=2, tokens=10), after=0.1)
    assert in_service(w) == {} and w.ended("r").migrations == 1
    w.post(Finished(id=RequestId("r"), attempt=2, tokens=10), after=0.1)
    assert in_service(w) == {}


def test_what_another_router_sends_for_a_tenant_counts_in_its_share_here() -> None:
    w = world(seats=1)
    ask(w, "busy", "b", osl=10)
    ask(w, "a0", "a", osl=10)
    ask(w, "b0", "b", osl=10)
    there = Placement(
        step="placed", id=RequestId("p"), model="m", target=Target(WorkerId("w"), 0), tenant="a", work=1000
    )
    w.post(PeerUpdate(router="other", placement=there))
    w.post(PeerUpdate(router="other", placement=Placement(step="ended", id=there.id, model="m", target=there.target)))
    assert finish(w, "busy") == "b0", "tenant a has had its turn elsewhere"
    assert finish(w, "b0") == "a0" and in_service(w) == {"a": 74}


def ask_of(name: str, tenant: str) -> Arrived:
    return arrived(name, prompt(1, 64), tenant=tenant, preferences=Preferences(osl=10))


def busy_world(fullness: float, flood: int, seconds: int = 20) -> FairQueue:
    """Let tenant b ask for ten requests a second and a for ``flood``, of 1,000 tokens each, all of which are sent."""
    fair = FairQueue(QueueSettings(shares=SHARES))
    for tenth in range(10 * seconds):
        now = nanos(tenth / 10)
        for tenant, count in (("b", 1), ("a", flood // 10)):
            for _ in range(count):
                fair.arrived(tenant, 1000, fullness, now)
                fair.begin(tenant, 1000, now)
    return fair


def test_a_flood_is_held_only_where_the_fleet_cannot_serve_all() -> None:
    end = nanos(20.0)
    overloaded, enough = busy_world(0.95, 100), busy_world(0.5, 100)
    assert overloaded.idle_only("a", end) == HELD and overloaded.idle_only("b", end) is None
    assert enough.floods("a", end) and enough.idle_only("a", end) == CROWDING
    assert overloaded.idle_only("a", end + nanos(WINDOW)) is None, "its pace has caught up"


def test_which_workers_a_held_tenant_may_have() -> None:
    worker = card("w", max_num_seqs=100, kv_blocks=100)
    idle, half_full, prefilling = TargetLoad(), TargetLoad(), TargetLoad()
    idle.requests, half_full.requests, prefilling.prefill_tokens = 10, 50, 64

    def left(limit: IdleOnly, *loads: TargetLoad) -> list[TargetLoad]:
        return [load for _, load in limit.leaves([(worker, load) for load in loads])]

    assert left(CROWDING, prefilling, half_full, idle) == [half_full, idle]
    assert left(CROWDING, prefilling) == []
    assert left(HELD, *[idle] * 7, half_full) == [idle] * 7
    assert left(HELD, *[idle] * 6, half_full, prefilling) == []
    assert left(HELD, idle) == [idle], "one worker: an idle one is better than none"


def test_what_is_asked_for_and_not_sent_counts_for_overload() -> None:
    fair, end = busy_world(0.5, 10), nanos(20.0)
    assert not fair.overloaded(end)
    for _ in range(100):
        fair.arrived("a", 1000, 0.5, end)
    assert fair.overloaded(end)


def test_a_tenant_twice_as_large_as_the_others_is_not_held() -> None:
    assert busy_world(0.95, 20).idle_only("a", nanos(20.0)) is None


def test_what_waits_of_a_flood_keeps_it_one_until_it_is_gone() -> None:
    fair, end = busy_world(0.5, 10), nanos(20.0)
    assert not fair.floods("a", end)
    for number in range(60):
        id = RequestId(f"r{number}")
        fair.add(
            QueuedRequest(
                id=id, arrived=end, priority=0, strict=0, deadline=end, new_tokens=1000, tenant="a", work=1000
            )
        )
    assert fair.floods("a", end)
    while (waiting := fair.peek(end)) is not None:
        fair.take(waiting)
    assert not fair.floods("a", end)


def test_a_decision_says_why_its_request_had_to_wait_for_its_tenants_sake() -> None:
    w = RouterWorld(card("w", max_num_seqs=64), queue=QueueSettings(shares=SHARES))
    for second in range(20):
        w.post(arrived(f"b{second}", prompt(second, 64), tenant="b"), after=0.5)
        w.post(Finished(id=w.sent(f"b{second}").id, attempt=1, tokens=10), after=0.5)
    for number in range(30):
        w.post(arrived(f"a{number}", prompt(100 + number, 64), tenant="a"), after=0.01)
    waiting = [id for id in w.router.requests if id in w.router.pools["m"].queue]
    assert waiting and "it waited" not in w.sent("a0").decision.reason
    for id in [id for id in w.router.requests if id not in waiting]:
        w.post(Finished(id=id, attempt=1, tokens=10), after=0.1)
    assert "s: its tenant " in w.sent(waiting[0]).decision.reason


def test_expected_answers_are_learnt_by_tenant() -> None:
    w = world(seats=4)
    for number in range(30):
        for tenant, tokens in (("a", 900), ("b", 30)):
            w.post(arrived(f"{tenant}{number}", prompt(number, 64), tenant=tenant), after=1.0)
            w.post(Finished(id=w.sent(f"{tenant}{number}").id, attempt=1, tokens=tokens), after=1.0)
    fair = w.router.pools["m"].fair
    assert fair is not None and (fair.output("a", 128.0), fair.output("b", 128.0)) == (900, 30)
    assert fair.output("c", 128.0) == 128
    w.post(arrived("last", prompt(99, 64), tenant="a"))
    assert in_service(w) == {"a": 964}
