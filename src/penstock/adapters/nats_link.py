"""Connection to NATS servers: reconnects for ever, restores its subscriptions, and never makes a publisher wait.

nats-py is imported at the first connection: a cluster without NATS does not load it.
"""

import asyncio
import importlib.util
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from penstock.adapters.task_cancel import end
from penstock.adapters.tls import client_context
from penstock.config.settings.discovery_settings import NatsSettings
from penstock.kernel.errors import ConfigError

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

log = logging.getLogger(__name__)

RETRY = 0.5
"""Seconds between tries to connect."""
TIMEOUT = 5.0
"""Seconds that a connection may take, and an answer to a question of ours."""
PING = 2
"""Seconds between pings; two without an answer break the connection, so that a lost server is detected in time."""

Handler = Callable[["Msg"], Awaitable[None]]


def subject_of(*words: str) -> str:
    """Return a subject of one token per word, whatever characters the words have."""
    return ".".join(quote(word, safe="").replace(".", "%2E") or "%" for word in words)


class NatsLink:
    """One connection of this process, which may be down; `start` makes it.

    Args:
        settings: servers, credentials, certificates.
        name: by which the server's own lists call this connection.
    Raises:
        ConfigError: a certificate can't be read, or the package that signs with nkeys is not installed.
    """

    def __init__(self, settings: NatsSettings, name: str) -> None:
        if (settings.nkey or settings.creds) and importlib.util.find_spec("nkeys") is None:
            raise ConfigError(
                "discovery.nats.nkey and creds need the package nkeys", hint="pip install 'penstock[nkeys]'"
            )
        self.problem: str | None = None
        """Why there is no connection at present; None while there is one."""
        self.connected = asyncio.Event()
        self._settings = settings
        self._options = _options(settings, name)
        self._client: Client | None = None
        self._handlers: dict[str, tuple[str, Handler]] = {}
        self._subscriptions: dict[str, Any] = {}
        """Subscriptions of the present connection, by the same marks."""
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def client(self) -> "Client | None":
        """The connection, or None while there is none."""
        return self._client

    def start(self) -> "NatsLink":
        """Connect from now on; call it with the event loop running."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name="nats")
        return self

    async def close(self) -> None:
        """Send what is left, and close the connection."""
        self._closed = True
        if self._client is not None:
            await self._ended(self._client)
        if self._task is not None:
            await end([self._task])

    async def publish(self, subject: str, payload: bytes, *, reply: str = "") -> bool:
        """Send to all present subscribers; return False where there is no connection."""
        from nats.errors import Error

        client = self._client
        if client is None:
            return False
        try:
            await client.publish(subject, payload, reply=reply)
        except (Error, OSError) as error:
            log.debug("a message to %s was not sent: %s", subject, error)
            return False
        return True

    async def listen(self, subject: str, handler: Handler) -> Callable[[], Awaitable[None]]:
        """Call ``handler`` with each message on a subject, over all later connections; return what ends that."""
        mark = secrets.token_hex(8)
        self._handlers[mark] = subject, handler
        if self._client is not None:
            # Where that connection is just ending, the next one subscribes.
            await _quietly(self._subscribe(self._client, mark))

        async def unlisten() -> None:
            self._handlers.pop(mark, None)
            subscription = self._subscriptions.pop(mark, None)
            if subscription is not None:
                await _quietly(subscription.unsubscribe())

        return unlisten

    async def ask(self, subject: str, question: bytes, timeout: float) -> AsyncGenerator[bytes, None]:
        """Yield the answers to a request, until the reader stops.

        Raises:
            TimeoutError: there is no connection, no subscriber, or no further answer came in time.
        """
        from nats.errors import Error

        client = self._client
        if client is None:
            raise TimeoutError("there is no connection to NATS")
        answers: asyncio.Queue[Msg] = asyncio.Queue()
        inbox = client.new_inbox()
        try:
            subscription = await client.subscribe(inbox, cb=answers.put)
        except (Error, OSError) as error:
            raise TimeoutError(f"NATS can't be asked: {error}") from error
        try:
            await client.publish(subject, question, reply=inbox)
            async with asyncio.timeout(timeout):
                while True:
                    answer = await answers.get()
                    if answer.header and answer.header.get("Status") == "503":
                        raise TimeoutError(f"nobody listens to {subject}")
                    yield answer.data
        except (Error, OSError) as error:
            raise TimeoutError(f"NATS can't be asked: {error}") from error
        finally:
            await _quietly(subscription.unsubscribe())

    async def _keep(self) -> None:
        """Connect, subscribe as before, and begin again when the connection breaks."""
        import nats
        from nats.errors import Error

        while not self._closed:
            ended = asyncio.Event()

            async def over(ended: asyncio.Event = ended) -> None:
                ended.set()

            try:
                client = await nats.connect(**self._options, error_cb=self._complained, closed_cb=over)
            except (Error, OSError, TimeoutError, ValueError) as error:
                self._down(str(error) or type(error).__name__)
                await asyncio.sleep(RETRY)
                continue
            if self._closed:  # nats-py may swallow a cancel, and connect all the same
                await self._ended(client)
                return
            try:
                self._subscriptions.clear()
                self._client = client
                for mark in tuple(self._handlers):
                    await self._subscribe(client, mark)
                if self.problem is not None:
                    log.info("NATS at %s is there", self._settings.urls[0])
                self.problem = None
                self.connected.set()
                while not client.is_closed:  # nats-py calls nobody back where its closing fails midway
                    with suppress(TimeoutError):
                        await asyncio.wait_for(ended.wait(), RETRY)
                self._down("the connection ended")
            except (Error, OSError) as error:
                self._down(str(error))
            finally:
                self._client = None
                self.connected.clear()
                await self._ended(client)
            await asyncio.sleep(RETRY / 10)

    def _down(self, why: str) -> None:
        if self.problem is None and not self._closed:
            log.warning("NATS at %s can't be reached: %s", ", ".join(self._settings.urls), why)
        self.problem = why

    async def _subscribe(self, client: "Client", mark: str) -> None:
        if mark not in self._handlers or mark in self._subscriptions:
            return
        subject, handler = self._handlers[mark]
        self._subscriptions[mark] = None  # under way
        subscription = await client.subscribe(subject, cb=handler)
        if mark in self._handlers:
            self._subscriptions[mark] = subscription
        else:
            await _quietly(subscription.unsubscribe())

    async def _complained(self, error: Exception) -> None:
        log.debug("NATS: %s", error)

    async def _ended(self, client: "Client") -> None:
        if not client.is_closed:
            await _quietly(client.flush(timeout=1))
            await _quietly(client.close())


async def _quietly(work: Awaitable[Any]) -> None:
    """Await work that may fail because the connection is gone, which is no error."""
    from nats.errors import Error

    try:
        await work
    except (Error, OSError, TimeoutError) as error:
        log.debug("NATS: %s", error)


def _options(settings: NatsSettings, name: str) -> dict[str, Any]:
    tls = None
    if settings.ca or settings.cert or any(url.startswith("tls") for url in settings.urls):
        tls = client_context(ca=settings.ca, cert=settings.cert, key=settings.key)
    return {
        "servers": list(settings.urls),
        "name": name,
        "connect_timeout": TIMEOUT,
        "allow_reconnect": False,  # done here, where the subscriptions are known
        "ping_interval": PING,
        "max_outstanding_pings": 2,
        "no_echo": True,
        "user": settings.user,
        "password": settings.password,
        "token": settings.token,
        "nkeys_seed": settings.nkey,
        "user_credentials": settings.creds,
        "tls": tls,
    }
