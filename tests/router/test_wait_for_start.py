"""Does a request wait for a worker that is to be started, and for no longer than that?"""

from penstock.kernel.machine import Woken
from penstock.kernel.values import WorkerId
from penstock.router.events import Closed, WorkerJoined, WorkerLeft
from penstock.router.settings import QueueSettings
from penstock.testing import RouterWorld, arrived, card, none
from penstock.testing.router_world import MODEL

WAITS = QueueSettings(start_wait=90.0)


def test_without_a_wait_a_model_without_workers_refuses_at_once() -> None:
    world = RouterWorld()
    world.post(arrived("a"))
    assert world.ended("a").outcome == "rejected" and world.ended("a").status == 503


def test_a_request_waits_for_the_first_worker_of_its_model() -> None:
    world = RouterWorld(queue=WAITS)
    assert none(world.post(arrived("a")), Closed) and world.router.waiting(MODEL) == 1
    world.post(WorkerJoined(card=card("w0")), after=20.0)
    assert world.sent("a").target.worker == "w0" and world.router.waiting(MODEL) == 0


def test_it_waits_again_after_the_last_worker_has_left() -> None:
    world = RouterWorld(card("w0"), queue=WAITS)
    world.post(WorkerLeft(worker=WorkerId("w0"), epoch=1, reason="the planner took it"))
    assert none(world.post(arrived("a"), after=1.0), Closed)
    world.post(WorkerJoined(card=card("w1")), after=1.0)
    assert world.sent("a").target.worker == "w1"


def test_nobody_waits_for_longer_than_the_limit_and_is_told_why() -> None:
    world = RouterWorld(queue=WAITS)
    world.post(arrived("a"))
    assert none(world.post(Woken(), after=89.0), Closed)
    world.post(Woken(), after=1.1)
    ended = world.ended("a")
    assert ended.outcome == "rejected" and ended.status == 503 and "waited 90 s" in ended.reason


def test_only_as_many_wait_as_may_queue() -> None:
    world = RouterWorld(queue=QueueSettings(start_wait=90.0, length_max=2))
    for name in ("a", "b", "c"):
        world.post(arrived(name))
    assert world.router.waiting(MODEL) == 2 and world.ended("c").status == 503
