"""A real Chromium, headless, driven over its own debugging protocol: what a person would see, click and hover over."""

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.conftest import skip_or_fail

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
]
LIMIT = 20.0
"""Seconds in which something on a page is to have happened."""

CONTRAST = """(() => {
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = one => {
    for (let at = one; at; at = at.parentElement) {
      const found = parts(getComputedStyle(at).backgroundColor);
      if ((found[3] ?? 1) > 0.9) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const one of document.querySelectorAll('main *, header *')) {
    const own = [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!own || !one.checkVisibility() || one.closest('.hidden')) continue;
    const ink = getComputedStyle(one).color;
    const [a, b] = [light(parts(ink)), light(behind(one))].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push(`${one.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return poor;
})()"""
"""Text of a page whose contrast with what is behind it is below 4.5."""


def chromium() -> str:
    """Return where Chromium is; skip the test where there is none."""
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        skip_or_fail("chromium", "no Chromium on this machine")
    assert found is not None
    return found


class Page:
    """One tab. ``complaints``: what its console said of errors, refused scripts and styles among them."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self.asked: list[str] = []
        """URLs that it fetched."""
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(self._waiting[number], 30)

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def ask(self, script: str) -> Any:
        """Return the value of an expression."""
        found = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    async def until(self, script: str, limit: float = LIMIT) -> Any:
        """Wait until an expression is true; return its value."""
        end = time.monotonic() + limit
        while not (found := await self.ask(script)):
            assert time.monotonic() < end, f"not within {limit:g} s: {script}\n{await self.text()}\n{self.complaints}"
            await asyncio.sleep(0.05)
        return found

    async def text(self, selector: str = "body") -> str:
        return str(await self.ask(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def look(self, width: int, height: int, scheme: str) -> None:
        """Be as wide and as high, and prefer a colour scheme."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await asyncio.sleep(0.3)  # two frames, in which it lays itself out and draws

    async def shot(self) -> bytes:
        """Return all of the page as PNG."""
        found = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    async def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    async def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            await self.mouse(kind, x, y, button="left", clickCount=1)

    async def key(self, name: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    async def _read(self) -> None:
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                waiting = self._waiting.pop(found["id"])
                if "error" in found:
                    waiting.set_exception(AssertionError(found["error"]["message"]))
                else:
                    waiting.set_result(found["result"])
            elif found["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(found["params"]["exceptionDetails"]))
            elif found["method"] == "Log.entryAdded" and found["params"]["entry"]["level"] == "error":
                self.complaints.append(str(found["params"]["entry"]))
            elif found["method"] == "Network.requestWillBeSent":
                self.asked.append(found["params"]["request"]["url"])

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@asynccontextmanager
async def browsed(folder: Path, url: str) -> AsyncIterator[Page]:
    """Open a page in a browser of its own, and close both afterwards."""
    profile = folder / "profile"
    process = _started(profile)
    try:
        end = time.monotonic() + LIMIT
        while not (port := _port(profile)):
            assert process.poll() is None and time.monotonic() < end, "Chromium did not start"
            await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as http:
            async with http.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                target = await answer.json()
            async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                try:
                    await page.open(url)
                    yield page
                finally:
                    await page.close()
    finally:
        _end(process)


def _started(profile: Path) -> subprocess.Popen[bytes]:
    command = [chromium(), *FLAGS, f"--user-data-dir={profile}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _port(profile: Path) -> str | None:
    """Return where it can be driven, as soon as it says so."""
    try:
        return (profile / "DevToolsActivePort").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
