"""OpenAPI 3.1 description of the HTTP API for GET /openapi.json; a test compares it with the real routes.

A request's body is described as far as routing reads it; every other field is the engine's, and so are the bodies of
answers that pass through. A 500 would be a bug, so it is no part of the API. Schemas of what others define are in
`penstock.frontend.openapi.openapi_schemas`; all others follow from the structs that the routes answer with.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
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
_TEXT: JsonObject = {"type": "string"}


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
            **_models(),
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


def _completions() -> JsonObject:
    chat = _engine_route("Answer a chat.", "chatCompletion", "ChatRequest", "ChatCompletion")
    text = _engine_route("Continue a text.", "completion", "CompletionRequest", "Completion")
    return {"/v1/chat/completions": {"post": chat}, "/v1/completions": {"post": text}}


def _engine_route(summary: str, name: str, body: str, answer: str) -> JsonObject:
    return {
        "operationId": name,
        "summary": summary,
        "tags": ["completions"],
        "security": [{}, {"key": []}],
        "parameters": [_parameter("header", header, schema) for header, schema in HEADERS.items()],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(body)}}},
        "responses": {
            "200": {
                "description": "The engine's answer: whole, or with stream as server-sent events that end in [DONE].",
                "headers": {header: {"$ref": f"#/components/headers/{header}"} for header in _answer_headers()},
                "content": {
                    "application/json": {"schema": schema_of(answer)},
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            },
            **_problems(OF_CLIENTS),
            "4XX": {"description": "What the engine refuses, in its own words.", "content": _any_json()},
        },
    }


def _translated() -> JsonObject:
    """Describe the other APIs, whose bodies their vendors describe."""
    one = RESPONSES + "/{id}"
    return {
        path: {method: _translated_route(name, summary, path, body=body)}
        for path, method, name, summary, body in (
            (RESPONSES, "post", "createResponse", "OpenAI's responses over any chat engine.", True),
            (RESPONSES_COUNT, "post", "countInputTokens", "The tokens of a response's prompt.", True),
            (one + "/input_items", "get", "listInputItems", "What a response answers.", False),
            (one + "/cancel", "post", "cancelResponse", "End a background response.", False),
            (MESSAGES, "post", "createMessage", "Anthropic's messages over any chat engine.", True),
            (MESSAGES_COUNT, "post", "countTokens", "The tokens of a message's prompt.", True),
        )
    } | {
        one: {
            "get": _translated_route("getResponse", "A response that this process holds.", one, body=False),
            "delete": _translated_route("deleteResponse", "Forget a response.", one, body=False),
        }
    }


def _translated_route(name: str, summary: str, path: str, *, body: bool) -> JsonObject:
    hints = [_parameter("header", header, schema) for header, schema in HEADERS.items()] if body else []
    return {
        "operationId": name,
        "summary": summary,
        "tags": ["translated"],
        "security": [{}, {"key": []}],
        "parameters": [*path_parameters(path), *hints],
        **({"requestBody": {"required": True, "content": _any_json()}} if body else {}),
        "responses": {
            "200": {"description": summary, "content": {**_any_json(), "text/event-stream": {"schema": _TEXT}}},
            "4XX": {"description": "What is refused, in the shape of its API.", "content": _any_json()},
            "5XX": {"description": "What failed, in the shape of its API.", "content": _any_json()},
        },
    }


def _proxied(routes: Sequence[str]) -> JsonObject:
    hints = {name: schema for name, schema in HEADERS.items() if name != "x-penstock-timeout"}
    paths: JsonObject = {}
    for route in routes:
        paths[route] = {
            "post": {
                "operationId": ("proxy" if route.startswith("/v1/") else "proxyRoot")
                + "".join(part.capitalize() for part in route.removeprefix("/v1").split("/")),
                "summary": "Passed to the least loaded engine as it is; what it takes and gives is the engine's.",
                "tags": ["proxied"],
                "security": [{}, {"key": []}],
                "parameters": [_parameter("header", header, schema) for header, schema in hints.items()],
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {"schema": schema_of("ProxiedRequest")},
                        "multipart/form-data": {"schema": {"type": "object"}},
                    },
                },
                "responses": {
                    "200": {"description": "The engine's answer.", "content": {"*/*": {}}},
                    **_problems(OF_CLIENTS),
                    "4XX": {"description": "What the engine refuses.", "content": {"*/*": {}}},
                },
            }
        }
    return paths


def _jobs() -> JsonObject:
    """Describe jobs of engines, whose bodies are OpenAI's as far as the engine has them."""
    described: JsonObject = {}
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
        begins = path in JOB_PATHS and method == "post"
        body: JsonObject = {**_any_json(), "multipart/form-data": {"schema": {"type": "object"}}}
        operation: JsonObject = {
            "operationId": name,
            "summary": summary,
            "tags": ["jobs"],
            "security": [{}, {"key": []}],
            "parameters": path_parameters(path),
            **({"requestBody": {"required": True, "content": body}} if begins else {}),
            "responses": {
                "200": {"description": "The engine's answer, with our id of the job.", "content": {"*/*": {}}},
                **_problems((*OF_CLIENTS, 501)),
                "4XX": {"description": "What the engine refuses.", "content": {"*/*": {}}},
            },
        }
        described.setdefault(path, {})[method] = operation
    return described


def _models() -> JsonObject:
    model = _parameter("path", "model", {"type": "string", "minLength": 1}, required=True)
    key: list[JsonObject] = [{}, {"key": []}]
    return {
        "/v1/models": {"get": get_operation("listModels", "All models.", "models", "ModelList", (401,), key)},
        "/v1/models/{model}": {
            "get": {
                **get_operation(
                    "getModel", "One model; its id may have slashes.", "models", "ModelEntry", (401, 404), key
                ),
                "parameters": [model],
            }
        },
        "/v1/models/{model}/ready": {
            "get": {
                **get_operation("modelReady", "Whether it can be served now.", "models", "ModelReady", (401, 404), key),
                "parameters": [model],
            }
            | {"responses": _ready_answers()}
        },
    }


def _ready_answers() -> JsonObject:
    both = {"content": {"application/json": {"schema": schema_of("ModelReady")}}}
    return {
        "200": {"description": "It can.", **both},
        "503": {"description": "No worker is ready.", **both},
        **_problems((401, 404)),
    }


def _health() -> JsonObject:
    health = {"content": {"application/json": {"schema": schema_of("Health")}}}
    scope = _parameter("query", "scope", _TEXT, "process: this process alone, not all frontends added up.")
    return {
        "/health": {
            "get": {
                "operationId": "health",
                "summary": "Whether any model can be served.",
                "tags": ["health"],
                "responses": {
                    "200": {"description": "ok or degraded.", **health},
                    "503": {"description": "unready or draining.", **health},
                },
            }
        },
        "/live": {"get": get_operation("live", "200 while the process answers.", "health", "Live", (), None)},
        "/metrics": {
            "get": {
                "operationId": "metrics",
                "summary": "Prometheus text.",
                "tags": ["health"],
                "parameters": [scope],
                "responses": {
                    "200": {"description": "All metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}},
                },
            }
        },
        "/openapi.json": {"get": get_operation("openapi", "This description.", "health", "Open", (), None)},
    }


def _pages() -> JsonObject:
    page = {"description": "The page.", "content": {"text/html": {"schema": _TEXT}}}
    kinds = ("text/javascript", "text/css", "text/html", "image/svg+xml")
    file = {"description": "The file.", "content": {kind: {"schema": _TEXT} for kind in kinds}}
    admins = {"tags": ["admin"], "security": _for_admins()}
    return {
        "/": {
            "get": {
                "operationId": "home",
                "summary": "On to the status page.",
                "tags": ["admin"],
                "responses": {"302": {"description": "To /ui."}},
            }
        },
        "/ui": {
            "get": {
                "operationId": "page",
                "summary": "The status page.",
                **admins,
                "responses": {"200": page, **_problems(OF_ADMINS)},
            }
        },
        "/ui/{file}": {
            "get": {
                "operationId": "pageFile",
                "summary": "A script, the style or the icon of the page.",
                **admins,
                "parameters": path_parameters("/ui/{file}"),
                "responses": {"200": file, **_problems((*OF_ADMINS, 404))},
            }
        },
    }


def _admin(route: AdminRoute, schemas: Iterator[JsonObject]) -> JsonObject:
    """Describe one admin route; ``schemas`` yields those of `types_of` its answers, body and query, in that order."""
    answers = [next(schemas) for _ in route.answers]
    content = {"application/json": {"schema": answers[0] if len(answers) == 1 else {"anyOf": answers}}}
    body = None if route.body is None else {"application/json": {"schema": next(schemas)}}
    query = [_parameter("query", each.name, next(schemas), each.text) for each in route.query]
    partly: JsonObject = {}
    if route.partly is not None:
        partly[str(route.partly)] = {"description": "Not all was done.", "content": content}
    return {
        "operationId": route.name,
        "summary": route.summary,
        "tags": ["admin"],
        "security": _for_admins(),
        "parameters": [*path_parameters(route.path), *query],
        **({} if body is None else {"requestBody": {"required": True, "content": body}}),
        "responses": {
            "200": {"description": route.summary, "content": content},
            **partly,
            **_problems((*OF_ADMINS, *route.errors)),
        },
    }


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


def get_operation(
    name: str, summary: str, tag: str, schema: str, problems: Sequence[int], security: list[JsonObject] | None
) -> JsonObject:
    answer = {"description": summary, "content": {"application/json": {"schema": schema_of(schema)}}}
    operation: JsonObject = {
        "operationId": name,
        "summary": summary,
        "tags": [tag],
        "responses": {"200": answer, **_problems(problems)},
    }
    return operation if security is None else {**operation, "security": security}


def _for_admins() -> list[JsonObject]:
    return [{}, {"admin": []}, {"browser": []}]


def schema_of(name: str) -> JsonObject:
    return {"$ref": REFERENCE.format(name=name)}


def _any_json() -> JsonObject:
    return {"application/json": {"schema": schema_of("Open")}}


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
        "content": {"application/json": {"schema": schema_of("Problem")}},
    }
    if status in (429, 503):
        text = "Whole seconds after which a retry may succeed; absent where that is unknown."
        response["headers"] = {"retry-after": {"description": text, "schema": {"type": "integer", "minimum": 1}}}
    if status == 401:
        response["headers"] = {"www-authenticate": {"description": "How to send a key.", "schema": {"type": "string"}}}
    return response


def _answer_headers() -> JsonObject:
    texts = {
        "x-penstock-worker": ("Who answered.", {"type": "string"}),
        "x-penstock-expected-cached-tokens": ("Tokens expected in its cache.", {"type": "integer", "minimum": 0}),
        "x-penstock-queue-ms": ("Time spent waiting for a worker.", {"type": "number", "minimum": 0}),
        "x-penstock-request-id": ("Id for explain.", {"type": "string"}),
    }
    return {name: {"description": text, "schema": schema} for name, (text, schema) in texts.items()}
