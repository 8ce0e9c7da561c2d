"""etcd client: a thin layer over the JSON gateway of etcd 3.4+, with keys, leases, transactions and watches.

Keys and values are bytes, revisions and leases whole numbers. A call goes to the endpoint that answered last and, where
that can't be reached, to the others in turn. Leases, transactions and watches are etcd's own; nothing is added.
"""

import ssl
from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

import aiohttp
import msgspec

from penstock.adapters.http_session import HttpSession
from penstock.adapters.seams import StoreUnavailable

WATCH_LINE_LIMIT = 64 << 20
"""Bytes of one answer of a watch: a first answer after a long break holds everything that changed."""

_RENEWED_AT_ONCE = 100
"""Leases of one request. Once etcd's gateway (3.5, over HTTP/1.1) answers, it may leave unread what it has not read by
then, which is all behind the first 512 bytes at worst: those leases are asked for again."""

_NOT_FOUND, _EXISTS, _DENIED, _EXHAUSTED, _PRECONDITION, _UNAUTHENTICATED = 5, 6, 7, 8, 9, 16
_ELSEWHERE = frozenset({1, 2, 4, 14})
"""Codes of gRPC after which another endpoint may know better: cancelled, unknown, too late, unavailable."""


class LeaseNotFound(StoreUnavailable):
    """etcd does not know that lease: it ended, was revoked, or etcd lost its data."""


class Compacted(StoreUnavailable):
    """The changes since a revision are compacted; ``revision`` is the oldest that is left."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"etcd has forgotten what happened before revision {revision}")
        self.revision = revision


class KeyValue(msgspec.Struct, frozen=True):
    """One key at present; ``revision``: of its last change, ``created``: of its first."""

    key: bytes
    value: bytes = b""
    revision: int = msgspec.field(default=0, name="mod_revision")
    created: int = msgspec.field(default=0, name="create_revision")
    lease: int = 0


class EtcdRange(NamedTuple):
    """The content of a range of keys at one revision of the whole store."""

    revision: int
    items: tuple[KeyValue, ...]


class EtcdEvent(NamedTuple):
    """One change of a watch; ``value`` is None where the key went away."""

    key: bytes
    value: bytes | None
    revision: int
    lease: int = 0


class EtcdChanges(NamedTuple):
    """Changes of a watch up to a revision of the whole store."""

    revision: int
    events: tuple[EtcdEvent, ...]


class EtcdCompare(NamedTuple):
    """What must hold for a transaction: the value of a key, or that there is no such key (``value`` None)."""

    key: bytes
    value: bytes | None


class EtcdPut(msgspec.Struct, frozen=True, omit_defaults=True):
    """A write, also inside a transaction."""

    key: bytes
    value: bytes
    lease: int = 0


class EtcdDelete(msgspec.Struct, frozen=True):
    """A removal inside a transaction."""

    key: bytes


class EtcdLogin(NamedTuple):
    """A user of etcd and the password."""

    user: str
    password: str


class _Header(msgspec.Struct, frozen=True):
    revision: int = 0


class _Answer(msgspec.Struct, frozen=True):
    """What any call may answer. The gateway writes 64-bit numbers as text, and leaves zeros out."""

    header: _Header = _Header()
    kvs: tuple[KeyValue, ...] = ()
    deleted: int = 0
    succeeded: bool = False
    lease: int = msgspec.field(default=0, name="ID")
    ttl: int = msgspec.field(default=0, name="TTL")


class _KeepAliveLine(msgspec.Struct, frozen=True):
    result: _Answer = _Answer()


class _WatchEvent(msgspec.Struct, frozen=True):
    kv: KeyValue
    type: str = "PUT"


class _WatchResult(msgspec.Struct, frozen=True):
    header: _Header = _Header()
    compact_revision: int = 0
    canceled: bool = False
    cancel_reason: str = ""
    events: tuple[_WatchEvent, ...] = ()


class _Fault(msgspec.Struct, frozen=True):
    """An error of etcd; ``code``: gRPC's."""

    grpc_code: int = 0
    code: int = 0
    message: str = ""


class _WatchLine(msgspec.Struct, frozen=True):
    result: _WatchResult = _WatchResult()
    error: _Fault | None = None


class EtcdClient:
    """Calls to an etcd, or to the members of one.

    Args:
        urls: of its client ports, such as ``http://10.0.0.5:2379``.
        login: None where etcd needs none.
        tls: certificates for https; None takes those that the system trusts.
        timeout: seconds for a call to one endpoint.

    Every call raises `StoreUnavailable`: no endpoint answers, or etcd refuses; the message has its error.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        login: EtcdLogin | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 5.0,
    ) -> None:
        if not urls:
            raise ValueError("an etcd client needs at least one URL")
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.timeout = timeout
        self.revision = 0
        """The highest revision of the whole store in any answer."""
        self._at = 0
        self._login = login
        self._token: str | None = None
        self._tls = tls
        self._http = HttpSession(
            lambda: aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=True if self._tls is None else self._tls, limit=64),
                timeout=aiohttp.ClientTimeout(total=self.timeout),
            )
        )
        self._closed = False

    # --- keys -------------------------------------------------------------------------------------------------------

    async def get(self, key: bytes) -> KeyValue | None:
        """Return one key, or None where it is absent."""
        answer = await self._range({"key": _as_base64(key)})
        return answer.items[0] if answer.items else None

    async def range(self, prefix: bytes, *, values: bool = True) -> EtcdRange:
        """Return everything whose key begins with ``prefix``; without ``values`` only keys and revisions."""
        return await self._range({**_prefix_range(prefix), "keys_only": not values})

    async def put(self, key: bytes, value: bytes, *, lease: int = 0) -> int:
        """Write a key and return the revision; with ``lease`` it is deleted when that ends.

        Raises:
            LeaseNotFound: there is no such lease; nothing was written.
        """
        return (await self._call("kv/put", EtcdPut(key, value, lease))).header.revision

    async def delete(self, key: bytes) -> bool:
        """Delete a key; return whether it was there."""
        return (await self._call("kv/deleterange", EtcdDelete(key))).deleted > 0

    async def txn(self, compare: Sequence[EtcdCompare], success: Sequence[EtcdPut | EtcdDelete]) -> bool:
        """Carry out all of ``success``, or nothing unless all of ``compare`` holds; return whether it did.

        It is sent once: a second try could find its own writes and take them for another writer's.
        """
        body = {
            "compare": [_compare(one) for one in compare],
            "success": [
                {"request_put": step} if isinstance(step, EtcdPut) else {"request_delete_range": step}
                for step in success
            ],
        }
        return (await self._call("kv/txn", body, again=False)).succeeded

    async def _range(self, body: object) -> EtcdRange:
        answer = await self._call("kv/range", body)
        return EtcdRange(answer.header.revision, answer.kvs)

    # --- leases -----------------------------------------------------------------------------------------------------

    async def grant(self, ttl: int) -> int:
        """Create a lease of so many seconds; return its id. etcd makes it longer where it is below etcd's minimum."""
        return (await self._call("lease/grant", {"TTL": ttl})).lease

    async def keep_alive(self, leases: Sequence[int]) -> dict[int, int | None]:
        """Renew leases; return the seconds that each then has, None for one that has ended."""
        remaining: dict[int, int | None] = {}
        left = list(leases)
        while left:
            some, left = left[:_RENEWED_AT_ONCE], left[_RENEWED_AT_ONCE:]
            answers = await self._keep_alive(some)
            if not answers:
                raise StoreUnavailable(f"etcd left {len(some)} leases without an answer")
            remaining |= answers
            left += [lease for lease in some if lease not in answers]
        return remaining

    async def _keep_alive(self, leases: Sequence[int]) -> dict[int, int | None]:
        body = b"\n".join(msgspec.json.encode({"ID": lease}) for lease in leases)
        raw = await self._exchange("lease/keepalive", body, again=True)
        remaining: dict[int, int | None] = {}
        for line in raw.splitlines():
            answer = msgspec.json.decode(line, type=_KeepAliveLine, strict=False).result
            self._heard(answer.header)
            if answer.lease:
                remaining[answer.lease] = answer.ttl if answer.ttl > 0 else None
        return remaining

    async def revoke(self, lease: int) -> bool:
        """End a lease and its keys; return whether there was one."""
        try:
            await self._call("lease/revoke", {"ID": lease})
        except LeaseNotFound:
            return False
        return True

    # --- watching ---------------------------------------------------------------------------------------------------

    async def watch(self, prefix: bytes, revision: int) -> AsyncGenerator[EtcdChanges, None]:
        """Yield what changes under a prefix from a revision on, until the connection breaks; first an empty batch.

        Raises:
            Compacted: etcd has dropped the requested changes.
            StoreUnavailable: the connection broke, also where the server ended it.
        """
        body = {"create_request": {**_prefix_range(prefix), "start_revision": revision}}
        async with aclosing(self._lines("watch", msgspec.json.encode(body))) as lines:
            async for line in lines:
                yield self._changes(msgspec.json.decode(line, type=_WatchLine, strict=False))
        raise StoreUnavailable(f"etcd at {self.urls[self._at]} ended a watch")

    def _changes(self, line: _WatchLine) -> EtcdChanges:
        if line.error is not None:
            raise _refusal_error(line.error.grpc_code or line.error.code, line.error.message, self.urls[self._at])
        result = line.result
        self._heard(result.header)
        if result.compact_revision:
            raise Compacted(result.compact_revision)
        if result.canceled:
            raise StoreUnavailable(f"etcd ended a watch: {result.cancel_reason or 'it gave no reason'}")
        return EtcdChanges(result.header.revision, tuple(_etcd_event(event) for event in result.events))

    # --- transport --------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close all connections; twice is no error."""
        self._closed = True
        await self._http.close()

    async def _call(self, path: str, body: object, *, again: bool = True) -> _Answer:
        raw = await self._exchange(path, msgspec.json.encode(body), again=again)
        try:
            answer = msgspec.json.decode(raw, type=_Answer, strict=False)
        except msgspec.DecodeError as error:
            raise StoreUnavailable(f"{self.urls[self._at]} gives no answer of an etcd: {raw[:100]!r}") from error
        self._heard(answer.header)
        return answer

    async def _exchange(self, path: str, body: bytes, *, again: bool) -> bytes:
        """Try every endpoint until one answers; with ``again`` also where the request may have arrived already."""
        failures: list[str] = []
        tries = len(self.urls)
        while len(failures) < tries:
            url = self.urls[self._at]
            try:
                return await self._ask(url, path, body)
            except StoreUnavailable:
                raise
            except _Elsewhere as error:
                failures.append(f"{url}: {error}")
                if error.sent and not again:
                    break
                if error.stale and tries == len(self.urls):
                    tries += 1  # a kept connection that the other side closed shows nothing about the endpoint
                else:
                    self._at = (self._at + 1) % len(self.urls)
        raise StoreUnavailable(f"etcd can't be reached: {'; '.join(failures)}", hint="traffic goes on meanwhile")

    async def _ask(self, url: str, path: str, body: bytes) -> bytes:
        for attempt in ("first", "with a new token"):
            try:
                headers = await self._headers(url)
                async with self._session().post(f"{url}/v3/{path}", data=body, headers=headers) as answer:
                    raw = await answer.read()
                    if answer.status == 200:
                        return raw
            except aiohttp.ClientConnectorError as error:
                raise _Elsewhere(str(error), sent=False) from error
            except (aiohttp.ServerDisconnectedError, ConnectionResetError) as error:
                raise _Elsewhere(str(error), sent=True, stale=True) from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise _Elsewhere(str(error) or type(error).__name__, sent=True) from error
            if not self._outdated(raw, attempt == "first"):
                break
        code, text = _grpc_code_and_text(raw)
        if code in _ELSEWHERE:
            raise _Elsewhere(text, sent=True)
        raise _refusal_error(code, text, url)

    async def _lines(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the lines of an answer that does not end."""
        url = self.urls[self._at]
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout)
        for attempt in ("first", "with a new token"):
            try:
                headers = await self._headers(url)
                request = self._session().post(f"{url}/v3/{path}", data=body, headers=headers, timeout=timeout)
                async with request as answer:
                    if answer.status == 200:
                        rest = b""
                        async for piece in answer.content.iter_any():
                            *lines, rest = (rest + piece).split(b"\n")
                            if len(rest) > WATCH_LINE_LIMIT:
                                raise StoreUnavailable(f"etcd at {url} sends more than {WATCH_LINE_LIMIT} bytes a line")
                            for line in lines:
                                if line.strip():
                                    yield line
                        return
                    raw = await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._at = (self._at + 1) % len(self.urls)
                raise StoreUnavailable(f"etcd at {url} can't be followed: {str(error) or type(error).__name__}") from (
                    error
                )
            if not self._outdated(raw, attempt == "first"):
                break
        code, text = _grpc_code_and_text(raw)
        raise _refusal_error(code, text, url)

    def _outdated(self, raw: bytes, first: bool) -> bool:
        """Return whether a refusal is about an old token, and forget that token."""
        if self._login is None or not first or _grpc_code_and_text(raw)[0] != _UNAUTHENTICATED:
            return False
        self._token = None
        return True

    async def _headers(self, url: str) -> dict[str, str]:
        if self._login is None:
            return {}
        if self._token is None:
            login = {"name": self._login.user, "password": self._login.password}
            body = msgspec.json.encode(login)
            async with self._session().post(f"{url}/v3/auth/authenticate", data=body) as answer:
                raw = await answer.read()
                if answer.status != 200:
                    code, text = _grpc_code_and_text(raw)
                    if code in _ELSEWHERE:
                        raise _Elsewhere(text, sent=False)
                    raise StoreUnavailable(
                        f"etcd at {url} refuses user {self._login.user!r}: {text}",
                        hint="see discovery.etcd.user and discovery.etcd.password",
                    )
                self._token = str(msgspec.json.decode(raw)["token"])
        return {"authorization": self._token}

    def _session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise StoreUnavailable("this connection to etcd was closed by this process")
        return self._http.session

    def _heard(self, header: _Header) -> None:
        self.revision = max(self.revision, header.revision)


class _Elsewhere(Exception):
    """One endpoint failed; another may not. ``sent``: the request may have arrived; ``stale``: on an old connection."""

    def __init__(self, text: str, *, sent: bool, stale: bool = False) -> None:
        super().__init__(text)
        self.sent = sent
        self.stale = stale


def _refusal_error(code: int, text: str, url: str) -> StoreUnavailable:
    if code == _NOT_FOUND and "lease" in text:
        return LeaseNotFound(f"etcd at {url}: {text}")
    hint = {
        _DENIED: "give discovery.etcd.user the right to read and write under /penstock/",
        _EXHAUSTED: "etcd is full: compact and defragment it, or raise its quota",
        _PRECONDITION: "is authentication on in etcd? leave discovery.etcd.user out where it is not",
        _UNAUTHENTICATED: "see discovery.etcd.user and discovery.etcd.password",
    }.get(code)
    if "user name is empty" in text:
        hint = "etcd asks for a user: see discovery.etcd.user"
    return StoreUnavailable(f"etcd at {url} refuses: {text}", hint=hint)


def _grpc_code_and_text(raw: bytes) -> tuple[int, str]:
    """Return gRPC's code and the text of a refusal; 2 (unknown) where the answer is not etcd's."""
    try:
        answer = msgspec.json.decode(raw)
        return int(answer.get("code", 2)), str(answer.get("message") or answer.get("error"))
    except (msgspec.DecodeError, AttributeError, ValueError, UnicodeDecodeError):
        return 2, f"no answer of an etcd: {raw[:100]!r}"


def _as_base64(raw: bytes) -> str:
    return b64encode(raw).decode()


def _prefix_range(prefix: bytes) -> dict[str, str]:
    """Return the range of all keys that begin with a prefix; a zero byte means every key, and no end."""
    end = prefix.rstrip(b"\xff")
    end = end[:-1] + bytes([end[-1] + 1]) if end else b"\0"
    return {"key": _as_base64(prefix or b"\0"), "range_end": _as_base64(end)}


def _compare(compare: EtcdCompare) -> dict[str, str | int]:
    if compare.value is None:
        return {"key": _as_base64(compare.key), "target": "CREATE", "result": "EQUAL", "create_revision": 0}
    return {"key": _as_base64(compare.key), "target": "VALUE", "result": "EQUAL", "value": _as_base64(compare.value)}


def _etcd_event(event: _WatchEvent) -> EtcdEvent:
    entry = event.kv
    return EtcdEvent(entry.key, None if event.type == "DELETE" else entry.value, entry.revision, entry.lease)
