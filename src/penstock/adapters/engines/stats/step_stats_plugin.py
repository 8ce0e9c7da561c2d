"""Step statistics from Penstock's plug-in inside vLLM: sums of the forward passes that it publishes one by one.

`penstock.inside` publishes in the engine's process; this receives. What a pass did is exact; what vLLM does not expose
(the KV that decoding reads, its squares, queued tokens) is absent.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from penstock.adapters.zmq_receive import awaited_socket, receive
from penstock.kernel.message_version import NewerVersion, VersionedDecoder
from penstock.kernel.pass_report import PassReport
from penstock.kernel.values import StepStats

log = logging.getLogger(__name__)

MESSAGE_LIMIT = 64 << 10
"""Bytes of one message; a pass has some 150."""
_BREATH = 64


NO_PASS = StepStats(
    passes=0,
    wall=0.0,
    prefill_tokens=0,
    prefill_tokens_sq=0,
    prefill_requests=0,
    decode_seqs=0,
    decode_seqs_sq=0,
    queued_requests=0,
    preemptions=0,
)
"""The window without a pass; the sums that vLLM does not expose are absent in every window."""


def steps_of(report: PassReport) -> StepStats:
    """Return the window of one pass."""
    return StepStats(
        passes=1,
        wall=report.wall,
        prefill_tokens=report.prefill_tokens,
        prefill_tokens_sq=report.prefill_tokens * report.prefill_tokens,
        prefill_requests=report.prefill_requests,
        decode_seqs=report.decode_seqs,
        decode_seqs_sq=report.decode_seqs * report.decode_seqs,
        queued_requests=report.waiting,
        preemptions=report.preemptions,
    )


class PassSubscriber:
    """Receive the passes of one engine; ranks are added up.

    Args:
        endpoint: PUB endpoint of its plug-in.
        heard: called with every pass.
    """

    def __init__(self, endpoint: str, heard: Callable[[PassReport], None] | None = None) -> None:
        self.endpoint = endpoint
        self._heard = heard
        self.passes = 0
        """Passes received since the beginning; 0 means that there may be no plug-in at all."""
        self.lost = 0
        """Passes lost on the way, as gaps in their numbers show."""
        self.malformed = 0
        self._next: int | None = None
        self._window = NO_PASS
        self._decode = VersionedDecoder(PassReport, "what an engine tells of a pass", binary=True).decode
        self._socket = awaited_socket(zmq.SUB, 10_000, MESSAGE_LIMIT)
        self._socket.reconnect_ivl = 200
        self._socket.reconnect_ivl_max = 5_000
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)

    async def run(self) -> None:
        """Receive until cancelled or closed."""
        while (frames := await receive(self._socket)) is not None:
            self.receive(frames[-1])
            if self.passes % _BREATH == 0:
                await asyncio.sleep(0)  # a waiting message returns at once, and other tasks would starve

    def receive(self, payload: bytes) -> None:
        """Read one message; an unreadable one is counted and left out."""
        try:
            report: PassReport = self._decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, NewerVersion) as error:
            self.malformed += 1
            if self.malformed & (self.malformed - 1) == 0:
                log.warning("message %d of passes from %s left out: %s", self.malformed, self.endpoint, error)
            return
        if self._next is not None and report.number > self._next:
            self.lost += report.number - self._next
        self._next = report.number + 1
        self.passes += 1
        self._window += steps_of(report)
        if self._heard is not None:
            self._heard(report)

    def take(self) -> StepStats:
        """Return the sums since the last call, and begin a new window."""
        window, self._window = self._window, NO_PASS
        return window

    def close(self) -> None:
        """Close the socket."""
        if not self._socket.closed:
            self._socket.close(0)
