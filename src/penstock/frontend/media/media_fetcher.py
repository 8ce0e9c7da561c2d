"""Media fetcher: fetches images, sounds and videos by URL for the engines, each once, and from public hosts only.

One request at a time fetches a URL; the others wait for it. What came is kept by its content, within a number of
bytes: a URL that says how long it may be kept, or by what it is recognised (ETag), is not fetched again.
"""

import asyncio
import base64
import re
import time
from collections import OrderedDict
from dataclasses import dataclass

import aiohttp
from yarl import URL

from penstock.config.settings.frontend_settings import MediaSettings
from penstock.frontend.media.address_guard import GuardedResolver, RefusedAddress, check_host
from penstock.frontend.media.media_content import MediaContent, checked, too_large
from penstock.kernel.errors import ClientError, OverloadedError
from penstock.kernel.media.media_headers import Modality

REDIRECTS_MAX = 3
"""Redirects that are followed; each is checked as the first URL was."""
FETCHES_MAX = 64
"""Fetches at the same time; the next is refused with 503."""
FRESH_MAX = 3600.0
"""Seconds for which a URL's content counts as fresh, whatever the server says."""
URL_MAX = 2048
"""Characters of a URL."""
URLS_KEPT = 16_384
"""URLs that are remembered with what they held."""
_MAX_AGE = re.compile(r"(?:^|[\s,])max-age=(\d{1,9})(?:$|[\s,])")
_PIECE = 64 * 1024


@dataclass(slots=True)
class _Known:
    """What a URL held when it was fetched last."""

    key: tuple[Modality, str]
    fresh_until: float
    validators: dict[str, str]


@dataclass(frozen=True, slots=True)
class FetchedMedia:
    """Checked content and the data URL that engines get."""

    content: MediaContent
    data_url: str


class MediaFetcher:
    """Fetches media of one frontend process."""

    def __init__(self, settings: MediaSettings) -> None:
        self.settings = settings
        self.fetched = self.hits = self.refused = self.bytes = 0
        """URLs that were fetched, that needed no fetch, and that were refused; bytes that came."""
        self.cache_size = 0
        """Bytes of content that is kept."""
        self._contents: OrderedDict[tuple[Modality, str], FetchedMedia] = OrderedDict()
        self._urls: OrderedDict[tuple[Modality, str], _Known] = OrderedDict()
        self._running: dict[tuple[Modality, str], asyncio.Task[FetchedMedia]] = {}
        self._guard = GuardedResolver(private=settings.private_hosts)
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, url: str, modality: Modality, param: str) -> FetchedMedia:
        """Return what a URL holds.

        Raises:
            ClientError: 400 or 413: its host is not allowed, or what it holds is not usable.
            OverloadedError: too many fetches run.
        """
        key = (modality, url)
        try:
            if len(url) > URL_MAX:
                raise ClientError(f"{param} has a URL of more than {URL_MAX} characters", param=param)
            check_host(_parsed_media_url(url, param).host, self.settings, param)
            known = self._urls.get(key)
            if known is not None and time.monotonic() < known.fresh_until:
                kept = self._contents.get(known.key)
                if kept is not None:
                    self._contents.move_to_end(known.key)
                    self.hits += 1
                    return kept
            task = self._running.get(key)
            if task is not None:
                self.hits += 1
            else:
                if len(self._running) >= FETCHES_MAX:
                    raise OverloadedError(f"{FETCHES_MAX} media are being fetched", retry_after=1.0)
                task = self._running[key] = asyncio.create_task(self._fetch(key, param), name="media-fetch")
                task.add_done_callback(lambda done: self._fetch_over(key, done))
            return await asyncio.shield(task)  # others may wait for it as well
        except ClientError:
            self.refused += 1
            raise

    async def close(self) -> None:
        """End all fetches."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _fetch_over(self, key: tuple[Modality, str], task: "asyncio.Task[FetchedMedia]") -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # each that waits has it; where all have gone nobody asks

    async def _fetch(self, key: tuple[Modality, str], param: str) -> FetchedMedia:
        try:
            async with asyncio.timeout(self.settings.timeout):
                return await self._follow(key, param)
        except TimeoutError:
            raise _unfetched(param, f"it took more than {self.settings.timeout:g} s") from None
        except RefusedAddress as error:
            raise _unfetched(param, str(error)) from None
        except aiohttp.ClientConnectorDNSError as error:
            refused = error.os_error
            reason = str(refused) if isinstance(refused, RefusedAddress) else "its host has no address"
            raise _unfetched(param, reason) from None
        except aiohttp.ClientError as error:
            raise _unfetched(param, f"the connection failed ({type(error).__name__})") from None

    async def _follow(self, key: tuple[Modality, str], param: str) -> FetchedMedia:
        modality, text = key
        url = _parsed_media_url(text, param)
        known = self._urls.get(key)
        kept = None if known is None else self._contents.get(known.key)
        headers = {"accept": f"{modality}/*", "accept-encoding": "identity"}
        if kept is not None and known is not None:
            headers |= known.validators
        for _ in range(1 + REDIRECTS_MAX):
            check_host(url.host, self.settings, param)
            self._guard.check(url)
            async with self._client().get(url, allow_redirects=False, headers=headers) as response:
                if response.status == 304 and kept is not None and known is not None:
                    known.fresh_until = _fresh_until(response.headers)
                    self.hits += 1
                    return kept
                if response.status in (301, 302, 303, 307, 308) and "location" in response.headers:
                    url = _parsed_media_url(str(url.join(URL(response.headers["location"]))), param)
                    continue
                if response.status != 200:
                    raise _unfetched(param, f"its server answered {response.status}")
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise _unfetched(param, "its server compresses it, which was not asked for")
                data = await self._read_body(response, param)
                found = await asyncio.to_thread(_made, data, modality, param)
                self._keep_media(key, found, response.headers)
                return found
        raise _unfetched(param, f"more than {REDIRECTS_MAX} redirects")

    async def _read_body(self, response: aiohttp.ClientResponse, param: str) -> bytes:
        most = self.settings.bytes_max
        if response.content_length is not None and response.content_length > most:
            raise too_large(param, response.content_length, most)
        pieces, size = [], 0
        async for piece in response.content.iter_chunked(_PIECE):
            size += len(piece)
            if size > most:
                raise too_large(param, f"more than {most}", most)
            pieces.append(piece)
        self.fetched += 1
        self.bytes += size
        return b"".join(pieces)

    def _keep_media(
        self, key: tuple[Modality, str], media: FetchedMedia, headers: "aiohttp.typedefs.LooseHeaders"
    ) -> None:
        place = (key[0], media.content.id)
        known = dict(headers)  # type: ignore[arg-type]
        same = {name.lower(): value for name, value in known.items()}
        validators = {
            condition: same[name]
            for name, condition in (("etag", "if-none-match"), ("last-modified", "if-modified-since"))
            if name in same
        }
        self._urls[key] = _Known(place, _fresh_until(same), validators)
        self._urls.move_to_end(key)
        if len(self._urls) > URLS_KEPT:
            self._urls.popitem(last=False)
        if place in self._contents:
            self._contents.move_to_end(place)
            return
        self._contents[place] = media
        self.cache_size += len(media.data_url)
        while self.cache_size > self.settings.cache_bytes and self._contents:
            _, gone = self._contents.popitem(last=False)
            self.cache_size -= len(gone.data_url)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No cookies, no proxies of the environment, no names remembered: each connection is checked by itself.
            connector = aiohttp.TCPConnector(resolver=self._guard, use_dns_cache=False, limit=FETCHES_MAX)
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            )
        return self._session


def _made(data: bytes, modality: Modality, param: str) -> FetchedMedia:
    content = checked(data, modality, param)
    return FetchedMedia(content, f"data:{content.format.mime};base64,{base64.b64encode(data).decode()}")


def _fresh_until(headers: "aiohttp.typedefs.LooseHeaders") -> float:
    value = dict(headers)  # type: ignore[arg-type]
    control = next((str(text).lower() for name, text in value.items() if str(name).lower() == "cache-control"), "")
    age = _MAX_AGE.search(control)
    if age is None or "no-store" in control or "no-cache" in control:
        return 0.0
    return time.monotonic() + min(FRESH_MAX, float(age[1]))


def _parsed_media_url(url: str, param: str) -> URL:
    try:
        parsed = URL(url)
    except ValueError:
        raise ClientError(f"{param} has a URL that can't be read", param=param) from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ClientError(
            f"{param} has a URL of scheme {parsed.scheme!r}; media come by http, https or data URLs", param=param
        )
    if parsed.user is not None or parsed.password is not None:
        raise ClientError(f"{param} has a URL with a name and password, which are not sent", param=param)
    return parsed


def _unfetched(param: str, reason: str) -> ClientError:
    return ClientError(f"{param} can't be fetched: {reason}", param=param, code="media_not_fetched")
