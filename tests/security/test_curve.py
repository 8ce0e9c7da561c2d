"""Who hears and is heard over ZeroMQ? Only holders of the cluster's secret, and a wrong one is counted and told."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable

import pytest
import zmq
import zmq.asyncio

from penstock.adapters.engines.kv_events.kv_event_codec import encode_batch
from penstock.adapters.engines.kv_events.kv_publisher import KvPublisher
from penstock.adapters.engines.kv_events.kv_subscriber import KvSubscriber
from penstock.adapters.planes.zmq_plane import VERSION, ZmqPlane
from penstock.adapters.seams import PlaneMessage
from penstock.adapters.zmq_curve import bind_side
from penstock.adapters.zmq_receive import shared_context
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import KvCleared
from tests.kv_batches import batches_of

OURS, OTHER = ClusterSecret("the secret of this cluster"), ClusterSecret("the secret of another one")
PATIENCE = 20.0


async def until(condition: Callable[[], object], act: Callable[[], object] = lambda: None) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            made = act()
            if inspect.isawaitable(made):
                await made
            await asyncio.sleep(0.02)


class Ears:
    """Collects what a subscription yields."""

    def __init__(self, messages: AsyncIterator[PlaneMessage]) -> None:
        self.heard: list[PlaneMessage] = []
        self._task = asyncio.create_task(self._run(messages))

    async def _run(self, messages: AsyncIterator[PlaneMessage]) -> None:
        async for message in messages:
            self.heard.append(message)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.mark.parametrize(("mine", "theirs"), [(OURS, OTHER), (OURS, None), (None, OURS)])
async def test_planes_with_different_secrets_do_not_hear_each_other_and_say_so(mine, theirs, caplog):
    caplog.set_level(logging.WARNING)
    us, also_us, them = ZmqPlane("us", secret=mine), ZmqPlane("also us", secret=mine), ZmqPlane("them", secret=theirs)
    ears = Ears(us.subscribe("t"))
    try:
        await us.connect(them.endpoint)
        await us.connect(also_us.endpoint)

        async def speak() -> None:
            for plane in (also_us, them):
                await plane.publish("t", b"x")

        await until(lambda: us.others.failed and ears.heard, speak)
        await until(lambda: len(ears.heard) > 20, speak)
        assert {message.publisher for message in ears.heard} == {"also us"}
        assert us.others.failing == {them.endpoint}
        told = [record.message for record in caplog.records if "refuses us" in record.message]
        assert len(told) == 1, "told once, however often it is tried again"
    finally:
        await ears.close()
        for plane in (us, also_us, them):
            await plane.close()


async def test_a_stranger_at_our_socket_is_counted_and_hears_nothing(caplog):
    plane = ZmqPlane("us", secret=OURS)
    ears = Ears(plane.subscribe("t"))
    context = zmq.asyncio.Context()
    eavesdroppers = [context.socket(zmq.SUB) for _ in range(4)]
    for socket in eavesdroppers:
        socket.linger = 0
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(plane.endpoint)
    heard = [asyncio.ensure_future(socket.recv_multipart()) for socket in eavesdroppers]
    try:
        await until(lambda: plane.strangers.failed, lambda: plane.publish("t", b"x"))
        assert not any(each.done() for each in heard)
        assert caplog.text.count("tries to connect to our event plane") == 1
    finally:
        for each in heard:
            each.cancel()
        await ears.close()
        for socket in eavesdroppers:
            socket.close(0)
        await plane.close()
        context.term()


async def test_a_process_that_ends_in_the_middle_of_a_handshake_is_no_stranger():
    plane, other = ZmqPlane("us", secret=OURS), ZmqPlane("other", secret=OURS)
    ears = Ears(plane.subscribe("t"))
    try:
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(plane.endpoint.rsplit(":", 1)[1]))
            await reader.readexactly(10)  # its greeting has begun
            writer.close()
        await plane.connect(other.endpoint)
        await until(lambda: ears.heard, lambda: other.publish("t", b"x"))
        assert (plane.strangers.failed, plane.others.failed) == (0, 0)
    finally:
        await ears.close()
        await plane.close()
        await other.close()


async def test_kv_events_and_replay_need_the_secret():
    publisher = KvPublisher(secret=OURS)
    serving = asyncio.create_task(publisher.serve_replay())
    listeners = [KvSubscriber(publisher.endpoint, publisher.replay_endpoint, secret=s) for s in (OURS, OTHER, None)]
    batches = [batches_of(listener) for listener in listeners]
    first = [asyncio.ensure_future(anext(each)) for each in batches]
    try:
        await until(
            lambda: first[0].done() and listeners[1].handshakes.failed and listeners[2].handshakes.failed,
            lambda: publisher.publish(1.0, [KvCleared()]),
        )
        assert not first[1].done() and not first[2].done()
        assert listeners[0].handshakes.failed == 0 and publisher.security == "curve"
        asked = await listeners[0].replay(0, PATIENCE)
        assert asked is not None and [batch.sequence for batch in asked] == list(range(publisher.next_sequence))
        assert await listeners[1].replay(0, 0.3) is None
        assert publisher.replays == 1
    finally:
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        for listener in listeners:
            listener.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        publisher.close()


async def test_a_refused_feed_is_healed_when_the_engine_comes_back_with_our_secret():
    wrong = KvPublisher(secret=OTHER)
    endpoint = wrong.endpoint
    listener = KvSubscriber(endpoint, secret=OURS)
    first = asyncio.ensure_future(anext(batches_of(listener)))
    await until(lambda: listener.handshakes.failing)
    wrong.close()
    right = shared_context().socket(zmq.PUB)
    right.linger = 0
    bind_side(right, OURS)
    async with asyncio.timeout(PATIENCE):
        while not right.getsockopt(zmq.LAST_ENDPOINT).strip(b"\0"):
            try:
                right.bind(endpoint)
            except zmq.ZMQError:  # the port is free only when the old socket's thread has closed it
                await asyncio.sleep(0.02)
    try:
        batch = encode_batch(1.0, [KvCleared()], 0)
        await until(first.done, lambda: right.send_multipart((b"", bytes(8), batch)))
        assert not listener.handshakes.failing and listener.handshakes.failed
    finally:
        listener.close()
        right.close(0)


async def test_a_newer_version_on_the_plane_is_left_out_counted_and_told(caplog):
    plane, other = ZmqPlane("us"), ZmqPlane("newer")
    ears = Ears(plane.subscribe("t"))
    await plane.connect(other.endpoint)
    try:
        await until(lambda: ears.heard, lambda: other.publish("t", b"x"))
        number = bytes([VERSION + 1]) + bytes(8)
        other._pub.send_multipart((b"t", b"newer", number, b"x"))
        other._pub.send_multipart((b"t", b"newer", number, b"x", b"a frame that we do not know"))
        other._pub.send_multipart((b"t", b"newer", b"", b"x"))
        await until(lambda: plane.newer == 2 and plane.malformed == 1)
        assert "update this one" in caplog.text
        count = len(ears.heard)
        await until(lambda: len(ears.heard) > count, lambda: other.publish("t", b"x"))
    finally:
        await ears.close()
        await plane.close()
        await other.close()
