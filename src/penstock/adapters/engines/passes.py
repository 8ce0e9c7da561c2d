"""What did an engine's forward passes do since we last asked? The sums that its own plug-in tells, pass by pass.

`penstock.inside` publishes in the engine's process; this listens. What a pass did is exact; what vLLM does not expose
(the KV that decoding reads, squares of it, tokens in line) is absent.
"""

import asyncio
import logging

import msgspec
import zmq
import zmq.asyncio

from penstock.adapters.zmq_receive import receive
from penstock.kernel.steps import PassTold
from penstock.kernel.values import StepStats
from penstock.kernel.wire import NewerVersion, WireDecoder

log = logging.getLogger(__name__)

MESSAGE_LIMIT = 64 << 10
"""Bytes of one message; a pass has some 150."""
_BREATH = 64


class Sums:
    """The sums of passes while a window is open."""

    __slots__ = (
        "decode_seqs",
        "decode_seqs_sq",
        "passes",
        "preemptions",
        "prefill_requests",
        "prefill_tokens",
        "prefill_tokens_sq",
        "waiting",
        "wall",
    )

    def __init__(self) -> None:
        self.passes = self.prefill_tokens = self.prefill_tokens_sq = self.prefill_requests = 0
        self.decode_seqs = self.decode_seqs_sq = 0
        self.wall = 0.0
        self.waiting: int | None = 0
        self.preemptions: int | None = 0

    def add(self, told: PassTold) -> None:
        """Take a pass in; a count that one pass does not tell is unknown for the window."""
        self.passes += 1
        self.wall += told.wall
        self.prefill_requests += told.prefill_requests
        self.prefill_tokens += told.prefill_tokens
        self.prefill_tokens_sq += told.prefill_tokens * told.prefill_tokens
        self.decode_seqs += told.decode_seqs
        self.decode_seqs_sq += told.decode_seqs * told.decode_seqs
        self.waiting = None if self.waiting is None or told.waiting is None else self.waiting + told.waiting
        known = self.preemptions is not None and told.preemptions is not None
        self.preemptions = (self.preemptions or 0) + (told.preemptions or 0) if known else None

    def close(self) -> StepStats:
        """Return the window as a value."""
        return StepStats(
            passes=self.passes,
            wall=self.wall,
            prefill_tokens=self.prefill_tokens,
            prefill_tokens_sq=self.prefill_tokens_sq,
            prefill_requests=self.prefill_requests,
            decode_seqs=self.decode_seqs,
            decode_seqs_sq=self.decode_seqs_sq,
            queued_requests=self.waiting,
            preemptions=self.preemptions,
        )


class Passes:
    """Hear the passes of one engine; ranks are added up.

    Args:
        endpoint: PUB endpoint of its plug-in.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.heard = 0
        """Passes heard since the beginning; 0 means that there may be no plug-in at all."""
        self.lost = 0
        """Passes that went missing on the way, by their numbers."""
        self.malformed = 0
        self._next: int | None = None
        self._sums = Sums()
        self._decode = WireDecoder(PassTold, "what an engine tells of a pass", binary=True).decode
        self._socket = zmq.asyncio.Context(zmq.Context.instance()).socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.rcvhwm = 10_000
        self._socket.maxmsgsize = MESSAGE_LIMIT
        self._socket.reconnect_ivl = 200
        self._socket.reconnect_ivl_max = 5_000
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)

    async def run(self) -> None:
        """Listen until cancelled or closed."""
        while (frames := await receive(self._socket)) is not None:
            self.hear(frames[-1])
            if self.heard % _BREATH == 0:
                await asyncio.sleep(0)  # a waiting message is handed over without giving up the loop

    def hear(self, payload: bytes) -> None:
        """Take one message; one that can't be read is counted and left out."""
        try:
            told: PassTold = self._decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, NewerVersion) as error:
            self.malformed += 1
            if self.malformed & (self.malformed - 1) == 0:
                log.warning("message %d of passes from %s left out: %s", self.malformed, self.endpoint, error)
            return
        if self._next is not None and told.number > self._next:
            self.lost += told.number - self._next
        self._next = told.number + 1
        self.heard += 1
        self._sums.add(told)

    def take(self) -> StepStats:
        """Return what was heard since the last call, and begin a new window."""
        sums, self._sums = self._sums, Sums()
        return sums.close()

    def close(self) -> None:
        """Close the socket."""
        if not self._socket.closed:
            self._socket.close(0)
