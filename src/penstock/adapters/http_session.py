"""HTTP session of one object: aiohttp's, made at its first use, since that must be in the event loop."""

import ssl
from collections.abc import Callable, Mapping

import aiohttp


class HttpSession:
    """A session that is made once.

    Args:
        make: makes it.
    """

    def __init__(self, make: Callable[[], aiohttp.ClientSession] = aiohttp.ClientSession) -> None:
        self._make = make
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session; the first time, call this in the event loop."""
        if self._session is None:
            self._session = self._make()
        return self._session

    async def close(self) -> None:
        """Close its connections, if there ever were any."""
        if self._session is not None:
            await self._session.close()


def within(seconds: float, tls: ssl.SSLContext | None = None, headers: Mapping[str, str] | None = None) -> HttpSession:
    """Return a session whose requests may take so long; ``tls``: of https, None trusts the system."""
    return HttpSession(
        lambda: aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=seconds),
            connector=aiohttp.TCPConnector(ssl=True if tls is None else tls),
            headers=headers,
        )
    )
