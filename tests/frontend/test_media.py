"""Are media fetched once, from allowed public hosts only, and refused where they are too large, before any decoding?"""

import asyncio
import base64
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from penstock.config.settings.frontend_settings import FrontendSettings, MediaSettings
from penstock.frontend.media.address_guard import GuardedResolver, RefusedAddress, host_allowed
from penstock.frontend.media.media_content import PIXELS_MAX, content_id
from penstock.frontend.media.media_fetcher import MediaFetcher
from penstock.frontend.prompt.prompt_hashing import PromptHasher
from penstock.frontend.prompt.prompt_media import settle_media
from penstock.frontend.prompt.request_body import Parsed, parse, with_uuids
from penstock.kernel.errors import ClientError
from penstock.kernel.media.media_headers import recognise
from tests.frontend.stand import stand
from tests.media_files import data_url, gif, jpeg, mp4, png, wav, webp

HERE = ("127.0.0.1",)


class Site:
    """A server of media on loopback, which says how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, str] = {}
        self.redirects: dict[str, str] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.port = 0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"

    async def serve(self, request: web.Request) -> web.StreamResponse:
        name = request.path[1:]
        self.asked.append(name)
        await self.gate.wait()
        if name in self.redirects:
            return web.Response(status=302, headers={"location": self.redirects[name]})
        if name == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"\x89PNG\r\n\x1a\n" * 8192)
        if self.headers.get("etag") and request.headers.get("if-none-match") == self.headers["etag"]:
            return web.Response(status=304, headers=self.headers)
        if name not in self.files:
            return web.Response(status=404)
        return web.Response(body=self.files[name], headers=self.headers, content_type="application/octet-stream")


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    found = Site()
    app = web.Application()
    app.router.add_get("/{name:.*}", found.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.port = runner.addresses[0][1]
    try:
        yield found
    finally:
        found.gate.set()
        await runner.cleanup()


@asynccontextmanager
async def fetching(**settings: Any) -> AsyncIterator[MediaFetcher]:
    fetcher = MediaFetcher(MediaSettings(**{"private_hosts": HERE, **settings}))
    try:
        yield fetcher
    finally:
        await fetcher.close()


async def settled(fetcher: MediaFetcher, *parts: dict[str, Any]) -> Parsed:
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, *parts]}]}
    parsed = parse("chat_completions", json.dumps(body).encode())
    prompts = PromptHasher(1, 8, lambda name, took: None)
    try:
        await settle_media(parsed, fetcher, prompts)
    finally:
        prompts.close()
    assert json.loads(parsed.raw) == parsed.fields, "what is sent is what was named"
    return parsed


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}, **more}


async def test_the_same_bytes_have_one_name_however_they_come() -> None:
    cat, dog = png(32, 32, 1), png(32, 32, 2)
    async with site() as found, fetching() as fetcher:
        found.files = {"a.png": cat, "b": cat, "c.png": dog}
        parsed = await settled(
            fetcher, image(found.url("a.png")), image(found.url("b")), image(data_url(cat)), image(found.url("c.png"))
        )
    first, second, third, other = parsed.media
    assert first == second == third == content_id("image", cat)
    assert other == content_id("image", dog) != first
    parts = parsed.fields["messages"][0]["content"][1:]
    assert [part["image_url"]["url"] for part in parts] == [data_url(data) for data in (cat, cat, cat, dog)]
    assert all(part["image_url"]["detail"] == "low" for part in parts)
    named = with_uuids(parsed)
    assert named is not None and [part.get("uuid") for part in named[0]["content"]] == [None, *parsed.media]


async def test_sounds_and_videos_and_their_frames_are_named_by_content_too() -> None:
    sound, film, frames = wav(), mp4(64, 48), [jpeg(8, 8), jpeg(8, 9)]
    text = base64.b64encode(sound).decode()
    async with site() as found, fetching() as fetcher:
        found.files = {"film": film, "sound": sound}
        parsed = await settled(
            fetcher,
            {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
            {"type": "audio_url", "audio_url": {"url": found.url("sound")}},
            {"type": "video_url", "video_url": {"url": found.url("film")}},
            {"type": "video_url", "video_url": {"url": data_url(film, "video/mp4")}},
            {"type": "video_url", "video_url": {"url": data_url(frames[0], "video/jpeg") + "," + b64(frames[1])}},
            {"type": "video_url", "video_url": {"url": data_url(frames[1], "video/jpeg") + "," + b64(frames[0])}},
        )
    spoken, fetched, one, same, ab, ba = parsed.media
    assert spoken == fetched == content_id("audio", sound)
    assert one == same == content_id("video", film)
    assert ab == content_id("video", *frames) != ba == content_id("video", *reversed(frames))
    assert len({spoken, one, ab, ba}) == 4


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def test_one_fetch_serves_all_that_ask_at_once_and_later_by_what_the_server_says() -> None:
    async with site() as found, fetching() as fetcher:
        found.files = {"a": png(8, 8)}
        found.gate.clear()
        asks = [asyncio.create_task(settled(fetcher, image(found.url("a")))) for _ in range(5)]
        while not found.asked:
            await asyncio.sleep(0.001)
        asks[0].cancel()  # a client that goes takes nothing from the others
        found.gate.set()
        assert len({(await ask).media for ask in asks[1:]}) == 1 and found.asked == ["a"]
        found.headers = {"etag": '"1"'}
        await settled(fetcher, image(found.url("a")))
        assert found.asked == ["a", "a"], "nothing said that it may be kept"
        await settled(fetcher, image(found.url("a")))
        assert found.asked == ["a"] * 3 and fetcher.fetched == 2, "asked whether it has changed, it was not sent again"
        found.headers["cache-control"] = "public, max-age=60"
        for _ in range(3):
            await settled(fetcher, image(found.url("a")))
        assert found.asked == ["a"] * 4 and fetcher.fetched == 2


async def test_what_is_kept_is_bounded_in_bytes() -> None:
    async with site() as found, fetching(cache_bytes=3000) as fetcher:
        found.headers = {"cache-control": "max-age=60"}
        for number in range(8):
            found.files[str(number)] = png(16, 16, number) + b"\0" * 800
            await settled(fetcher, image(found.url(str(number))))
            assert fetcher.cache_size <= 3000
        await settled(fetcher, image(found.url("7")))
        assert len(found.asked) == 8
        await settled(fetcher, image(found.url("0")))
        assert found.asked[-1] == "0", "the first one had gone"


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://[fd00:ec2::254]/latest",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:169.254.169.254]/",
        "http://[64:ff9b::a9fe:a9fe]/",
        "http://[2002:7f00:1::]/",
        "http://[::1]/",
        "http://[fe80::1]/",
        "http://0.0.0.0/",
        "http://10.1.2.3/",
        "http://100.100.100.200/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://127.1/",
        "http://localhost/",
        "http://localhost./",
        "http://224.0.0.1/",
    ],
)
async def test_no_private_address_is_reached_even_where_any_host_is_allowed(url: str) -> None:
    async with fetching(allowed_hosts=("*",), private_hosts=()) as fetcher:
        with pytest.raises(ClientError, match=r"not public|no address|can't be read|InvalidUrl"):
            await settled(fetcher, image(url))
        assert fetcher.refused == 1


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://example.org/a", "gopher://x/", "http://u:p@example.org/", "//x/y", "x"]
)
async def test_only_plain_http_urls_are_taken(url: str) -> None:
    async with fetching(allowed_hosts=("*",)) as fetcher:
        with pytest.raises(ClientError) as error:
            await settled(fetcher, image(url))
        assert error.value.param == "messages[0].content[1].image_url"


async def test_a_host_that_is_not_listed_is_refused_with_what_to_do() -> None:
    async with fetching(private_hosts=()) as fetcher:
        with pytest.raises(ClientError, match="allowed_hosts") as error:
            await settled(fetcher, image("https://example.org/cat.png"))
        assert "data:TYPE;base64" in str(error.value.hint)
    assert host_allowed("a.example.org", (".example.org",)) and host_allowed("EXAMPLE.org.", ("example.ORG",))
    for host in ("example.org.evil.net", "evilexample.org", "example.org@evil.net"):
        assert not host_allowed(host, (".example.org", "example.org"))


async def test_each_hop_of_a_redirect_is_checked() -> None:
    async with site() as found, site() as inner, fetching() as fetcher:
        inner.files["x"] = png(8, 8)
        found.files["b"] = png(8, 8)
        found.redirects = {"a": found.url("b"), "loop": found.url("loop"), "meta": "http://169.254.169.254/x"}
        found.redirects |= {"name": f"http://localhost:{inner.port}/x", "file": "file:///etc/passwd"}
        assert (await settled(fetcher, image(found.url("a")))).media == (content_id("image", found.files["b"]),)
        for name in ("loop", "meta", "name", "file"):
            with pytest.raises(ClientError):
                await settled(fetcher, image(found.url(name)))
        assert not inner.asked


class Rebinding(AbstractResolver):
    """A name server that says one thing first and another thing afterwards."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[ResolveResult]:
        found = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        return [
            ResolveResult(hostname=host, host=text, port=port, family=socket.AF_INET, proto=0, flags=0)
            for text in found
        ]

    async def close(self) -> None:
        pass


async def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    async with site() as found:
        found.files["a"] = png(8, 8)
        for answers in ([["93.184.216.34", "127.0.0.1"]], [["127.0.0.1"]]):
            fetcher = MediaFetcher(MediaSettings(allowed_hosts=("evil.example",)))
            fetcher._guard = GuardedResolver(resolver=Rebinding(*answers))
            with pytest.raises(ClientError, match="not public"):
                await fetcher.fetch(f"http://evil.example:{found.port}/a", "image", "x")
            await fetcher.close()
        names = Rebinding(["127.0.0.1"], ["10.0.0.1"])
        fetcher = MediaFetcher(MediaSettings(private_hosts=("store.internal",)))
        fetcher._guard = GuardedResolver(private=("store.internal",), resolver=names)
        media = await fetcher.fetch(f"http://store.internal:{found.port}/a", "image", "x")
        assert media.content.id == content_id("image", found.files["a"]) and names.asked == 1, "it was resolved once"
        await fetcher.close()
        guard = GuardedResolver(private=("store.internal",), resolver=Rebinding(["169.254.169.254"]))
        with pytest.raises(RefusedAddress):
            await guard.resolve("store.internal")


async def test_sizes_times_and_kinds_are_limited() -> None:
    async with site() as found, fetching(bytes_max=100_000, timeout=0.4) as fetcher:
        found.files = {"html": b"<html>secret</html>", "big": png(8, 8) + b"\0" * 100_000, "wav": wav()}
        for name, why in (
            ("html", "nothing known"),
            ("big", "media_too_large"),
            ("endless", "media_too_large"),
            ("wav", "audio/wav"),
            ("absent", "404"),
        ):
            with pytest.raises(ClientError) as error:
                await settled(fetcher, image(found.url(name)))
            assert why in (error.value.code, *error.value.message.split()) or why in error.value.message, name
        found.gate.clear()
        with pytest.raises(ClientError, match=r"more than 0\.4 s"):
            await settled(fetcher, image(found.url("slow")))
        half = data_url(png(8, 8) + b"\0" * 60_000)
        with pytest.raises(ClientError) as error:
            await settled(fetcher, image(half), image(half))
        assert error.value.status == 413


@pytest.mark.parametrize("make", [png, jpeg, gif, webp])
async def test_a_decompression_bomb_is_refused_by_its_header(make: Any) -> None:
    async with fetching() as fetcher:
        fine, bomb = make(640, 480), make(16_000, 16_000)
        found = recognise(fine)
        assert found is not None and (found.width, found.height) == (640, 480) and len(bomb) < 20_000
        assert PIXELS_MAX < 16_000**2
        await settled(fetcher, image(data_url(fine)))
        with pytest.raises(ClientError, match="16000 x 16000"):
            await settled(fetcher, image(data_url(bomb)))
    frames = data_url(jpeg(8, 8), "video/jpeg") + "," + b64(jpeg(16_000, 16_000))
    with pytest.raises(ClientError, match="16000 x 16000"):
        await settled(fetcher, {"type": "video_url", "video_url": {"url": frames}})
    film = data_url(mp4(16_000, 16_000), "video/mp4")
    with pytest.raises(ClientError, match="16000 x 16000"):
        await settled(fetcher, {"type": "video_url", "video_url": {"url": film}})


def test_no_cut_or_broken_header_is_more_than_unknown() -> None:
    for whole in (png(64, 64), jpeg(64, 64), gif(64, 64), webp(64, 64), mp4(64, 64), wav()):
        for end in range(len(whole)):
            recognise(whole[:end])
        for at in range(min(len(whole), 64)):
            recognise(whole[:at] + b"\xff" + whole[at + 1 :])
    recognise(b"\0\0\0\x01ftyp" + struct.pack(">Q", 0))


@pytest.mark.parametrize(
    "part",
    [
        image("data:image/png,plain"),
        image("data:image/png;base64,@@@@"),
        image("data:image/png;base64," + base64.b64encode(b"hello").decode()),
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": None, "uuid": "0" * 64},
        {"type": "input_audio", "input_audio": {"data": ""}},
        {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join(["AAAA"] * 200)}},
    ],
)
async def test_malformed_media_are_the_clients_fault_and_named(part: dict[str, Any]) -> None:
    async with fetching() as fetcher:
        with pytest.raises(ClientError) as error:
            await settled(fetcher, part)
        assert str(error.value.param).startswith("messages[0].content[1]")


async def test_a_client_can_name_no_content_itself() -> None:
    """An engine takes what it has under a name for the content, and its encoder cache names files by it."""
    cat = png(8, 8)
    async with fetching() as fetcher:
        parsed = await settled(fetcher, image(data_url(cat), uuid="../../etc/x"), {"type": "file", "uuid": "../x"})
        named = with_uuids(parsed)
        assert named is not None
        assert [part.get("uuid") for part in named[0]["content"]] == [None, content_id("image", cat), None]


async def test_the_engine_gets_the_data_and_the_client_a_clear_refusal() -> None:
    cat = png(8, 8)
    async with site() as found, stand(frontend=FrontendSettings(media=MediaSettings(private_hosts=HERE))) as s:
        found.files["cat"] = cat
        for url, status in ((found.url("cat"), 200), (found.url("none"), 400), ("https://example.org/x", 400)):
            body = {"model": "m", "messages": [{"role": "user", "content": [image(url)]}]}
            async with s.http.post("/v1/chat/completions", json=body) as response:
                said = await response.json()
                assert response.status == status, said
            if status != 200:
                assert said["error"]["param"] == "messages[0].content[0].image_url"
        (sent,) = s.engines[0].bodies
        assert json.loads(sent)["messages"][0]["content"][0]["image_url"]["url"] == data_url(cat)
