"""Picked request: one request that a gateway carries, between the router's choice and its one end.

The gateway sends the request to the chosen endpoint and reports what it sees of the answer; without a report the
router's deadline ends it.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.telemetry.request_span import NO_SPAN
from penstock.frontend.exchange.client_answer import CHUNKS_MAX, TokenTiming
from penstock.frontend.exchange.exchange import status_of
from penstock.frontend.exchange.sse import SseTap, cached_tokens, output_tokens, usage_of
from penstock.frontend.exchange.upstream_request import UpstreamRequest, engine_body, engine_headers, error_text
from penstock.frontend.http.error_responses import ErrorResponse, problem
from penstock.frontend.prompt.model_catalog import ResolvedModel
from penstock.frontend.prompt.request_body import choices_of
from penstock.kernel.values import Prompt, RequestId, WorkerId
from penstock.router.events import Arrived, Closed, Dispatch
from penstock.router.selection.cost import cheapest
from penstock.router.stage_graph import FINAL
from penstock.runtime.node.tickets import Ticket
from penstock_kubernetes.picker.worker_endpoints import Endpoints


class GatewayRequest(NamedTuple):
    """A request as a gateway shows it.

    Args:
        headers: names in lower case.
        subset: endpoints among which the gateway wants one chosen; None allows all.
        priority: of its objective: a class that goes before every lower one.
        tenant: on whose behalf it is sent; counts for the rate of a key.
        model: in place of the one that its body names.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    remote: str | None = None
    subset: Sequence[str] | None = None
    priority: int = 0
    tenant: str | None = None
    model: str | None = None


ANSWER_MAX = 1 << 20
"""Most bytes of an unary answer that are remembered for its usage, which stands at its end."""
PREFILLER = "x-prefiller-host-port"
"""Header by which the sidecar of llm-d, before a decode worker, knows where to prefill."""


class PickedRequestBooks(Protocol):
    """Hears of a request's first token, or its end without one, and of its end; of each once."""

    def first(self, picked: "PickedRequest") -> None: ...
    def over(self, picked: "PickedRequest", closed: Closed) -> None: ...


class PickedRequest:
    """One request; `Picker.pick` makes it.

    Args:
        caller: name of its key, its tenant or its address.
        fallbacks: most endpoints that are named beside the chosen one.
        track_output: the router wants to know how the output grows.
    """

    __slots__ = (
        *("_answer", "_books", "_counted", "_endpoints", "_grown", "_settled", "_tap"),
        *("_fallbacks", "_track_output", "_watched"),
        *("arrived", "caller", "closed", "id", "job", "prefill", "prompt", "request", "resolved", "speaker", "status"),
        *("ticket", "timing"),
    )

    def __init__(
        self,
        arrived: Arrived,
        resolved: ResolvedModel,
        job: UpstreamRequest,
        timing: TokenTiming,
        request: GatewayRequest,
        caller: str,
        endpoints: Endpoints,
        fallbacks: int,
        track_output: bool,
        books: PickedRequestBooks,
    ) -> None:
        self.request = request
        self.caller = caller
        self.id: RequestId = arrived.id
        self.arrived = arrived
        self.resolved = resolved
        self.job = job
        self.prompt: Prompt = arrived.prompt
        self.timing = timing
        self.ticket: Ticket | None = None
        self.speaker: Dispatch | None = None
        self.prefill: str | None = None
        """Endpoint of the worker that is to prefill, where that is another one."""
        self.closed: Closed | None = None
        self.status: int | None = None
        """Status of the answer, once the gateway has reported it."""
        self._fallbacks, self._track_output = fallbacks, track_output
        self._settled: asyncio.Future[None] | None = None
        self._endpoints = endpoints
        self._books = books
        self._counted = False
        self._tap: SseTap | None = None
        self._answer: bytearray = bytearray()
        self._grown = 0
        self._watched = False
        """Its answer passes here, and not only its end is reported."""

    # --- the choice -------------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """``host:port`` of the chosen worker."""
        assert self.speaker is not None
        return self._endpoints.of(self.speaker.target.worker) or ""

    @property
    def endpoints(self) -> list[str]:
        """The chosen endpoint, and the next best ones in order."""
        assert self.speaker is not None
        chosen = [self.endpoint]
        if self._fallbacks and self.arrived.preferences.worker is None and self.prefill is None:
            for target in cheapest(self.speaker.decision.candidates, self._fallbacks + 1):
                endpoint = self._endpoints.of(target.worker)
                if endpoint is not None and endpoint not in chosen:
                    chosen.append(endpoint)
        return chosen[: self._fallbacks + 1]

    @property
    def body(self) -> bytes | None:
        """The body for the chosen engine; None where it is the client's."""
        assert self.speaker is not None
        dialect = dialect_of(self.speaker.card.engine)
        body = engine_body(self.job, dialect, self.speaker, self.resolved.adapter, parses=False)
        return None if body is self.request.body else body

    @property
    def headers(self) -> dict[str, str]:
        """The headers that the gateway is to set for the chosen engine."""
        assert self.speaker is not None
        dialect = dialect_of(self.speaker.card.engine)
        headers = engine_headers(self.job, dialect, self.speaker, self.id, {}, NO_SPAN)
        del headers["content-type"]  # the client's own is right
        if headers.get("x-request-id") == self.request.headers.get("x-request-id"):
            headers.pop("x-request-id", None)
        if self.prefill is not None:
            headers[PREFILLER] = self.prefill
        return headers

    @property
    def refusal(self) -> ErrorResponse | None:
        """The answer for the client, where no worker was chosen."""
        if self.closed is None or self.speaker is not None:
            return None
        status, code = status_of(self.closed)
        if self.request.subset is not None and self.closed.fault == "client":
            status, code = 503, "overloaded"  # not the client's wish: the gateway's subset has no worker for it
        return problem(status, self.closed.reason, code=code, retry_after=self.closed.retry_after)

    async def settled(self) -> None:
        """Wait until a worker is chosen, or the request is refused."""
        while self.speaker is None and self.closed is None:
            self._settled = asyncio.get_running_loop().create_future()
            await self._settled

    def dispatched(self, effect: Dispatch) -> None:
        """The router chose a worker, for a stage of the request or for its answer."""
        if effect.stage not in FINAL:
            if effect.stage == "prefill":
                self.prefill = self._endpoints.of(effect.target.worker)
            # The sidecar of the decode worker runs this stage. When it is done, nobody tells us.
            asyncio.get_running_loop().call_soon(self._staged, effect.attempt)
            return
        self.speaker = effect
        self._wake()

    def _staged(self, attempt: int) -> None:
        if self.ticket is not None and self.closed is None:
            self.ticket.staged(attempt, kv_retained=True, cached=None)

    # --- what the gateway reports -----------------------------------------------------------------------------------

    def served(self, endpoint: str) -> None:
        """The gateway sent the request to this endpoint: perhaps a fallback."""
        if self.closed is not None or self.speaker is None or endpoint == self.endpoint:
            return
        worker = self._endpoints.worker(endpoint)
        if worker is not None:
            self._moved(worker, f"worker {self.speaker.target}: the gateway went on to {endpoint}")

    def head(self, status: int, content_type: str) -> None:
        """The head of the answer has come."""
        self.status = status
        if status < 400 and content_type.startswith("text/event-stream"):
            self._tap = SseTap(
                strip_usage=False,
                openai=self.job.parsed is not None,
                choices=1 if self.job.parsed is None else choices_of(self.job.parsed),
            )

    def feed(self, data: bytes) -> None:
        """A piece of the answer has passed; the first output is counted here."""
        self._watched = True
        if self.closed is not None or not data:
            return
        tap = self._tap
        if tap is None:
            if len(self._answer) < ANSWER_MAX:
                self._answer += data
            return
        tap.feed(data)
        fresh = tap.tokens - self.timing.counted
        if fresh > 0:
            now = time.monotonic()
            if self.timing.first is None:
                self.first_token(now)
            self.timing.counted = tap.tokens
            self.timing.last = now
            if len(self.timing.chunks) < CHUNKS_MAX:
                self.timing.chunks.append((now, fresh))
            if self._track_output and tap.tokens // self.resolved.block_size > self._grown:
                self._grown = tap.tokens // self.resolved.block_size
                assert self.ticket is not None
                self.ticket.grown(tap.tokens)
        if tap.done and tap.error is None:
            self.ended()

    def first_token(self, now: float) -> None:
        """The first output token has passed; ``now`` is of `time.monotonic`."""
        if self.closed is None and self.timing.first is None and self.ticket is not None and self.speaker is not None:
            self.timing.first = now
            self.ticket.first_token(self.speaker.attempt)
            self.count_first()

    def ended(self, tokens: int | None = None, cached: int | None = None) -> None:
        """The answer has passed as a whole; what it used is read from it, where it passed here."""
        if self.closed is not None or self.speaker is None or self.ticket is None:
            return
        if self.status is not None and self.status >= 400:
            return self._refused(self.status, bytes(self._answer))
        tap = self._tap if self._watched else None
        if tap is not None:
            if self.job.parsed is not None:
                tap.feed(b"\n\n")  # the last event may lack its blank line
            if tap.error is not None or not (tap.done or tap.finished or self.job.parsed is None):
                return self.broken("the engine's stream ended before its answer was whole")
            tokens, cached = output_tokens(tap.usage), cached_tokens(tap.usage)
            tokens = tap.tokens if tokens is None else tokens
        elif self._answer:
            usage = usage_of(bytes(self._answer))
            tokens, cached = output_tokens(usage), cached_tokens(usage)
        self.timing.last = time.monotonic()
        self.timing.output, self.timing.cached = tokens, cached
        self.ticket.finished(tokens, cached, self.speaker.attempt)

    def broken(self, reason: str, status: int | None = None, *, at_fault: bool = True) -> None:
        """The engine's answer broke off, or never came."""
        if self.closed is None and self.speaker is not None and self.ticket is not None:
            text = f"worker {self.speaker.target}: {reason}"
            attempt = self.speaker.attempt
            self.ticket.failed(text, retryable=False, worker_at_fault=at_fault, status=status, attempt=attempt)

    async def retry(self, reason: str, *, at_fault: bool = True, status: int | None = None) -> None:
        """The gateway could not get an answer's head from the worker: let the router choose again, or give it up."""
        if self.closed is None and self.speaker is not None and self.ticket is not None:
            failed, self.speaker = self.speaker, None
            text = f"worker {failed.target}: {reason}"
            self.ticket.failed(text, retryable=True, worker_at_fault=at_fault, status=status, attempt=failed.attempt)
        await self.settled()

    def abandoned(self) -> None:
        """The client went away, or the gateway no longer reports this request."""
        if self.closed is None and self.ticket is not None:
            self.ticket.cancelled()

    # --- the end ----------------------------------------------------------------------------------------------------

    def ended_by(self, closed: Closed) -> None:
        """The router has closed the request."""
        self.closed = closed
        self.count_first()
        self._books.over(self, closed)
        self._wake()

    def count_first(self) -> None:
        """Count the request as one that waits no more: once."""
        if not self._counted:
            self._counted = True
            self._books.first(self)

    def _refused(self, status: int, answer: bytes) -> None:
        assert self.speaker is not None
        text = error_text(answer)
        kind = dialect_of(self.speaker.card.engine).refusal(status, text)
        self.broken(f"the engine answered {status}: {text}", status, at_fault=kind == "fault")

    def _moved(self, worker: WorkerId, reason: str) -> None:
        assert self.ticket is not None and self.speaker is not None
        self.ticket.failed(reason, retryable=True, attempt=self.speaker.attempt, served_by=worker)

    def _wake(self) -> None:
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)


def joined(endpoints: Sequence[str]) -> str:
    """Return endpoints as gateways read them: the choice first, then what to try in its place."""
    return ",".join(endpoints)
