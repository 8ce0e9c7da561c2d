"""Engine failure: what an engine says of an error, in any of the shapes in which servers say it, and its status."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from penstock.adapters.engines.http.event_stream import object_in

_WORDS_MAX = 500
_MESSAGES = ("message", "detail", "msg", "errors")
_STATUSES = {
    **dict.fromkeys(("invalidrequest", "badrequest", "value", "contextlengthexceeded", "invalidprompt"), 400),
    **dict.fromkeys(("authentication", "unauthorized", "invalidapikey"), 401),
    **dict.fromkeys(("permission", "permissiondenied", "forbidden"), 403),
    **dict.fromkeys(("notfound", "modelnotfound"), 404),
    **dict.fromkeys(("requesttoolarge", "payloadtoolarge"), 413),
    **dict.fromkeys(("validation", "requestvalidation", "unprocessableentity"), 422),
    **dict.fromkeys(("ratelimit", "ratelimitexceeded", "toomanyrequests", "insufficientquota"), 429),
    **dict.fromkeys(("overloaded", "serviceunavailable", "unavailable"), 503),
    **dict.fromkeys(("timeout", "deadlineexceeded"), 504),
}
"""Words of error types and codes (vLLM, SGLang, llama.cpp, TGI and the APIs that they copy), without their endings."""


class EngineFailure(NamedTuple):
    """``status``: the HTTP status that it stands for; ``code``: its word for it. Each None where it names none."""

    message: str
    status: int | None = None
    code: str | None = None


def failure_in(answer: Mapping[str, Any], *, named: bool = False) -> EngineFailure | None:
    """Return the failure that a chunk or a whole answer reports, or None where it reports none.

    Args:
        named: it came under the name of an error, so it is one whatever it looks like.
    """
    inner, choices = answer.get("error"), answer.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        inner = inner or (choice.get("error") if isinstance(choice, dict) else None)
    if not inner:
        message = next((answer[name] for name in _MESSAGES if answer.get(name)), None)
        if not (
            named or answer.get("object") == "error" or (isinstance(message, (str, list)) and "choices" not in answer)
        ):
            return None
        inner = answer if inner is None else {"message": inner}
    error: Mapping[str, Any] = inner if isinstance(inner, dict) else {"message": inner}
    words = next((error[name] for name in (*_MESSAGES, "error") if error.get(name)), None)
    code = error.get("code")
    return EngineFailure(
        str(words or error or "no message")[:_WORDS_MAX],
        next(_statuses(error, answer), None),
        code if isinstance(code, str) else None,
    )


def failure_of(body: bytes) -> EngineFailure:
    """Return the failure that the body of an error answer, ours or an engine's, or a text in its place reports."""
    answer = object_in(body.strip().removeprefix(b"error:"))
    failure = None if answer is None else failure_in(answer, named=True)
    return failure or EngineFailure(" ".join(body[:_WORDS_MAX].decode("utf-8", "replace").split()) or "nothing")


def dropped_by_engine(reason: str) -> EngineFailure:
    """Return the failure that a finish reason reports by which the engine says that it dropped the request."""
    return EngineFailure(f"it dropped the request (finish reason {reason!r})")


def _statuses(*places: Mapping[str, Any]) -> Iterator[int]:
    for place in places:
        for name in ("code", "status", "status_code", "http_status", "type", "error_type"):
            status = _status(place.get(name))
            if status is not None:
                yield status


def _status(value: object) -> int | None:
    """Return the HTTP status of an error that a number or a word names, or None."""
    if isinstance(value, str):
        word = "".join(filter(str.isalnum, value.lower()))
        if not word.isdecimal():
            return _STATUSES.get(word.removesuffix("error"))
        value = int(word[:4])
    return value if type(value) is int and 400 <= value < 600 else None
