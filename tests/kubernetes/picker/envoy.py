"""A real Envoy before scripted engines, with a picker in this process: how the tests of ext_proc see both ends."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.kernel.values import JsonObject
from penstock_kubernetes.picker.envoy_config import EnvoyPlan, envoy_config
from penstock_kubernetes.picker.ext_proc_listener import ExtProcListener
from penstock_kubernetes.picker.picker import Picker
from tests.frontend.stand import Stand, stand
from tests.kubernetes.programs import program
from tests.servers import free_ports

PATIENCE = 20.0
EXTENSION = {"request_body_mode": "FULL_DUPLEX_STREAMED", "response_body_mode": "FULL_DUPLEX_STREAMED"}
"""The modes of a gateway of the Gateway API Inference Extension, which are not those that we render."""


class Envoy:
    """One that runs."""

    def __init__(self, folder: Path, config: JsonObject, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "envoy.log"
        path = folder / f"envoy-{port}.json"
        path.write_text(json.dumps(config))
        words = [str(program("envoy")), "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)

    async def ready(self, admin: int) -> "Envoy":
        async with aiohttp.ClientSession() as http, asyncio.timeout(PATIENCE):
            while True:
                assert self.process.poll() is None, self._log.read_text()[-3000:]
                try:
                    async with http.get(f"http://127.0.0.1:{admin}/ready") as answer:
                        if answer.status == 200:
                            return self
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class GatewayStand:
    """Envoy, a picker and engines."""

    def __init__(self, found: Stand, listener: ExtProcListener, envoy: Envoy, http: aiohttp.ClientSession) -> None:
        self.found, self.listener, self.envoy, self.http = found, listener, envoy, http

    @property
    def picker(self) -> Picker:
        return self.listener.picker

    async def chat(self, text: str = "hello", headers: dict[str, str] | None = None, **more: Any) -> Any:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers or {})

    def worker_at(self, endpoint: str) -> str:
        return next(engine.name for engine in self.found.engines if engine.url.endswith(endpoint))

    def place(self, worker: str) -> str:
        return next(engine.url for engine in self.found.engines if engine.name == worker).removeprefix("http://")


def patched(config: JsonObject, **fields: Any) -> JsonObject:
    """Return a configuration whose ext_proc filter has these fields; ``mode``: of its processing mode."""
    filter = filters_of(config)[0]["typed_config"]
    filter["processing_mode"] |= fields.pop("mode", {})
    filter |= fields
    return config


def filters_of(config: JsonObject) -> list[JsonObject]:
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return manager["http_filters"]


def with_picker(settings: ClusterSettings | None = None, **fields: Any) -> ClusterSettings:
    """Return settings of one model, with a picker for Envoy at any free port."""
    base = settings or ClusterSettings(models={"m": ModelSettings(tokenizer=None, pools={"main": PoolSettings()})})
    fields = {"kind": "envoy", "listen_port": 0, "tls": False, **fields}
    return msgspec.structs.replace(base, picker=msgspec.structs.replace(base.picker, **fields))


@asynccontextmanager
async def envoy_stand(
    folder: Path,
    count: int = 2,
    *,
    fallbacks: bool = True,
    tls: bool = False,
    watch_answers: bool = True,
    fail_open: bool = False,
    mode: dict[str, str] | None = None,
    filters: int = 1,
    extra: Sequence[str] = (),
    settings: ClusterSettings | None = None,
) -> AsyncIterator[GatewayStand]:
    """Start all of it.

    Args:
        fallbacks: Envoy knows the engines; else it reaches what the header names.
        filters: how often the ext_proc filter stands in Envoy's chain.
        extra: more engines that Envoy knows, as ``host:port``.
    """
    program("envoy")
    base = with_picker(settings, tls=tls, fallbacks=2 if fallbacks else 0)
    async with stand(count, settings=base) as found:
        listener = ExtProcListener(Picker(found.service))
        await listener.start(0)
        port, admin = free_ports(2)
        engines = [engine.url.removeprefix("http://") for engine in found.engines] + list(extra)
        plan = EnvoyPlan(
            listen=f"127.0.0.1:{port}",
            pickers=[listener.address],
            engines=engines if fallbacks else (),
            tls=tls,
            watch_answers=watch_answers,
            fail_open=fail_open,
            admin=f"127.0.0.1:{admin}",
        )
        config = patched(envoy_config(plan), mode=mode or {})
        chain = filters_of(config)
        chain[:1] = [{**chain[0], "name": f"ext_proc-{number}"} for number in range(filters)]
        envoy = Envoy(folder, config, port)
        http = aiohttp.ClientSession(base_url=envoy.url)
        try:
            await envoy.ready(admin)
            yield GatewayStand(found, listener, envoy, http)
        finally:
            await http.close()
            envoy.kill()
            await listener.close()
