"""`ServerAnswers`: what a server answers to small GETs, each sent once; a missing answer is None.

`EngineServer` asks by aiohttp, which follows redirects, to describe a server. `PolledServer` asks by the client that
requests go by, at a third of the cost: hundreds of servers are asked again and again.
"""

import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from penstock.adapters.engines.http.engine_call import ConnectFailed, EngineCalls, EngineSilent, EngineUnreachable

TIMEOUT = 5.0
ANSWER_MAX = 8 << 20
"""Bytes; a server's whole ``/metrics`` has some 100 KiB."""
CLOSES = "it closes connections without an answer"


class ServerAnswers(ABC):
    """One server, as it answers now; answers are cached.

    Args:
        url: base URL, such as ``http://127.0.0.1:8001``.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.silent = False
        """Whether a connection came about to which it gave no answer in time."""
        self.fault: str | None = None
        """What is wrong with its name or its TLS, where that is why there is no answer."""
        self._answers: dict[str, tuple[int, str] | None] = {}

    @property
    def reason(self) -> str:
        """Why there is no answer, to follow a sentence; nothing where that is unknown."""
        return "" if self.fault is None else f": {self.fault}"

    async def status(self, path: str) -> int | None:
        """Return the status of a GET, or None where no server answers."""
        answer = await self._ask(path)
        return None if answer is None else answer[0]

    async def text(self, path: str) -> str | None:
        """Return a GET's text, or None where it is no 200."""
        answer = await self._ask(path)
        return answer[1] if answer is not None and answer[0] == 200 else None

    async def json(self, path: str) -> Any:
        """Return a GET's JSON, or None where it is no 200 or no JSON."""
        text = await self.text(path)
        if text is None:
            return None
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return None

    async def object(self, path: str) -> dict[str, Any]:
        """Return a GET's JSON object, or an empty one."""
        value = await self.json(path)
        return value if isinstance(value, dict) else {}

    async def _ask(self, path: str) -> tuple[int, str] | None:
        if path not in self._answers:
            self._answers[path] = await self._get(path)
        return self._answers[path]

    @abstractmethod
    async def _get(self, path: str) -> tuple[int, str] | None: ...

    def _find_fault(self, error: BaseException | None) -> None:
        """Note why no connection came about, where that is no matter of who listens there."""
        if isinstance(error, socket.gaierror):
            self.fault = f"the name of the server {urlsplit(self.url).hostname} can't be resolved: {error.strerror}"
        elif isinstance(error, ssl.SSLError):
            self.fault = f"{error}; access.ca of its pool names the certificates that are trusted"


class EngineServer(ServerAnswers):
    """A server that is asked by aiohttp.

    Args:
        timeout: seconds that one answer may take.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, timeout: float = TIMEOUT) -> None:
        super().__init__(url)
        # A connection has a little less time than the whole: who takes none is known from who is late with an answer.
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=0.9 * timeout)
        self._http = http

    async def takes(self, path: str, body: Mapping[str, Any]) -> bool:
        """Return whether a POST of JSON is answered with 200."""
        return await self.post(path, body) == 200

    async def post(self, path: str, body: Mapping[str, Any]) -> int | None:
        """Return the status of a POST of JSON, or None where no server answers."""
        try:
            async with self._http.post(self.url + path, json=body, timeout=self._timeout) as answer:
                return answer.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def _get(self, path: str) -> tuple[int, str] | None:
        try:
            async with self._http.get(self.url + path, timeout=self._timeout) as answer:
                if (answer.content_length or 0) > ANSWER_MAX:
                    return answer.status, ""
                return answer.status, await answer.text()
        except TimeoutError as error:
            self.silent = not isinstance(error, aiohttp.ConnectionTimeoutError)
            return None
        except aiohttp.ClientConnectorError as error:
            self._find_fault(error if isinstance(error, ssl.SSLError) else error.os_error)
            return None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            self.fault = CLOSES
            return None
        except (aiohttp.ClientError, OSError, UnicodeDecodeError, ValueError):
            return None


class PolledServer(ServerAnswers):
    """A server that is asked by the client of requests; see `EngineServer`."""

    def __init__(self, calls: EngineCalls, url: str, timeout: float = TIMEOUT) -> None:
        super().__init__(url)
        self._calls, self._timeout = calls, timeout

    async def _get(self, path: str) -> tuple[int, str] | None:
        try:
            status, body = await self._calls.command(self.url, path, self._timeout, "GET", ANSWER_MAX)
            return status, body.decode()
        except EngineSilent:
            self.silent = True
        except ConnectFailed as error:
            self._find_fault(error.__cause__)
        except EngineUnreachable as error:
            if error.__cause__ is None:
                self.fault = CLOSES
        except UnicodeDecodeError:
            pass
        return None


def whole(value: Any) -> int | None:
    """Return a number above 0 from a number or a text, else None."""
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    return value if type(value) is int and value > 0 else None


def folder(value: Any) -> str | None:
    """Return a path that has a tokenizer on this machine, else None."""
    if not isinstance(value, str) or not value.startswith("/"):
        return None
    return value if (Path(value) / "tokenizer.json").is_file() else None
