"""Pass-through of other /v1 routes: those of the allow-list go to the least loaded worker unchanged."""

import re
from dataclasses import replace
from typing import NamedTuple

import msgspec
from aiohttp import hdrs, web

from penstock.frontend.exchange.client_answer import TokenTiming
from penstock.frontend.exchange.upstream_request import UpstreamRequest
from penstock.frontend.http.error_responses import rejected
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.frontend.http.request_context import gate_of
from penstock.frontend.http.request_gate import printable
from penstock.frontend.openai.completions import carry
from penstock.frontend.openai.request_books import UNKNOWN, refusal
from penstock.frontend.prompt.model_catalog import ResolvedModel
from penstock.frontend.prompt.request_body import decode_object, text_field, withheld_from, without, without_parts
from penstock.frontend.prompt.routing_hints import route_hints
from penstock.frontend.service import Service, service_of
from penstock.kernel.errors import PenstockError
from penstock.kernel.hashing import BYTES_PER_TOKEN
from penstock.kernel.values import JsonObject, Prompt, WorkerId

ENGINE_PATHS = {f"/v1/{name}": f"/{name}" for name in ("tokenize", "detokenize", "classify", "pooling")}
"""Routes that clients look for below /v1 and engines have at the root."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FORM_MODEL = re.compile(rb'name="model"(?:\r\n[^\r\n]+)*\r\n\r\n([^\r\n]{1,256})\r\n')


class ProxiedRequest(NamedTuple):
    """A request of a route whose dialect is the engine's."""

    resolved: ResolvedModel
    job: UpstreamRequest
    prompt: Prompt

    def at(self, worker: WorkerId, path: str) -> "ProxiedRequest":
        """Return the same for one worker and another path."""
        assert self.job.hints is not None
        return self._replace(job=replace(self.job, path=path, hints=self.job.hints.placed(worker)))


async def proxied(service: Service, caller: HttpExchange, raw: bytes | None = None) -> None:
    """POST to a route of the allow-list; ``raw``: its body, where it has been read."""
    timing = TokenTiming()
    endpoint = caller.path.removeprefix("/v1").strip("/").replace("/", "_")
    request = await read_proxied(service, caller, raw, label=endpoint)
    await carry(caller, service, request.resolved, request.job, request.prompt, timing)


async def read_proxied(
    service: Service, caller: HttpExchange, raw: bytes | None = None, *, label: str, model: str | None = None
) -> ProxiedRequest:
    """Read a request that goes to an engine as it is, and count it where it is refused.

    Args:
        label: of metrics and records.
        model: its model, where the body does not have to name it.
    Raises:
        PenstockError: it can't be routed.
    """
    content_type = caller.headers.get("content-type", "application/json")
    try:
        raw = await caller.body() if raw is None else raw
        fields = fields_of(raw, content_type)
        name, streamed = model_of(service, caller.name, raw, fields) if model is None else (model, False)
        resolved = service.catalog.resolve(name, caller.name)
        raw, withheld, steering = withhold(raw, content_type, fields)
        jobs, file = service.jobs, None
        if jobs is not None:
            raw, file = await jobs.with_engine_files(raw, service.owner(caller.name))
        hints = route_hints(caller.headers).with_withheld(withheld, steering)
        if resolved.name is not None:
            resolved = service.catalog.route(resolved, hints.preferences.session or caller.id, caller.name)
            raw = with_model(raw, content_type, resolved.served)
        if jobs is not None and file is not None:
            hints = hints.placed(jobs.engine(file).id)
    except PenstockError as error:
        service.metrics.refused(UNKNOWN, label, False, refusal(error))
        raise
    job = UpstreamRequest(
        path=ENGINE_PATHS.get(caller.path, caller.path),
        body=raw,
        content_type=content_type,
        endpoint=label,
        streamed=streamed,
        hints=hints,
        name=resolved.name,
    )
    # No blocks: what these routes compute shares no KV, so the least loaded worker gets it.
    prompt = Prompt(len(raw) // BYTES_PER_TOKEN, [], estimated=True)
    return ProxiedRequest(resolved, job, prompt)


async def not_allowed(request: web.Request) -> web.StreamResponse:
    """Any other route below /v1, or method of an engine's route: 405 where its path takes other methods, else 404."""
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


def fields_of(raw: bytes, content_type: str) -> JsonObject | None:
    """Return the fields of a body; None for a form, which may hold files.

    Raises:
        ClientError: 400: it is neither a form nor a JSON object.
    """
    return None if content_type.startswith("multipart/form-data") else decode_object(raw)


def withhold(raw: bytes, content_type: str, fields: JsonObject | None) -> tuple[bytes, tuple[str, ...], JsonObject]:
    """Return a body without the fields that steer engines, their names, and those that a pool may allow."""
    if fields is None:
        raw, names = without_parts(raw, content_type)
        return raw, names, {}
    names = withheld_from(fields)
    if not names:
        return raw, (), {}
    raw, _, steering = without(raw, fields, names)
    return raw, names, steering


def with_model(raw: bytes, content_type: str, model: str) -> bytes:
    """Return a body that names another model, where it names one."""
    if content_type.startswith("multipart/form-data"):
        match = _form_model(raw)
        return raw if match is None else raw[: match.start(1)] + model.encode() + raw[match.end(1) :]
    return msgspec.json.encode({**_FIELDS.decode(raw), "model": model})


def _form_model(raw: bytes) -> re.Match[bytes] | None:
    """Find the model's name in a form, near its beginning or its end."""
    return _FORM_MODEL.search(raw, 0, 65_536) or _FORM_MODEL.search(raw, max(0, len(raw) - 65_536))


def model_of(service: Service, caller: str, raw: bytes, fields: JsonObject | None) -> tuple[str, bool]:
    """Return the model that a body names, and whether it requests a stream; a single model needs no naming.

    Args:
        fields: those of the body; None for a form.
    """
    name: str | None = None
    streamed = False
    if fields is None:
        match = _form_model(raw)
        name = None if match is None else match.group(1).decode("utf-8", "replace")
    else:
        name = text_field(fields, "model")
        streamed = fields.get("stream") is True
    if name is None:
        known = service.catalog.usable(caller)
        if len(known) != 1:
            raise rejected(f"name a model: {', '.join(known)}", "model", code="missing_field")
        name = known[0]
    return name, streamed
