"""Picker: chooses a worker for requests that a gateway carries, by the same router as the frontend's own requests."""

import time

import msgspec

from penstock.frontend.exchange.client_answer import TokenTiming
from penstock.frontend.exchange.open_attempts import adapter_ready
from penstock.frontend.exchange.upstream_request import UpstreamRequest
from penstock.frontend.http.api_keys import Unauthorized
from penstock.frontend.http.error_responses import ErrorResponse, problem_of, rejected
from penstock.frontend.http.request_gate import CLIENT_GONE, identified, log_line
from penstock.frontend.openai.completions import media_items, read_completion
from penstock.frontend.openai.passthrough import fields_of, model_of, withhold
from penstock.frontend.openai.request_books import UNKNOWN, enter_arrival, enter_end, refusal
from penstock.frontend.prompt.request_body import PATHS, allowed_of, is_undivided, is_whole
from penstock.frontend.prompt.routing_hints import route_hints
from penstock.frontend.service import Service
from penstock.kernel.errors import ClientError, OverloadedError, PenstockError
from penstock.kernel.hashing import BYTES_PER_TOKEN
from penstock.kernel.machine import Effect, Nanos, nanos
from penstock.kernel.values import Prompt, RequestId
from penstock.router.events import Arrived, Closed, Dispatch
from penstock_kubernetes.picker.picked_request import GatewayRequest, PickedRequest
from penstock_kubernetes.picker.worker_endpoints import EMPTY_SUBSET, Endpoints

_ENDPOINTS = {path: endpoint for endpoint, path in PATHS.items()}


class Picker:
    """All requests that gateways carry and one frontend process has chosen a worker for."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.endpoints = Endpoints(service.cluster)
        self.open: dict[RequestId, PickedRequest] = {}
        service.tickets.listen(self._carry_out)

    def routes(self, method: str, path: str) -> bool:
        """Return whether a request is one for engines; any endpoint will do for the others."""
        return method == "POST" and self.service.gate.route(path.partition("?")[0]) is not None

    async def pick(self, request: GatewayRequest) -> PickedRequest:
        """Choose a worker; a request that is refused has a `refusal` instead.

        Raises:
            PenstockError: it can't be routed; `refused` makes the answer of it.
        """
        service = self.service
        gate = service.gate
        caller = identified(gate, request.headers, request.remote)
        caller = request.tenant or caller  # whoever names a tenant needs a key nevertheless
        if gate.rates.limited:
            gate.take(caller)
        if gate.inflight >= gate.settings.limits.inflight_max:
            raise gate.full()
        gate.enter()
        routed = False
        try:
            picked = await self._read(request, caller)
            routed = True
        finally:
            if not routed:
                gate.leave()
        self.open[picked.id] = picked
        picked.ticket = service.tickets.arrive(picked.arrived)
        try:
            if picked.speaker is None:
                await picked.settled()
            if picked.resolved.adapter is not None:
                await self._load_adapter(picked, picked.resolved.adapter)
        except BaseException:
            picked.abandoned()
            raise
        return picked

    async def _load_adapter(self, picked: PickedRequest, adapter: str) -> None:
        """Wait until the chosen worker has loaded the request's LoRA adapter, or let the router choose again."""
        service = self.service
        while picked.closed is None and picked.speaker is not None:
            attempts = service.exchanges.attempts
            failure = await adapter_ready(service.cluster, attempts, picked.id, picked.speaker, adapter)
            if failure is None:
                return
            await picked.retry(failure.reason, at_fault=False, status=failure.status)

    def refused(self, request: GatewayRequest, error: PenstockError, started: float) -> ErrorResponse:
        """Return the answer to a request that could not be routed, and write its line in the log."""
        answer = problem_of(error)
        if isinstance(error, Unauthorized):
            self.service.gate.metrics.unauthorized.add()
            answer.headers["www-authenticate"] = error.challenge
        id = self.service.gate.request_id(request.headers)
        log_line(request.method, request.path, id, answer.status, started, request.remote, {"reason": str(error)})
        return answer

    def too_large(self, request: GatewayRequest, started: float) -> ErrorResponse:
        """Return the answer to a request whose body is beyond the limit, and count it as the frontend does."""
        most = self.service.settings.frontend.limits.body_max
        error = ClientError(f"the body has more than {most} bytes", status=413, code="body_too_large")
        self.service.metrics.refused(UNKNOWN, _endpoint_label(request.path.partition("?")[0]), False, refusal(error))
        return self.refused(request, error, started)

    async def _read(self, request: GatewayRequest, caller: str) -> PickedRequest:
        service, timing = self.service, TokenTiming()
        path = request.path.partition("?")[0]
        endpoint = _ENDPOINTS.get(path)
        if endpoint is not None:
            completion = await read_completion(
                service,
                endpoint,
                request.body,
                request.headers,
                timing,
                model=request.model,
                caller=caller,
                fetch=False,
            )
            resolved, prompt, job = completion.resolved, completion.prompt, completion.job(endpoint)
        else:
            name, content_type = _endpoint_label(path), request.headers.get("content-type") or "application/json"
            try:
                fields = fields_of(request.body, content_type)
                model, streamed = model_of(service, caller, request.body, fields)
                resolved = service.catalog.resolve(model, caller)
                _, withheld, steering = withhold(request.body, content_type, fields)
                hints = route_hints(request.headers).with_withheld(withheld, steering)
            except PenstockError as error:
                service.metrics.refused(UNKNOWN, name, False, refusal(error))
                raise
            prompt = Prompt(len(request.body) // BYTES_PER_TOKEN, [], estimated=True)
            job = UpstreamRequest(path, request.body, content_type, name, streamed, hints=hints)
        self._check_fields(job, resolved.model)
        if job.hints is not None and job.hints.pins and not service.may_pin(service.gate.tenants.get(caller)):
            job.hints = job.hints.unpinned()
        arrived = self._arrived(request, job, resolved.model, resolved.adapter, prompt)
        timing.routed = time.monotonic()
        service.bookkeeping.add((enter_arrival, (service, arrived, job, timing)))
        return PickedRequest(
            arrived,
            resolved,
            job,
            timing,
            request,
            caller,
            self.endpoints,
            service.settings.picker.fallbacks,
            service.settings.router.track_output,
            self,
        )

    def _check_fields(self, job: UpstreamRequest, model: str) -> None:
        """Refuse a request with fields that steer engines: the gateway sends its body on as the client wrote it.

        Raises:
            ClientError: 400: not every worker of the model may get them.
        """
        withheld, steering = (job.hints.withheld, job.hints.steering) if job.hints is not None else ((), {})
        labels = [card.labels for card in self.service.cluster.cards() if card.model == model] if withheld else []
        for name in withheld:
            if name not in steering or any(allowed_of(steering, each).get(name) != steering[name] for each in labels):
                raise rejected(f"{name} steers engines, which clients may not; leave it out", name)

    def _arrived(
        self, request: GatewayRequest, job: UpstreamRequest, model: str, adapter: str | None, prompt: Prompt
    ) -> Arrived:
        service, hints = self.service, job.hints or route_hints({})
        preferences = hints.preferences
        if request.subset is not None or request.priority:
            allowed = preferences.allowed
            if request.subset is not None:
                subset = self.endpoints.workers(request.subset)
                allowed = subset if allowed is None else tuple(one for one in subset if one in allowed)
                if not allowed:
                    service.metrics.refused(model, job.endpoint, job.streamed, "overload")
                    raise OverloadedError(EMPTY_SUBSET, retry_after=1.0)
            strict = request.priority or preferences.strict
            preferences = msgspec.structs.replace(preferences, allowed=allowed, strict=strict)
        return Arrived(
            id=service.free_id(service.gate.request_id(request.headers)),
            model=model,
            prompt=prompt,
            media=() if job.parsed is None else media_items(job.parsed.media, self.service, model),
            whole=job.parsed is None or is_whole(job.parsed),
            undivided=job.parsed is None or (is_whole(job.parsed) and is_undivided(job.parsed)),
            adapter=adapter,
            deadline=None if hints.timeout is None else service.cluster.now() + nanos(hints.timeout),
            preferences=preferences,
        )

    # --- what picked requests report --------------------------------------------------------------------------------

    def first(self, picked: PickedRequest) -> None:
        """A request has its first token, or has ended without one."""
        service, timing = self.service, picked.timing
        service.bookkeeping.add((service.metrics.first_token, (picked.resolved.model,)))
        if timing.first is not None:
            took = timing.first - timing.arrived
            service.bookkeeping.add((service.exchanges.first_token, (timing.first, took)))

    def over(self, picked: PickedRequest, closed: Closed) -> None:
        """A request has ended: count it, record it, and write its line in the log."""
        service, timing = self.service, picked.timing
        service.gate.leave()
        if closed.outcome == "expired" and picked.speaker is not None:
            service.metrics.picker_events.add("lost")  # the gateway never reported how it ended
        service_class = picked.arrived.preferences.service_class
        service.bookkeeping.add((enter_end, (service, picked, closed, service_class, time.monotonic(), picked.caller)))
        request = picked.request
        status = CLIENT_GONE if closed.outcome == "cancelled" else picked.status or closed.status
        fields = {
            "model": closed.model,
            "outcome": closed.outcome,
            "worker": str(closed.legs[-1].target) if closed.legs else None,
            "isl": closed.isl,
            "osl": timing.output,
            "ttft": None if timing.ttft is None else round(timing.ttft, 6),
            "reason": None if closed.outcome == "ok" else closed.reason,
        }
        log_line(request.method, request.path, closed.id, status, timing.arrived, picked.caller, fields)
        if service.bookkeeping.full:
            service.bookkeeping.enter()

    def _carry_out(self, now: Nanos, effect: Effect) -> None:
        """Hear what the router decided about one of our requests."""
        if isinstance(effect, Dispatch):
            picked = self.open.get(effect.id)
            if picked is not None:
                picked.dispatched(effect)
        elif isinstance(effect, Closed):
            picked = self.open.pop(effect.id, None)
            if picked is not None:
                picked.ended_by(effect)


def _endpoint_label(path: str) -> str:
    """Return the metric label of a route."""
    return _ENDPOINTS.get(path) or path.removeprefix("/v1/").replace("/", "_")
