"""Every event plane keeps the contract, and ZMQ connects and leaves as it is told."""

from penstock.adapters.planes.zmq_plane import ZmqPlane
from penstock.testing.plane_contract import *  # noqa: F403
from penstock.testing.plane_contract import LAST, heard, until_last


async def test_zmq_hears_whom_it_was_connected_to_later_and_forgets_whom_it_left():
    a, b, c = ZmqPlane("a"), ZmqPlane("b"), ZmqPlane("c")
    try:
        messages = c.subscribe("t")
        await c.connect(a.endpoint)
        await c.connect(a.endpoint)  # twice is once: no message may arrive double
        await c.connect(c.endpoint)
        await heard(messages, (a, "t"))
        await c.disconnect(a.endpoint)
        await c.disconnect("tcp://127.0.0.1:1")  # never connected
        await c.connect(b.endpoint)
        await heard(messages, (b, "t"))
        for _ in range(3):
            await a.publish("t", b"left")
            await b.publish("t", b"stays")
        await b.publish("t", LAST)
        assert all(m.payload != b"left" for m in await until_last(messages))
    finally:
        for plane in (a, b, c):
            await plane.close()
