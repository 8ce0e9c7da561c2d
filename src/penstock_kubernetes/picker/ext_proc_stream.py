"""ext_proc stream: one request of Envoy's, from its headers to the end of its answer.

Envoy asks by `ProcessingRequest` and waits for our answers. The answer to the headers is sent when the whole body is
here, because the body decides; in duplex mode the body follows it in chunks. Chunks of the response are sent back
before they are read.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from penstock.frontend.exchange.client_answer import marks
from penstock.frontend.http.error_responses import ErrorResponse, problem
from penstock.kernel.errors import PenstockError
from penstock_kubernetes.picker import ext_proc_messages as wire
from penstock_kubernetes.picker.http2_connection import INTERNAL, GrpcStream
from penstock_kubernetes.picker.objectives import Objectives
from penstock_kubernetes.picker.picked_request import GatewayRequest, PickedRequest, joined
from penstock_kubernetes.picker.picker import Picker

log = logging.getLogger("penstock.picker")

DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"
REWRITE = "x-gateway-model-name-rewrite"
OBJECTIVE = "x-gateway-inference-objective"
FAIRNESS = "x-gateway-inference-fairness-id"
TEST_SELECTION, TEST_SERVED = "test-epp-endpoint-selection", "x-conformance-test-served-endpoint"
"""Headers of the conformance suite of the Gateway API Inference Extension."""


class ExtProcStream:
    """One stream."""

    def __init__(
        self, stream: GrpcStream, picker: Picker, objectives: Objectives, tasks: set[asyncio.Task[None]]
    ) -> None:
        self._stream = stream
        self._picker = picker
        self._objectives = objectives
        self._tasks = tasks
        self._started = time.monotonic()
        self._modes = (wire.DUPLEX, wire.DUPLEX)
        self._headers: dict[str, str] = {}
        self._subset: Sequence[str] | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._whole = False
        """The request's body is here; what comes after its end is ignored."""
        self._trailers = False
        self._anywhere = False
        """It went to any worker, and its body passes without being read."""
        self._picked: PickedRequest | None = None
        self._picking: asyncio.Task[None] | None = None
        self._ended = False
        """The answer has passed."""

    # --- what Envoy sends -------------------------------------------------------------------------------------------

    def message(self, data: bytes) -> None:
        """Take one `ProcessingRequest`."""
        try:
            got = wire.read_message(data)
            if got.modes is not None:
                self._modes = got.modes
            kind = got.kind
            if kind == wire.RESPONSE_BODY:
                self._response_body(got.part)
            elif kind == wire.REQUEST_BODY:
                self._request_body(got.part)
            elif kind == wire.REQUEST_HEADERS:
                self._request_headers(got.part, got.metadata)
            elif kind == wire.RESPONSE_HEADERS:
                self._response_headers(got.part, got.metadata)
            elif kind == wire.REQUEST_TRAILERS:
                self._request_trailers()
            elif kind == wire.RESPONSE_TRAILERS:
                self._stream.send(wire.empty_answer(kind))
                self._end()
        except wire.BadMessage as error:
            log.warning("Envoy sent a message that is not part of ext_proc: %s", error)
            self._give_up()
            self._stream.finish(INTERNAL, str(error))

    def half_closed(self) -> None:
        """Envoy sends nothing more: the request is over, or the rest of it passes without us."""
        self._give_up()
        self._stream.finish()

    def reset(self) -> None:
        """Envoy has ended the stream."""
        self._give_up()

    # --- the request ------------------------------------------------------------------------------------------------

    def _request_headers(self, part: bytes, metadata: bytes) -> None:
        self._headers, end = wire.read_headers(part)
        self._subset = self._subset_of(metadata)
        body_comes = not end and self._modes[0] in (wire.DUPLEX, wire.BUFFERED, wire.BUFFERED_PARTIAL)
        if not body_comes or not self._picker.routes(self._headers.get(":method", ""), self._headers.get(":path", "")):
            self._whole = end
            self._send_anywhere()
        elif self._modes[0] != wire.DUPLEX:
            self._stream.send(wire.empty_answer(wire.REQUEST_HEADERS))  # the body comes only then

    def _request_body(self, part: bytes) -> None:
        if self._whole:
            return
        if self._anywhere:
            self._whole = wire.read_body(part)[1]
            duplex = self._modes[0] == wire.DUPLEX
            answer = wire.echo(wire.REQUEST_BODY, part) if duplex else wire.empty_answer(wire.REQUEST_BODY)
            return self._stream.send(answer)
        data, end = wire.read_body(part)
        self._size += len(data)
        if self._size > self._picker.service.settings.frontend.limits.body_max:
            self._whole = True
            return self._refuse(self._picker.too_large(self._bare(), self._started))
        self._body.append(data)
        if end or self._modes[0] != wire.DUPLEX:
            self._body_done()

    def _request_trailers(self) -> None:
        if self._anywhere or self._whole:  # no more than an answer: the body was whole without them
            self._stream.send(wire.empty_answer(wire.REQUEST_TRAILERS))
        else:
            self._trailers = True
            self._body_done()

    def _body_done(self) -> None:
        self._whole = True
        task = self._picking = asyncio.create_task(self._pick())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pick(self) -> None:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        headers = self._headers
        request = GatewayRequest(
            method=headers.get(":method", ""),
            path=headers.get(":path", ""),
            headers=headers,
            body=body,
            remote=headers.get("x-forwarded-for"),
            subset=self._subset,
            priority=self._objectives.priority(headers.get(OBJECTIVE)),
            tenant=headers.get(FAIRNESS),
            model=headers.get(REWRITE),
        )
        try:
            picked = await self._picker.pick(request)
        except PenstockError as error:
            return self._refuse(self._picker.refused(request, error, self._started))
        except Exception:  # supervision boundary: one request's bug must not leave its stream hanging
            log.exception("choosing a worker failed by a bug of ours")
            return self._refuse(problem(500, "an internal error; the picker's log has it", code="internal"))
        if picked.refusal is not None:
            return self._refuse(picked.refusal)
        self._picked = picked
        self._send_choice(picked, body)

    def _send_choice(self, picked: PickedRequest, body: bytes) -> None:
        endpoints = joined(picked.endpoints)
        changed = picked.body
        headers = {DESTINATION: endpoints, **picked.headers}
        if changed is not None:
            headers["content-length"] = str(len(changed))
        metadata = wire.lb_metadata(DESTINATION, endpoints)
        if self._modes[0] != wire.DUPLEX:
            self._stream.send(wire.body_answer(wire.REQUEST_BODY, headers, changed) + metadata)
            return
        self._stream.send(wire.headers_answer(wire.REQUEST_HEADERS, headers, reroute=True) + metadata)
        for chunk in wire.body_chunks(wire.REQUEST_BODY, body if changed is None else changed, last=not self._trailers):
            self._stream.send(chunk)
        if self._trailers:
            self._stream.send(wire.empty_answer(wire.REQUEST_TRAILERS))

    def _send_anywhere(self) -> None:
        """Send the request to any worker: nothing in it says which one."""
        try:
            most = self._picker.service.settings.picker.fallbacks + 1
            endpoints = joined(self._picker.endpoints.any(self._subset)[:most])
        except PenstockError as error:
            return self._refuse(self._picker.refused(self._bare(), error, self._started))
        self._anywhere = True
        answer = wire.headers_answer(wire.REQUEST_HEADERS, {DESTINATION: endpoints}, reroute=True)
        self._stream.send(answer + wire.lb_metadata(DESTINATION, endpoints))

    def _subset_of(self, metadata: bytes) -> Sequence[str] | None:
        subset = wire.read_metadata(metadata, "envoy.lb.subset_hint", SUBSET) if metadata else None
        if subset is None:
            subset = self._headers.get(TEST_SELECTION)
        if isinstance(subset, str):
            subset = [one for one in subset.split(",") if one.strip()]
        return [str(one) for one in subset] if isinstance(subset, list) else None

    def _refuse(self, answer: ErrorResponse) -> None:
        """Let Envoy answer the client itself."""
        self._ended = True
        self._stream.send(wire.immediate_answer(answer.status, answer.headers, answer.body))

    def _bare(self) -> GatewayRequest:
        headers = self._headers
        return GatewayRequest(
            headers.get(":method", ""), headers.get(":path", ""), headers, b"", headers.get("x-forwarded-for")
        )

    # --- the response -----------------------------------------------------------------------------------------------

    def _response_headers(self, part: bytes, metadata: bytes) -> None:
        headers, end = wire.read_headers(part)
        added: Mapping[str, str] = {}
        served = self._served(metadata)
        picked = self._picked
        if picked is not None and picked.speaker is not None:
            if served is not None:
                picked.served(served)
            added = marks(picked.speaker, picked.job)
        if TEST_SELECTION in self._headers and served is not None:
            added = {**added, TEST_SERVED: served}
        self._stream.send(wire.headers_answer(wire.RESPONSE_HEADERS, added))
        if picked is not None:
            status = headers.get(":status", "")
            picked.head(int(status) if status.isdigit() else 0, headers.get("content-type", ""))
            if end:
                self._end()

    def _served(self, metadata: bytes) -> str | None:
        """Return who answers: as a gateway of the extension tells it, or as Envoy itself does."""
        picked = self._picked
        if not metadata or (picked is not None and picked.endpoint.encode() in metadata):
            return picked.endpoint if metadata and picked is not None else None  # nearly always: as it was chosen
        served = wire.read_metadata(metadata, "envoy.lb", SERVED)
        if served is None:
            served = wire.read_metadata(metadata, "envoy.filters.http.ext_proc", "upstream.address")
        return served if isinstance(served, str) else None

    def _response_body(self, part: bytes) -> None:
        if self._modes[1] == wire.DUPLEX:
            self._stream.send(wire.echo(wire.RESPONSE_BODY, part))
        else:
            self._stream.send(wire.empty_answer(wire.RESPONSE_BODY))
        if self._picked is not None:
            data, end = wire.read_body(part)
            self._picked.feed(data)
            if end:
                self._end()

    def _end(self) -> None:
        if self._picked is not None and not self._ended:
            self._ended = True
            self._picked.ended()

    def _give_up(self) -> None:
        """The stream is over; what it has not shown us has passed without us, or has not passed at all."""
        if self._picking is not None and not self._picking.done():
            self._picking.cancel()
        picked = self._picked
        if picked is None or self._ended:
            return
        self._ended = True
        if self._modes[1] == wire.NONE and (picked.status is None or picked.status < 400):
            picked.ended()
        else:
            picked.abandoned()
