"""The exception tree: each class of error names the party at fault and what happens next.

PenstockError
├── ConfigError        the operator's settings; nothing starts (exit status 2)
├── ClientError        the request; HTTP 4xx
├── EngineError        an engine; retried or 502
├── OverloadedError    no capacity now; 429 or 503 with Retry-After
├── TransferError      KV bytes did not arrive; recompute and count
└── InvariantError     our bug; keep the journal
"""

from collections.abc import Mapping
from types import MappingProxyType

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class PenstockError(Exception):
    """Base of every error of ours: a message and, where there is one, the next step (``hint``)."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message} ({hint})")
        self.message = message
        self.hint = hint


class ConfigError(PenstockError):
    """A setting is wrong; the message names the field, the value and the fix."""


class ClientError(PenstockError):
    """The request is at fault.

    Args:
        status: HTTP status, 400..499.
        code: short machine-readable word, such as ``model_not_found``.
        param: the field at fault, as OpenAI's error object names it.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.param = param


class EngineError(PenstockError):
    """An engine failed, refused or went away."""


class OverloadedError(PenstockError):
    """No capacity at present; ``retry_after`` in seconds, ``status`` 429 (the caller's limit) or 503 (ours).

    ``code`` and ``param``: as of `ClientError`; ``headers``: more of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after: float,
        status: int = 503,
        hint: str | None = None,
        code: str = "overloaded",
        param: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers


class TransferError(PenstockError):
    """KV bytes did not arrive whole; the blocks are recomputed."""


class InvariantError(PenstockError):
    """The state contradicts itself: a bug of ours."""
