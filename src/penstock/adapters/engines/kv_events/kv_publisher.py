"""KV event publisher of the simulated engine: a PUB socket and a replay socket, as vLLM has them.

Message: ``[topic, sequence u64 big-endian, payload]``. Replay: a DEALER sends ``["", first u64 big-endian]`` and gets
``["", topic, sequence, payload]`` for each batch still kept from there on, then ``["", "", ff * 8, ""]``.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

import zmq
import zmq.asyncio

from penstock.adapters.engines.kv_events.kv_event_codec import encode_batch
from penstock.adapters.zmq_curve import MECHANISM, bind_side
from penstock.adapters.zmq_receive import shared_context
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import KvEvent

END = b"\xff" * 8
_BREATH = 256
"""Batches sent to one replay client before other tasks get a turn."""
BUFFER_STEPS = 10_000
"""Batches that are kept for replay: vLLM's default."""


class KvPublisher:
    """Publish KV events on free loopback ports; `endpoint` and `replay_endpoint` hold them.

    Args:
        host: address to bind.
        topic: first frame of each message.
        rank: data-parallel rank, written into each batch.
        buffer_steps: batches kept for replay; older ones can't be repaired.
        hwm: messages kept for a slow subscriber before it loses some (it detects the gap).
        secret: of the cluster; both sockets then speak CURVE. None speaks plain, as stock engines do.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        topic: str = "",
        rank: int = 0,
        buffer_steps: int = BUFFER_STEPS,
        hwm: int = 100_000,
        secret: ClusterSecret | None = None,
    ) -> None:
        self.security = None if secret is None else MECHANISM
        """What a subscriber must speak; None is plain."""
        self.replays = 0
        """Replay requests answered to the end."""
        self.rejected = 0
        """Replay requests that were malformed, or whose client did not take the answer."""
        self.next_sequence = 0
        self._topic = topic.encode()
        self._rank = rank
        self._replay_buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        context = shared_context()
        self._pub = context.socket(zmq.PUB)
        self._pub.linger = 0
        self._pub.sndhwm = hwm
        self._router = zmq.asyncio.Context(context).socket(zmq.ROUTER)
        self._router.linger = 0
        # One whole answer fits in the queue of a client, and no more: a client that does not read costs a bounded
        # amount, and with ROUTER_MANDATORY the overflow is an error instead of a silent loss.
        self._router.sndhwm = buffer_steps + 1
        self._router.router_mandatory = 1
        bind_side(self._pub, secret)
        bind_side(self._router, secret)
        self.endpoint = _bind(self._pub, host)
        self.replay_endpoint = _bind(self._router, host)

    def publish(self, ts: float, events: Sequence[KvEvent]) -> int:
        """Send one batch to all subscribers and keep it for replay; returns its sequence, from 0 on.

        Never blocks: a subscriber whose queue is full loses the message and detects the gap.
        """
        sequence = self.next_sequence
        self.next_sequence += 1
        number = sequence.to_bytes(8, "big")
        payload = encode_batch(ts, events, self._rank)
        self._replay_buffer.append((number, payload))
        self._pub.send_multipart((self._topic, number, payload), zmq.NOBLOCK)
        return sequence

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled or closed; run it as a task."""
        while not self._router.closed:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                self.rejected += 1
                continue
            try:
                await self._answer(frames[0], frames[2])
                self.replays += 1
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                    raise
                self.rejected += 1

    def close(self) -> None:
        """Close both sockets; what was not sent is lost."""
        self._pub.close(0)
        self._router.close(0)

    async def _answer(self, client: bytes, first: bytes) -> None:
        # A copy: batches published while we answer reach the client by its subscription.
        for index, (number, payload) in enumerate(list(self._replay_buffer)):
            if number >= first:  # big-endian, so bytes compare as the numbers do
                await self._router.send_multipart((client, b"", self._topic, number, payload), zmq.NOBLOCK)
            if index % _BREATH == _BREATH - 1:
                await asyncio.sleep(0)
        await self._router.send_multipart((client, b"", b"", END, b""), zmq.NOBLOCK)


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str) -> str:
    socket.bind(f"tcp://{host}:0")
    endpoint: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return endpoint.rstrip(b"\0").decode()
