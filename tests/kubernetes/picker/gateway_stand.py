"""A real nginx or HAProxy, with the config that we render, before scripted engines and a picker in this process."""

import asyncio
import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
from aiohttp import web

from penstock.adapters.listen_address import free_port
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock_kubernetes.picker.gateway_configs import GatewayOptions, rendered, workers_file
from penstock_kubernetes.picker.gateway_listener import GatewayListener
from penstock_kubernetes.picker.picker import Picker
from penstock_kubernetes.picker_settings import GatewayKind, PickerSettings
from tests.frontend.stand import Stand, eventually, stand
from tests.kubernetes.programs import program


class Gateway:
    """The gateway's process, and the picker that it asks."""

    def __init__(self, kind: GatewayKind, found: Stand, folder: Path, port: int, log: Path) -> None:
        self.kind: GatewayKind = kind
        self.stand = found
        self.folder = folder
        self.http = aiohttp.ClientSession(base_url=f"http://127.0.0.1:{port}")
        self.port = port
        self.picker = Picker(found.service)
        self.listener = GatewayListener(self.picker, kind)
        self.process: subprocess.Popen[bytes] | None = None
        self.log = log

    async def start(self, failure: Literal["open", "close"]) -> None:
        """Start the picker, write the gateway's config, and start the gateway."""
        await self.listener.start(0)
        name, _ = workers_file(self.kind, [])
        await eventually(lambda: (self.folder / name).exists())
        options = GatewayOptions(f"127.0.0.1:{self.port}", failure, "a test")
        for file, text in rendered(self.kind, self.stand.service.settings, options).items():
            (self.folder / file).write_text(text)
        if self.kind == "nginx":
            words = ["-p", str(self.folder), "-c", "nginx.conf", "-g", "daemon off;"]
        else:
            words = ["-db", "-f", str(self.folder / "haproxy.cfg"), "-f", str(self.folder / "workers.cfg")]
        self.process = await asyncio.to_thread(self.launch, [str(program(self.kind)), *words])
        await self.answering()

    def launch(self, words: list[str]) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=log)

    async def answering(self) -> None:
        async with asyncio.timeout(10):
            while True:
                try:
                    async with self.http.get("/health") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        await self.http.close()
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(self.process.wait, 10)
        await self.listener.close()

    async def chat(self, text: str = "hello", headers: dict[str, str] | None = None, **more: Any) -> Any:
        """Post a chat; the answer is read."""
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
        async with self.http.post("/v1/chat/completions", json=body, headers=headers or {}) as answer:
            await answer.read()
            return answer

    def count(self, event: str) -> float:
        """Return how often an event of the picker was counted."""
        return float(self.stand.service.metrics.picker_events.of(event).value)

    def served(self) -> dict[str, int]:
        """Return how many requests each engine had."""
        return {engine.name: len(engine.bodies) for engine in self.stand.engines}


def chosen(found: Gateway) -> dict[str, str]:
    """Return the worker of each decision, by request: what `penstock explain` shows."""
    return {one["request"]: one["chosen"][0] for one in map(json.loads, map(bytes, found.stand.decisions))}


async def ended(found: Gateway, count: int) -> list[Any]:
    """Wait for so many records."""
    await eventually(lambda: len(found.stand.records) >= count)
    return found.stand.records


@asynccontextmanager
async def gateway(
    kind: GatewayKind, engines: int = 2, *, failure: Literal["open", "close"] = "open", **more: Any
) -> AsyncIterator[Gateway]:
    """Start everything; fields of `ClusterSettings` by keyword."""
    program(kind)  # skips where it is missing
    # Short, for a socket's path; and open to the user to which a gateway changes.
    folder = await asyncio.to_thread(_open_folder)
    models = {"m": ModelSettings(tokenizer=None, pools={"main": PoolSettings()})}
    settings = ClusterSettings(models=models, picker=PickerSettings(kind=kind, folder=str(folder)))
    settings = msgspec.structs.replace(settings, **more)
    try:
        async with stand(engines, settings=settings) as found:
            running = Gateway(kind, found, folder, free_port(), folder / "log")
            try:
                await running.start(failure)
                yield running
            finally:
                await running.stop()
    finally:
        shutil.rmtree(folder)


async def breaks_off(request: web.Request) -> web.StreamResponse:
    """Begin an answer, as an engine that dies in mid-stream."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n')
    assert request.transport is not None
    request.transport.abort()
    return response


def _open_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    folder.chmod(0o755)
    return folder
