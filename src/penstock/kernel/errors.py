"""The exception tree: each class of error names the party at fault and what happens next.

PenstockError
├── ConfigError        the operator's settings; nothing starts (exit status 2)
├── ClientError        the request; HTTP 4xx
├── EngineError        an engine; retried or 502
├── OverloadedError    no capacity now; 429 or 503 with Retry-After
├── TransferError      KV bytes did not arrive; recompute and count
└── InvariantError     our bug; keep the journal
"""

import errno
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


_BOUND = {
    errno.EADDRINUSE: "another server has it; {choose}",
    errno.EACCES: "this user may not bind ports below 1024; {choose}",
    errno.EPERM: "this user may not bind it; {choose}",
    errno.EADDRNOTAVAIL: "this machine has no such address; name one of its own, such as 127.0.0.1",
}
_WRITTEN = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "the disk is full: free some of it, or {choose}"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "this user may not write there; {choose}"),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file has the name of one of its folders; {choose}"),
    errno.EROFS: "that file system is read-only; {choose}",
}
_READ = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "this user may not read it"),
    errno.EISDIR: "it is a folder; name a file",
}


def bind_hint(error: OSError, choose: str) -> str:
    """Return what to do about an address that can't be bound; ``choose`` says how another is named."""
    code = error.errno or 0
    if code < 0:  # of the resolver, whose codes are negative
        return "the name of the host can't be resolved; name an address of this machine, such as 127.0.0.1"
    return _BOUND.get(code, "{choose}").format(choose=choose)


def write_hint(error: OSError, choose: str) -> str:
    """Return what to do about a file or folder that can't be written; ``choose`` says how another is named."""
    return _WRITTEN.get(error.errno or 0, "{choose}").format(choose=choose)


def read_hint(
    error: Exception, missing: str = "paths count from the current folder", content: str = "it must be a text in UTF-8"
) -> str:
    """Return what to do about a file that can't be read: ``missing`` where none is there, ``content`` of a wrong one.

    An error of the system with another cause, such as that of a disk, speaks for itself: ``missing`` goes with it.
    """
    return _READ.get(error.errno or 0, missing) if isinstance(error, OSError) else content
