"""Are hundreds of sockets read in turn, with time for others between, and is it said how late they are?"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from penstock.adapters.engines.kv_events.kv_poller import LAG_MAX, PER_TURN, SLICE, WAITING_MAX, WINDOW, KvPoller
from penstock.adapters.engines.kv_events.kv_publisher import KvPublisher
from penstock.adapters.engines.kv_events.kv_subscriber import KvSubscriber
from penstock.adapters.seams import KvBatch
from penstock.adapters.zmq_receive import shared_context
from penstock.kernel.values import KvRemoved

PATIENCE = 30.0
_numbers = itertools.count()


class Clock:
    """A clock that moves when it is told to; as a wall clock it shows 1,000 more."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1000.0 + self.now


@contextmanager
def pairs(count: int) -> Iterator[list[tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]]]:
    """Yield (sender, receiver) pairs."""
    made = []
    for _ in range(count):
        sender, receiver = shared_context().socket(zmq.PAIR), shared_context().socket(zmq.PAIR)
        sender.linger = receiver.linger = 0
        address = f"inproc://kv-poller-test-{next(_numbers)}"
        sender.bind(address)
        receiver.connect(address)
        made.append((sender, receiver))
    yield made
    for sender, _ in made:
        sender.close(0)


def never(error: Exception) -> None:
    raise AssertionError(error)


async def until(met: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not met():
            await asyncio.sleep(0)


async def test_others_have_their_turn_after_each_slice_however_many_sockets_have_messages() -> None:
    poller, taken = KvPoller(), [0]

    def take(frames: list[bytes]) -> None:
        taken[0] += 1
        end = time.perf_counter() + SLICE
        while time.perf_counter() < end:
            pass  # one message is a slice's work

    between = []
    with pairs(20) as made:
        for sender, _ in made:
            for _ in range(20):
                sender.send(b"x")
        sources = [poller.add(receiver, take, never, overrun=lambda: None) for _, receiver in made]
        async with asyncio.timeout(PATIENCE):
            while taken[0] < 400:
                before = taken[0]
                await asyncio.sleep(0)
                between.append(taken[0] - before)
        for source in sources:
            source.close()
    assert max(between) <= 2


async def test_a_socket_with_many_messages_does_not_keep_the_others_waiting() -> None:
    poller, order = KvPoller(), list[int]()
    with pairs(3) as made:
        for number, (sender, _) in enumerate(made):
            for _ in range(500 if number == 0 else 1):
                sender.send(b"x")
        sources = [
            poller.add(receiver, lambda frames, number=number: order.append(number), never)
            for number, (_, receiver) in enumerate(made)
        ]
        await until(lambda: len(order) == 502)
        for source in sources:
            source.close()
    assert max(order.index(1), order.index(2)) <= 2 * PER_TURN


async def test_a_paused_socket_waits_and_all_of_it_is_taken_at_its_release() -> None:
    poller, taken = KvPoller(), list[bytes]()
    with pairs(1) as [(sender, receiver)]:
        source = poller.add(receiver, lambda frames: taken.extend(frames), never, paused=True)
        sender.send(b"1")
        async with asyncio.timeout(PATIENCE):
            await source.arrived.wait()
        sender.send(b"2")
        assert not taken and not poller.waiting
        source.release()
        await until(lambda: len(taken) == 2)
        sender.send(b"3")
        await until(lambda: len(taken) == 3)
        source.close()
    assert taken == [b"1", b"2", b"3"]


async def test_the_lag_of_a_burst_grows_to_its_end_and_is_gone_a_while_later() -> None:
    clock = Clock()
    poller = KvPoller(clock, clock.wall)
    seen = list[float]()

    def take(frames: list[bytes]) -> float:
        seen.append(poller.lag_longest)
        clock.now += 0.1
        return 1000.0  # all were sent at one time

    with pairs(1) as [(sender, receiver)]:
        for _ in range(50):
            sender.send(b"x")
        source = poller.add(receiver, take, never, overrun=lambda: None)
        await until(lambda: len(seen) == 50)
        await until(lambda: not poller.waiting)
        source.close()
    assert seen == sorted(seen) and poller.lag_longest == pytest.approx(5.0)
    assert poller.lag == 0
    clock.now += WINDOW
    assert poller.lag_longest == pytest.approx(5.0)
    clock.now += WINDOW + 1
    assert poller.lag_longest == 0


@pytest.mark.parametrize("skew", [0.0, 3600.0, -3600.0])
async def test_a_socket_that_is_never_empty_is_as_late_as_its_messages_are_whatever_its_clock(skew: float) -> None:
    clock = Clock()
    poller, count = KvPoller(clock, clock.wall), 0
    with pairs(1) as [(sender, receiver)]:
        waiting = [clock.wall() + skew] * 2

        def take(frames: list[bytes]) -> float:
            nonlocal count
            count += 1
            clock.now += 0.1
            if count < 300:
                waiting.append(clock.wall() + skew)
                sender.send(b"x")
            return waiting.pop(0)

        sender.send(b"x")
        sender.send(b"x")
        source = poller.add(receiver, take, never, overrun=lambda: None)
        await until(lambda: count == 301)
        source.close()
    assert poller.lag_longest < 0.5 < clock.now


async def test_what_waited_too_long_is_skipped_but_for_the_last_and_counted() -> None:
    clock = Clock()
    poller, taken = KvPoller(clock, clock.wall), list[bytes]()

    def take(frames: list[bytes]) -> float:
        taken.extend(frames)
        if len(taken) == PER_TURN:
            clock.now += LAG_MAX + 1
        return 1000.0 if len(taken) <= PER_TURN else clock.wall()

    with pairs(1) as [(sender, receiver)]:
        for number in range(100):
            sender.send(b"%d" % number)
        source = poller.add(receiver, take, never, overrun=lambda: None)
        await until(lambda: b"99" in taken)
        sender.send(b"100")
        await until(lambda: b"100" in taken)
        source.close()
    assert taken == [b"%d" % number for number in (*range(PER_TURN), 99, 100)]
    assert poller.skipped + len(taken) == 101
    assert poller.lag_longest > LAG_MAX


async def test_what_can_not_be_taken_ends_its_own_socket_alone() -> None:
    poller, failed, taken = KvPoller(), list[Exception](), list[bytes]()
    with pairs(2) as [(bad, spoilt), (good, sound)]:

        def refuse(frames: list[bytes]) -> float:
            raise ValueError("it does not fit")

        poller.add(spoilt, refuse, failed.append)
        source = poller.add(sound, lambda frames: taken.extend(frames), never)
        bad.send(b"x")
        await until(lambda: failed)
        good.send(b"y")
        await until(lambda: taken)
        assert spoilt.closed and not sound.closed
        source.close()


async def test_hundreds_of_subscriptions_need_no_task_each_and_no_more_sockets_than_there_may_be() -> None:
    """libzmq opens 1,023 sockets unless it is told otherwise, of which a subscription takes three."""
    poller = KvPoller()
    before = len(asyncio.all_tasks())
    subscribers = [KvSubscriber(f"tcp://127.0.0.1:{1 + number}", poller=poller) for number in range(360)]
    try:
        for subscriber in subscribers:
            subscriber.listen(lambda batch: None, never)
            subscriber.release()
        assert len(asyncio.all_tasks()) == before
    finally:
        for subscriber in subscribers:
            subscriber.close()


async def test_an_engine_that_dropped_the_end_of_a_burst_and_is_silent_is_asked_for_it() -> None:
    publisher = KvPublisher(hwm=WAITING_MAX)
    serving = asyncio.create_task(publisher.serve_replay())
    subscriber = KvSubscriber(publisher.endpoint, publisher.replay_endpoint)
    heard = list[KvBatch]()
    try:
        subscriber.listen(heard.append, never)
        arrived = asyncio.ensure_future(subscriber.arrived())
        async with asyncio.timeout(PATIENCE):
            while not arrived.done():
                publisher.publish(1.0, [KvRemoved(hashes=[0])])
                await asyncio.wait({arrived}, timeout=0.02)
        large = [KvRemoved(hashes=[1 << 63] * 4_000)]
        for _ in range(8 * WAITING_MAX):
            publisher.publish(1.0, large)
            await asyncio.sleep(0)
        subscriber.release()
        await until(lambda: heard and heard[-1].sequence == publisher.next_sequence - 1)
        numbers = [batch.sequence for batch in heard]
        assert numbers == sorted(set(numbers)) and len(numbers) < publisher.next_sequence - numbers[0]
        assert publisher.replays == 1
    finally:
        subscriber.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        publisher.close()
