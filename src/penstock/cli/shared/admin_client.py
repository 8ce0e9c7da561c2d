"""HTTP client of the commands for a running cluster."""

import http.client
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote, urlsplit

import click
import msgspec

from penstock.cli.shared.cluster_tls import cluster_tls, tls_fault, tls_options
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import JsonObject
from penstock.runtime.supervision.terminal import USUAL_URL

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

DEFAULT_URL = USUAL_URL
ANSWER_MAX = 64 * 1024 * 1024


class ClusterUnreachable(PenstockError):
    """No server answers at the cluster's URL; ``reason`` is the connection's error."""

    def __init__(self, message: str, *, reason: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason or message


class RequestRefused(PenstockError):
    """The server refused or its answer is unusable; ``status`` is its HTTP status."""

    def __init__(self, message: str, *, status: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class AdminClient:
    """One server. Each call opens its own connection, so a client survives restarts of the server.

    Args:
        url: base URL, with or without /v1.
        key: sent as a bearer token; None sends none.
        timeout: seconds for the connection and for each silence.
        tls: of https; None is what the command was given.
        headers: of every request.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        timeout: float = 10.0,
        tls: ssl.SSLContext | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.key = key
        self.timeout = timeout
        self.date: str | None = None
        """The Date header of the last answer."""
        self._tls = cluster_tls() if tls is None else tls
        self._own_headers = headers
        self._parts = _parsed_cluster_url(self.url)

    def get(self, path: str, kind: type[T]) -> T:
        """Return the JSON answer, as a struct of ``kind``.

        Raises:
            ClusterUnreachable, RequestRefused: with a sentence and a next step.
        """
        with self._answer("GET", path) as answer:
            return self._json(path, answer, kind)

    def post(
        self, path: str, body: Any, kind: type[T], headers: Mapping[str, str] | None = None
    ) -> tuple[T, dict[str, str]]:
        """Send JSON, with additional headers; return the JSON answer and its headers (lower case)."""
        with self._answer("POST", path, body, headers) as answer:
            return self._json(path, answer, kind), _headers(answer)

    def stream(self, path: str, body: Any) -> Iterator[JsonObject]:
        """Send JSON; yield first the answer's headers (lower case), then the JSON of each server-sent event."""
        with self._answer("POST", path, body) as answer:
            if answer.status != 200:
                self._json(path, answer, dict)
            yield _headers(answer)
            yield from self._events(answer)

    def _events(self, answer: http.client.HTTPResponse) -> Iterator[JsonObject]:
        while True:
            try:
                line = answer.readline(1 << 20)
            except (OSError, http.client.HTTPException) as error:
                raise ClusterUnreachable(
                    f"{self.url} broke off its answer: {error}", hint="see the cluster's logs"
                ) from error
            if not line:
                return
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = _json_or_none(data)
            if not isinstance(event, dict):
                raise RequestRefused(f"{self.url} sent an event that is not a JSON object", status=200)
            if "error" in event:
                raise RequestRefused(_error_text(event) or "the stream ended with an error", status=200)
            yield event

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Any = None, more: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield the answer, whose body has not been read; the connection ends with the block."""
        host, port = self._parts.hostname, self._parts.port
        assert host is not None
        connection = http.client.HTTPConnection(host, port, timeout=self.timeout)
        if self._parts.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, timeout=self.timeout, context=self._tls)
        headers = {"accept": "application/json", **self._own_headers, **(more or {})}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            headers["content-type"] = "application/json"
        with closing(connection):
            try:
                connection.request(method, self._parts.path + path, body=data, headers=headers)
                answer = connection.getresponse()
            except TimeoutError as error:
                raise ClusterUnreachable(
                    f"{self.url} did not answer within {self.timeout:g} s", hint="is it overloaded? try again"
                ) from error
            except ssl.SSLError as error:
                why, hint = tls_fault(self.url, error)
                raise ClusterUnreachable(why, reason=why, hint=hint) from error
            except http.client.BadStatusLine as error:
                why = f"{self.url} does not answer as a server of HTTP does"
                plain = self._parts.scheme == "http"
                hint = (
                    "write https:// where it has a certificate" if plain else "does it ask for a certificate of yours?"
                )
                raise ClusterUnreachable(why, reason=why, hint=hint) from error
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                why = _connection_error_text(error)
                raise ClusterUnreachable(f"no cluster answers at {self.url}: {why}", reason=why, hint=_START) from error
            self.date = answer.getheader("date")
            yield answer

    def _json(self, path: str, answer: http.client.HTTPResponse, kind: type[T]) -> T:
        try:
            data = answer.read(ANSWER_MAX)
        except (OSError, http.client.HTTPException) as error:
            raise ClusterUnreachable(
                f"{self.url} broke off its answer to {path}: {_connection_error_text(error)}", hint=_START
            ) from error
        if answer.status == 200:
            try:
                return msgspec.json.decode(data, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RequestRefused(
                    f"{self.url}{path} does not answer as a Penstock cluster of this release does: {error}",
                    status=200,
                    hint="is it the URL that 'penstock up' printed? /admin may have a port of its own there",
                ) from error
        text = _error_text(_json_or_none(data))
        if answer.status in (401, 403):
            where = "--admin-key or PENSTOCK_ADMIN_KEY" if path.startswith("/admin") else "PENSTOCK_API_KEY"
            why = "" if text is None else f": {text}"
            raise RequestRefused(
                f"{self.url}{path} refused the key{why}", status=answer.status, hint=f"give the right one with {where}"
            )
        if answer.status == 404 and text is None:
            raise RequestRefused(
                f"{self.url}{path} does not answer as a Penstock cluster does (status {answer.status})",
                status=answer.status,
                hint="is it the URL that 'penstock up' printed? /admin may have a port of its own there",
            )
        raise RequestRefused(text or f"{self.url}{path} answered with status {answer.status}", status=answer.status)


_START = "'penstock up' starts one; another URL goes in --url or PENSTOCK_URL"


def url_option(command: F) -> F:
    """Add ``--url``, by default from PENSTOCK_URL or where ``penstock up`` listens."""
    return click.option(
        "--url", envvar="PENSTOCK_URL", default=DEFAULT_URL, show_default=True, help="The cluster [PENSTOCK_URL]."
    )(tls_options(command))


def admin_key_option(command: F) -> F:
    """Add ``--admin-key``, by default from PENSTOCK_ADMIN_KEY."""
    return click.option(
        "--admin-key", envvar="PENSTOCK_ADMIN_KEY", metavar="KEY", help="Key for /admin [PENSTOCK_ADMIN_KEY]."
    )(command)


def api_key_option(command: F) -> F:
    """Add ``--api-key``, by default from PENSTOCK_API_KEY."""
    return click.option("--api-key", envvar="PENSTOCK_API_KEY", metavar="KEY", help="Key for /v1 [PENSTOCK_API_KEY].")(
        command
    )


def path_part(text: str) -> str:
    """Quote a text as one part of a path."""
    return quote(text, safe="")


def _parsed_cluster_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        fine = False
    if not fine:
        raise click.BadParameter(f"{url!r} is not a URL; write it as http://HOST:PORT", param_hint="'--url'")
    return parts


def _headers(answer: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.getheaders()}


def _json_or_none(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _error_text(body: Any) -> str | None:
    """Return the sentence of an OpenAI error object, with its hint where there is one."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, str):
        return error
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return None
    hint = error.get("hint")
    message: str = error["message"]
    return f"{message} ({hint})" if isinstance(hint, str) and hint not in message else message


def _connection_error_text(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "the connection was refused"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
