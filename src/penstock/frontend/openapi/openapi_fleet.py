"""OpenAPI paths of the admin routes that change a running cluster."""

from collections.abc import Callable, Sequence
from typing import Any

Json = dict[str, Any]

_COUNT: Json = {"type": "integer", "minimum": 0}
_SOME: Json = {"type": ["integer", "null"], "minimum": 0}
_TEXT: Json = {"type": "string"}
_SECONDS: Json = {"type": "number", "minimum": 0}
_REPLICA: Json = {
    "type": "object",
    "required": ["id", "state"],
    "properties": {
        "id": _TEXT,
        "state": {"enum": ["starting", "ready", "draining", "stopping", "failed"]},
        "reason": {"type": ["string", "null"]},
        "pid": {"type": ["integer", "null"]},
        "gpus": {"type": "array", "items": _COUNT},
    },
}
_POOL: Json = {
    "type": "object",
    "required": ["name", "model", "kind", "desired", "ready", "replicas"],
    "properties": {
        "name": _TEXT,
        "model": _TEXT,
        "kind": {"enum": ["process", "urls"]},
        "desired": _COUNT,
        "ready": _COUNT,
        "limit": {"type": ["integer", "null"]},
        "replicas": {"type": "array", "items": _REPLICA},
        "problem": {"type": ["string", "null"]},
    },
}
_DRAINED: Json = {
    "type": "object",
    "required": ["name", "state", "seconds"],
    "properties": {
        "name": _TEXT,
        "state": {"enum": ["draining", "done"]},
        "finished": {**_SOME, "description": "Requests that ended by themselves."},
        "active": _SOME,
        "cut": {**_SOME, "description": "Requests that still ran at the deadline."},
        "seconds": _SECONDS,
    },
}
_RESTART: Json = {
    "type": ["object", "null"],
    "properties": {
        "revision": _TEXT,
        "state": {"enum": ["running", "done", "failed"]},
        "done": {"type": "array", "items": _TEXT},
        "left": _COUNT,
        "problem": {"type": ["string", "null"]},
    },
}
_ANY: Json = {}
_VALUE: Json = {"type": ["string", "number", "boolean", "null"]}
_SETTINGS: Json = {
    "type": "object",
    "required": ["settings", "changed", "frontends"],
    "properties": {
        "settings": {"type": "object"},
        "changed": {"type": "object"},
        "frontends": {"type": "array", "items": {"type": "object"}},
    },
}


def operate_paths(admins: list[Json], problems: Callable[[Sequence[int]], Json]) -> Json:
    """Return the paths.

    Args:
        admins: the security requirement of administrators.
        problems: makes the error responses of some statuses.
    """

    def change(name: str, summary: str, body: Json, answer: Json, statuses: Sequence[int]) -> Json:
        return {
            "post": {
                "operationId": name,
                "summary": summary,
                "tags": ["admin"],
                "security": admins,
                "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
                "responses": {
                    "200": {
                        "description": "The desired state is written.",
                        "content": {"application/json": {"schema": answer}},
                    },
                    **problems((400, 401, 403, 408, 413, 503, *statuses)),
                },
            }
        }

    def show(name: str, summary: str, answer: Json) -> Json:
        return {
            "get": {
                "operationId": name,
                "summary": summary,
                "tags": ["admin"],
                "security": admins,
                "responses": {
                    "200": {"description": summary, "content": {"application/json": {"schema": answer}}},
                    **problems((401, 403, 503)),
                },
            }
        }

    return {
        "/admin/desired": show(
            "desired",
            "Desired state of each pool and its progress.",
            _object(pools=_list(_POOL), drains=_map({"type": "object"}), drained=_map(_DRAINED), restart=_RESTART),
        ),
        "/admin/restart": change(
            "restart",
            "Replace every engine and every frontend, one after the other.",
            _body({"force": {"type": "boolean", "default": False}}),
            _object(revision=_TEXT),
            (),
        ),
        "/admin/scale": change(
            "scale",
            "Set the desired numbers of replicas.",
            _body({"pools": {"type": "object", "minProperties": 1, "additionalProperties": _COUNT}}, "pools"),
            _object(pools=_map(_object(was=_COUNT, wanted=_COUNT, revision=_TEXT))),
            (404,),
        ),
        "/admin/settings": {
            "get": {
                **show("settings", "Every live knob, and what was changed.", _SETTINGS)["get"],
                "parameters": [
                    {
                        "in": "query",
                        "name": "scope",
                        "required": False,
                        "schema": _TEXT,
                        "description": "process: this process alone.",
                    }
                ],
            }
        },
        "/admin/set": change(
            "set",
            "Change live knobs, all that are named or none.",
            _body({"values": {"type": "object", "minProperties": 1, "additionalProperties": _VALUE}}, "values"),
            _object(changed=_map(_object(old=_ANY, new=_ANY)), values=_map(_ANY)),
            (),
        ),
        "/admin/flip": change(
            "flip",
            "Change what a worker does for requests, once it has finished what it has.",
            _body(
                {
                    "name": {**_TEXT, "description": "Of a worker."},
                    "role": {"enum": ["aggregated", "prefill", "decode", "encode", None]},
                    "timeout": {"type": ["number", "null"], "minimum": 0, "maximum": 86_400},
                },
                "name",
            ),
            _object(name=_TEXT, was=_TEXT, becomes=_TEXT),
            (404, 409),
        ),
        "/admin/drain": change(
            "drain",
            "Take a worker or a frontend out of service, or let it in again.",
            _body(
                {
                    "name": {**_TEXT, "description": "Of a worker, or such as frontend-1."},
                    "timeout": {"type": ["number", "null"], "minimum": 0, "maximum": 86_400},
                    "undo": {"type": "boolean", "default": False},
                },
                "name",
            ),
            {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": _TEXT,
                    "kind": {"enum": ["engine", "server", "frontend"]},
                    "revision": _TEXT,
                    "undone": {"type": "boolean"},
                },
            },
            (404, 409),
        ),
    }


def _object(**properties: Json) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}


def _body(properties: Json, *required: str) -> Json:
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _map(values: Json) -> Json:
    return {"type": "object", "additionalProperties": values}
