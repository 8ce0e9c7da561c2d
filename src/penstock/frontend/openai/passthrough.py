"""Pass-through of other /v1 routes: those of the allow-list go to the least loaded worker unchanged."""

import re

from aiohttp import hdrs, web

from penstock.frontend.exchange.token_timing import TokenTiming
from penstock.frontend.exchange.upstream_request import UpstreamRequest
from penstock.frontend.http.error_responses import rejected
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.frontend.http.request_context import gate_of
from penstock.frontend.http.request_gate import printable
from penstock.frontend.openai.completions import UNKNOWN, carry, refusal
from penstock.frontend.prompt.request_body import decode_object, text_field
from penstock.frontend.prompt.routing_hints import RoutingHints, read_hints
from penstock.frontend.service import Service, service_of
from penstock.kernel.errors import PenstockError
from penstock.kernel.hashing import BYTES_PER_TOKEN
from penstock.kernel.values import Prompt

_FORM_MODEL = re.compile(rb'name="model"(?:\r\n[^\r\n]+)*\r\n\r\n([^\r\n]{1,256})\r\n')


async def proxied(service: Service, caller: HttpExchange) -> None:
    """POST to a route of the allow-list."""
    timing = TokenTiming()
    endpoint = caller.path.removeprefix("/v1/").replace("/", "_")
    content_type = caller.headers.get("content-type", "application/json")
    try:
        raw = await caller.body()
        name, streamed = _model_of(service, raw, content_type)
        resolved = service.catalog.resolve(name)
        hints = RoutingHints(read_hints(caller.headers, {}, {}).preferences)
    except PenstockError as error:
        service.metrics.refused(UNKNOWN, endpoint, False, refusal(error))
        raise
    job = UpstreamRequest(
        path=caller.path,
        body=raw,
        content_type=content_type,
        endpoint=endpoint,
        streamed=streamed,
        hints=hints,
    )
    # No blocks: what these routes compute shares no KV, so the least loaded worker gets it.
    prompt = Prompt(len(raw) // BYTES_PER_TOKEN, [], estimated=True)
    await carry(caller, service, resolved, job, prompt, timing)


async def not_allowed(request: web.Request) -> web.StreamResponse:
    """Any other /v1 route: 405 where its path takes other methods, else 404."""
    allowed = await _methods(request)
    if allowed:
        raise web.HTTPMethodNotAllowed(request.method, allowed)
    proxied = ", ".join(service_of(request).settings.frontend.proxied_routes)
    raise rejected(
        f"{request.method} {printable(request.path)} is not served here; beside completions, models and chat these "
        f"are: {proxied}",
        code="not_found",
        status=404,
    )


async def _methods(request: web.Request) -> set[str]:
    """Return the methods of a path, without the route that takes all."""
    allowed = {hdrs.METH_POST} if gate_of(request).route(request.path) is not None else set()
    for resource in request.app.router.resources():
        _, methods = await resource.resolve(request)
        allowed |= methods
    return allowed - {hdrs.METH_ANY}


def _model_of(service: Service, raw: bytes, content_type: str) -> tuple[str, bool]:
    """Return the model that a body names, and whether it requests a stream; a single model needs no naming."""
    name: str | None = None
    streamed = False
    if content_type.startswith("multipart/form-data"):
        match = _FORM_MODEL.search(raw[:65_536]) or _FORM_MODEL.search(raw[-65_536:])
        name = None if match is None else match.group(1).decode("utf-8", "replace")
    else:
        fields = decode_object(raw)
        name = text_field(fields, "model")
        streamed = fields.get("stream") is True
    if name is None:
        known = sorted(service.catalog.models())
        if len(known) != 1:
            raise rejected(f"name a model: {', '.join(known)}", "model", code="missing_field")
        name = known[0]
    return name, streamed
