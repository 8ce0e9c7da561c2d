"""Failures that the API server's double answers with, each as a `Status` in the words of Kubernetes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.kernel.values import JsonObject


class Cause(NamedTuple):
    """One field that is at fault, as `details.causes` of a Status names it."""

    field: str
    message: str
    reason: str = "FieldValueInvalid"


class ApiFailure(Exception):
    """An answer that is no success: its HTTP code and its Status."""

    def __init__(
        self, code: int, reason: str, message: str, details: JsonObject | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = dict(details or {})
        self.retry_after_s = retry_after_s
        if retry_after_s is not None:
            self.details["retryAfterSeconds"] = retry_after_s

    def status(self) -> JsonObject:
        """Return the body of the answer."""
        status: JsonObject = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        status |= {"message": self.message, "reason": self.reason, "code": self.code}
        return status | ({"details": self.details} if self.details else {})


def _details(resource: str, name: str) -> JsonObject:
    plural, _, group = resource.partition(".")
    return {"name": name, "kind": plural} | ({"group": group} if group else {})


def missing_object(resource: str, name: str) -> ApiFailure:
    """Return 404 for an object that is not there."""
    return ApiFailure(404, "NotFound", f'{resource} "{name}" not found', _details(resource, name))


def no_such_path() -> ApiFailure:
    """Return 404 for a path that the server does not serve."""
    return ApiFailure(404, "NotFound", "the server could not find the requested resource")


def already_exists(resource: str, name: str) -> ApiFailure:
    """Return 409 for a create of what is there."""
    return ApiFailure(409, "AlreadyExists", f'{resource} "{name}" already exists', _details(resource, name))


def conflict(resource: str, name: str, reason: str = "") -> ApiFailure:
    """Return 409 for a write that builds on an old version of the object."""
    reason = reason or "the object has been modified; please apply your changes to the latest version and try again"
    message = f'Operation cannot be fulfilled on {resource} "{name}": {reason}'
    return ApiFailure(409, "Conflict", message, _details(resource, name))


def apply_conflict(resource: str, name: str, conflicts: Sequence[tuple[str, str]]) -> ApiFailure:
    """Return 409 for a server-side apply of fields that others own: pairs of the owner's words and the field."""
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {owner}", "field": field}
        for owner, field in conflicts
    ]
    texts = "; ".join(f"{each['message']}: {each['field']}" for each in causes)
    message = f"Apply failed with {len(conflicts)} conflict{'s' if len(conflicts) > 1 else ''}: {texts}"
    return ApiFailure(409, "Conflict", message, _details(resource, name) | {"causes": causes})


def invalid(group: str, kind: str, name: str, causes: Iterable[Cause]) -> ApiFailure:
    """Return 422 for an object that breaks a rule of its kind."""
    causes = list(causes)
    texts = [f"{cause.field}: {cause.message}" if cause.field else cause.message for cause in causes]
    text = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    details: JsonObject = {"name": name, "kind": kind} | ({"group": group} if group else {})
    details["causes"] = [{"reason": each.reason, "message": each.message, "field": each.field} for each in causes]
    title = f"{kind}.{group}" if group else kind
    return ApiFailure(422, "Invalid", f'{title} "{name}" is invalid: {text}', details)


def bad_request(message: str) -> ApiFailure:
    """Return 400 for what can't be read."""
    return ApiFailure(400, "BadRequest", message)


def forbidden(message: str, resource: str = "", name: str = "") -> ApiFailure:
    """Return 403."""
    return ApiFailure(403, "Forbidden", message, _details(resource, name) if resource else None)


def unauthorized() -> ApiFailure:
    """Return 401 for a token that is unknown or expired."""
    return ApiFailure(401, "Unauthorized", "Unauthorized")


def expired(version: int, oldest: int) -> ApiFailure:
    """Return 410 for a version whose changes the history has no more."""
    return ApiFailure(410, "Expired", f"too old resource version: {version} ({oldest})")


def future_version(version: int, current: int) -> ApiFailure:
    """Return 504 for a version that the server has not come to: its client remembers another server's."""
    cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
    text = f"Timeout: Too large resource version: {version}, current: {current}"
    return ApiFailure(504, "Timeout", text, {"causes": [cause]}, 1)


def too_many_requests(retry_after_s: int) -> ApiFailure:
    """Return 429 with the seconds after which another try may succeed."""
    text = "the server has received too many requests and has asked us to try again later"
    return ApiFailure(429, "TooManyRequests", text, None, retry_after_s)


def unsupported_media_type(media_type: str) -> ApiFailure:
    """Return 415 for a patch in a form that the kind does not have."""
    accepted = "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"
    message = f"the body of the request was in an unknown format - accepted media types include: {accepted}"
    return ApiFailure(415, "UnsupportedMediaType", f"{message} (it was {media_type})")


def not_allowed() -> ApiFailure:
    """Return 405 for a verb that the resource does not have."""
    return ApiFailure(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
