"""OpenAPI 3.1 description of the HTTP API for GET /openapi.json; a test compares it with the real routes.

A request's body is described as far as routing reads it; every other field is the engine's, and so are the bodies of
answers that pass through. A 500 would be a bug, so it is no part of the API. Schemas of what others define are in
`penstock.frontend.openapi.openapi_schemas`; all others follow from the structs that the routes answer with.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

import penstock
from penstock import extension
from penstock.config.settings.frontend_settings import FrontendSettings
from penstock.frontend.admin.admin_api import ADMIN_ROUTES, AdminRoute
from penstock.frontend.openai.models import Health, Live, ModelEntry, ModelList, ModelReady
from penstock.frontend.openapi.openapi_schemas import HEADERS, SCHEMAS
from penstock.frontend.prompt.request_body import (
    IMAGES,
    JOB_PATHS,
    MESSAGES,
    MESSAGES_COUNT,
    RESPONSES,
    RESPONSES_COUNT,
    VIDEO_REMIX,
    VIDEOS,
)
from penstock.frontend.service import service_of
from penstock.kernel.values import JsonObject
from penstock.runtime.cluster_state.fleet_api import Problem

REFERENCE = "#/components/schemas/{name}"
PROBLEMS = {
    400: "Malformed body or hint, prompt too long, or what the engine refuses.",
    401: "No valid key.",
    403: "For administrators, or callers of this machine, only.",
    404: "There is no such model, request or route.",
    408: "The body did not arrive in time.",
    409: "It does not fit how things are.",
    413: "The body is larger than frontend.limits.body_max.",
    417: "An expectation other than 100-continue.",
    429: "Too many requests in flight, or above the key's rate.",
    501: "The engine has no such route.",
    502: "Engines failed.",
    503: "No worker is free or there, or the endpoint shuts down.",
    504: "The request's deadline passed.",
}
OF_CLIENTS = (400, 401, 404, 408, 413, 417, 429, 502, 503, 504)
"""Error statuses of any request to an engine, beside the engine's own answers."""
OF_ADMINS = (401, 403)
OF_MODELS = (ModelEntry, ModelList, ModelReady, Health, Live)
FOR_CLIENTS: list[JsonObject] = [{}, {"key": []}]
FOR_ADMINS: list[JsonObject] = [{}, {"admin": []}, {"browser": []}]
_TEXT: JsonObject = {"type": "string"}
FORM: JsonObject = {"multipart/form-data": {"schema": {"type": "object"}}}
_REFUSED: JsonObject = {"4XX": {"description": "What the engine refuses.", "content": {"*/*": {}}}}


async def description(request: web.Request) -> web.Response:
    """GET /openapi.json"""
    document = openapi(service_of(request).settings.frontend)
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")


def openapi(frontend: FrontendSettings) -> JsonObject:
    """Return the description of all routes under these settings."""
    admin_paths, structs = _derived()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": penstock.__version__,
            "summary": "One OpenAI endpoint before many engines, and what its administrators see.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            **_completions(),
            **_translated(),
            **_proxied(frontend.proxied_routes),
            **_jobs(),
            **{path: what for description in _of_extensions() for path, what in description.paths.items()},
            **_model_paths(),
            **_health(),
            **_pages(),
            **admin_paths,
        },
        "components": {
            "schemas": {**SCHEMAS, **structs},
            "headers": _answer_headers(),
            "responses": {str(status): _problem(status) for status in PROBLEMS},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "A key of frontend.security.api_keys."},
                "admin": {"type": "http", "scheme": "bearer", "description": "A key of frontend.security.admin_keys."},
                "browser": {"type": "http", "scheme": "basic", "description": "The admin key as the password."},
            },
        },
    }


class RouteDescription(NamedTuple):
    """What the routes of an extension add to the description: paths, and the structs that these name."""

    paths: JsonObject
    structs: Sequence[type[msgspec.Struct]] = ()


@cache
def _of_extensions() -> Sequence[RouteDescription]:
    return [describe() for describe in extension.entries("route description").values()]


def operation(
    name: str,
    summary: str,
    tag: str,
    content: JsonObject | None,
    *,
    answer: str = "",
    security: list[JsonObject] | None = None,
    parameters: Sequence[JsonObject] = (),
    body: JsonObject | None = None,
    problems: Sequence[int] = (),
    more: Mapping[str, JsonObject] = MappingProxyType({}),
) -> JsonObject:
    """Describe one method of a path.

    Args:
        content: of its answer of status 200, by media type; None where there is no such answer.
        answer: what that is, where the summary does not say it.
        body: of the request, by media type.
        problems: statuses of its errors.
        more: further answers, by status.
    """
    described: JsonObject = {"operationId": name, "summary": summary, "tags": [tag]}
    if security is not None:
        described["security"] = security
    if parameters:
        described["parameters"] = [*parameters]
    if body is not None:
        described["requestBody"] = {"required": True, "content": body}
    whole = {} if content is None else {"200": {"description": answer or summary, "content": content}}
    described["responses"] = {**whole, **more, **_problems(problems)}
    return described


def _completions() -> JsonObject:
    paths: JsonObject = {}
    for path, summary, name, body, answer in (
        ("/v1/chat/completions", "Answer a chat.", "chatCompletion", "ChatRequest", "ChatCompletion"),
        ("/v1/completions", "Continue a text.", "completion", "CompletionRequest", "Completion"),
    ):
        post = operation(
            name,
            summary,
            "completions",
            {**json_of(answer), "text/event-stream": {"schema": _TEXT}},
            answer="The engine's answer: whole, or with stream as server-sent events that end in [DONE].",
            security=FOR_CLIENTS,
            parameters=_hint_parameters(),
            body=json_of(body),
            problems=OF_CLIENTS,
            more={"4XX": {"description": "What the engine refuses, in its own words.", "content": json_of("Open")}},
        )
        post["responses"]["200"]["headers"] = {
            header: {"$ref": f"#/components/headers/{header}"} for header in _answer_headers()
        }
        paths[path] = {"post": post}
    return paths


def _translated() -> JsonObject:
    """Describe the other APIs, whose bodies their vendors describe."""
    one = RESPONSES + "/{id}"
    paths: JsonObject = {}
    for path, method, name, summary in (
        (RESPONSES, "post", "createResponse", "OpenAI's responses over any chat engine."),
        (RESPONSES_COUNT, "post", "countInputTokens", "The tokens of a response's prompt."),
        (one + "/input_items", "get", "listInputItems", "What a response answers."),
        (one + "/cancel", "post", "cancelResponse", "End a background response."),
        (MESSAGES, "post", "createMessage", "Anthropic's messages over any chat engine."),
        (MESSAGES_COUNT, "post", "countTokens", "The tokens of a message's prompt."),
        (one, "get", "getResponse", "A response that this process holds."),
        (one, "delete", "deleteResponse", "Forget a response."),
    ):
        has_body = not path.startswith(one)
        paths.setdefault(path, {})[method] = operation(
            name,
            summary,
            "translated",
            {**json_of("Open"), "text/event-stream": {"schema": _TEXT}},
            security=FOR_CLIENTS,
            parameters=[*path_parameters(path), *(_hint_parameters() if has_body else ())],
            body=json_of("Open") if has_body else None,
            more={
                "4XX": {"description": "What is refused, in the shape of its API.", "content": json_of("Open")},
                "5XX": {"description": "What failed, in the shape of its API.", "content": json_of("Open")},
            },
        )
    return paths


def _proxied(routes: Sequence[str]) -> JsonObject:
    return {
        route: {
            "post": operation(
                ("proxy" if route.startswith("/v1/") else "proxyRoot")
                + "".join(part.capitalize() for part in route.removeprefix("/v1").split("/")),
                "Passed to the least loaded engine as it is; what it takes and gives is the engine's.",
                "proxied",
                {"*/*": {}},
                answer="The engine's answer.",
                security=FOR_CLIENTS,
                parameters=_hint_parameters(but="x-penstock-timeout"),
                body={**json_of("ProxiedRequest"), **FORM},
                problems=OF_CLIENTS,
                more=_REFUSED,
            )
        }
        for route in routes
    }


def _jobs() -> JsonObject:
    """Describe jobs of engines, whose bodies are OpenAI's as far as the engine has them."""
    paths: JsonObject = {}
    rows = [(VIDEO_REMIX, "post", "remixVideo", "Begin a video from another one, at its engine.")]
    for route, noun, kind in ((VIDEOS, "a video", "Video"), (IMAGES, "an image", "Image")):
        one = route + "/{job}"
        rows += [
            (route, "post", f"create{kind}", f"Begin {noun} at an engine."),
            (route, "get", f"list{kind}s", f"All {kind.lower()}s that are jobs, the newest first."),
            (one, "get", f"get{kind}", f"How {noun} is."),
            (one, "delete", f"delete{kind}", f"End and forget {noun}."),
            (one + "/content", "get", f"{kind.lower()}Content", f"The bytes of {noun}."),
            (one + "/cancel", "post", f"cancel{kind}", f"End {noun}, where its engine can."),
        ]
    for path, method, name, summary in rows:
        paths.setdefault(path, {})[method] = operation(
            name,
            summary,
            "jobs",
            {"*/*": {}},
            answer="The engine's answer, with our id of the job.",
            security=FOR_CLIENTS,
            parameters=path_parameters(path),
            body={**json_of("Open"), **FORM} if path in JOB_PATHS and method == "post" else None,
            problems=(*OF_CLIENTS, 501),
            more=_REFUSED,
        )
    return paths


def _model_paths() -> JsonObject:
    paths: JsonObject = {}
    not_ready = {"503": {"description": "No worker is ready.", "content": json_of("ModelReady")}}
    for path, name, summary, answer, more in (
        ("/v1/models", "listModels", "All models.", "ModelList", {}),
        ("/v1/models/{model}", "getModel", "One model; its id may have slashes.", "ModelEntry", {}),
        ("/v1/models/{model}/ready", "modelReady", "Whether it can be served now.", "ModelReady", not_ready),
    ):
        parameters = path_parameters(path)
        paths[path] = {
            "get": operation(
                name,
                summary,
                "models",
                json_of(answer),
                answer="It can." if more else "",
                security=FOR_CLIENTS,
                parameters=parameters,
                problems=(401, 404) if parameters else (401,),
                more=more,
            )
        }
    return paths


def _health() -> JsonObject:
    """Describe what every process answers without a key."""
    scope = _parameter("query", "scope", _TEXT, "process: this process alone, not all frontends added up.")
    unready = {"503": {"description": "unready or draining.", "content": json_of("Health")}}
    health = operation(
        "health",
        "Whether any model can be served.",
        "health",
        json_of("Health"),
        answer="ok or degraded.",
        more=unready,
    )
    text = {"text/plain": {"schema": _TEXT}}
    metrics = operation("metrics", "Prometheus text.", "health", text, answer="All metrics.", parameters=[scope])
    return {
        "/health": {"get": health},
        "/live": {"get": operation("live", "200 while the process answers.", "health", json_of("Live"))},
        "/metrics": {"get": metrics},
        "/openapi.json": {"get": operation("openapi", "This description.", "health", json_of("Open"))},
    }


def _pages() -> JsonObject:
    home = operation("home", "On to the status page.", "admin", None, more={"302": {"description": "To /ui."}})
    page = operation(
        "page",
        "The status page.",
        "admin",
        {"text/html": {"schema": _TEXT}},
        answer="The page.",
        security=FOR_ADMINS,
        problems=OF_ADMINS,
    )
    file = operation(
        "pageFile",
        "A script, the style or the icon of the page.",
        "admin",
        {kind: {"schema": _TEXT} for kind in ("text/javascript", "text/css", "text/html", "image/svg+xml")},
        answer="The file.",
        security=FOR_ADMINS,
        parameters=path_parameters("/ui/{file}"),
        problems=(*OF_ADMINS, 404),
    )
    return {"/": {"get": home}, "/ui": {"get": page}, "/ui/{file}": {"get": file}}


def _admin(route: AdminRoute, schemas: Iterator[JsonObject]) -> JsonObject:
    """Describe one admin route; ``schemas`` yields those of `types_of` its answers, body and query, in that order."""
    answers = [next(schemas) for _ in route.answers]
    content = {"application/json": {"schema": answers[0] if len(answers) == 1 else {"anyOf": answers}}}
    body = None if route.body is None else {"application/json": {"schema": next(schemas)}}
    query = [_parameter("query", each.name, next(schemas), each.text) for each in route.query]
    partly = {"description": "Not all was done.", "content": content}
    return operation(
        route.name,
        route.summary,
        "admin",
        content,
        security=FOR_ADMINS,
        parameters=[*path_parameters(route.path), *query],
        body=body,
        problems=(*OF_ADMINS, *route.errors),
        more={} if route.partly is None else {str(route.partly): partly},
    )


def types_of(route: AdminRoute) -> list[Any]:
    """Return the types whose schemas describe a route."""
    return [
        *route.answers,
        *(() if route.body is None else (route.body,)),
        *(parameter.kind for parameter in route.query),
    ]


@cache
def _derived() -> tuple[JsonObject, JsonObject]:
    """Return the paths of the admin routes, and the schemas of all structs that they and the model routes name."""
    types = [kind for route in ADMIN_ROUTES for kind in types_of(route)]
    found, components = msgspec.json.schema_components(
        (*types, *OF_MODELS, *(each for part in _of_extensions() for each in part.structs), Problem),
        ref_template=REFERENCE,
    )
    schemas = iter(found)
    paths: JsonObject = {}
    for route in ADMIN_ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _admin(route, schemas)
    return paths, components


def path_parameters(path: str) -> list[JsonObject]:
    """Return the parameters in a path."""
    names = re.findall(r"{(\w+)}", path)
    return [_parameter("path", name, {"type": "string", "minLength": 1}, required=True) for name in names]


# --- parts ------------------------------------------------------------------------------------------------------------


def json_of(name: str) -> JsonObject:
    """Return the content of a JSON body, by media type."""
    return {"application/json": {"schema": {"$ref": REFERENCE.format(name=name)}}}


def _hint_parameters(but: str = "") -> list[JsonObject]:
    return [_parameter("header", header, schema) for header, schema in HEADERS.items() if header != but]


def _parameter(
    place: str, name: str, schema: JsonObject, text: str | None = None, *, required: bool = False
) -> JsonObject:
    parameter: JsonObject = {"in": place, "name": name, "required": required, "schema": schema}
    description = text or schema.get("description")
    return parameter if description is None else {**parameter, "description": description}


def _problems(statuses: Sequence[int]) -> JsonObject:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(set(statuses))}


def _problem(status: int) -> JsonObject:
    response: JsonObject = {
        "description": PROBLEMS[status],
        "content": json_of("Problem"),
    }
    if status in (429, 503):
        text = "Whole seconds after which a retry may succeed; absent where that is unknown."
        response["headers"] = {"retry-after": {"description": text, "schema": {"type": "integer", "minimum": 1}}}
    if status == 401:
        response["headers"] = {"www-authenticate": {"description": "How to send a key.", "schema": _TEXT}}
    return response


def _answer_headers() -> JsonObject:
    texts = {
        "x-penstock-worker": ("Who answered.", {"type": "string"}),
        "x-penstock-expected-cached-tokens": ("Tokens expected in its cache.", {"type": "integer", "minimum": 0}),
        "x-penstock-queue-ms": ("Time spent waiting for a worker.", {"type": "number", "minimum": 0}),
        "x-penstock-request-id": ("Id for explain.", {"type": "string"}),
    }
    return {name: {"description": text, "schema": schema} for name, (text, schema) in texts.items()}
