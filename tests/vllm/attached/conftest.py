"""Two vLLM servers that somebody else started, and `penstock attach` before them.

The first has a LoRA adapter and tells every pass through our plug-in, the second knows nothing of Penstock. The files
run in the order of their names; what they leave in the servers' caches is of no matter to the next, and the last one
ends a server.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.adapters.engine_ports import free_port
from tests.live.cluster import Served, served
from tests.vllm.observer import Observer
from tests.vllm.server import ADAPTER, RANK, VllmServer, events_config
from tests.vllm.truth import Truth

WORKERS = ("attached-0", "attached-1")
SHUTDOWN_TIMEOUT = 30
"""Seconds that a server which was told to end lets its requests run."""


@pytest.fixture(scope="package")
def servers(
    venv: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, VllmServer]]:
    folder = tmp_path_factory.mktemp("servers")
    started: list[VllmServer] = []
    try:
        adapter = ["--enable-lora", "--lora-modules", f"{ADAPTER}={checkpoint / ADAPTER}", "--max-lora-rank", str(RANK)]
        for name, told, stats in (
            ("a", ["--enable-logging-iteration-details", *adapter], f"tcp://127.0.0.1:{free_port()}"),
            ("b", [], None),
        ):
            flags = ["--kv-events-config", events_config(f"kv@{name}"), "--scheduling-policy", "priority"]
            flags += ["--shutdown-timeout", str(SHUTDOWN_TIMEOUT), *told]
            log = folder / f"{name}.log"
            started.append(VllmServer(venv, checkpoint, free_port(), log, flags=flags, stats=stats))
        for server in started:
            server.wait_ready()
        yield started[0], started[1]
    finally:
        for server in started:
            server.terminate()
        for server in started:
            server.stop()


@pytest.fixture(scope="package")
def front(
    servers: tuple[VllmServer, VllmServer], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The frontend. It expects nothing but what it heard (no predictions), and sends nothing of its own (no canary)."""
    urls = [server.url for server in servers]
    arguments = ["attach", *urls, "--tokenizer", str(checkpoint), "--frontend.port", str(free_port())]
    arguments += ["--stats", f"{servers[0].url}={servers[0].stats}"]
    arguments += [
        "--canary.idle",
        "0",
        "--router.index.predicted_ttl",
        "0",
    ]  # and its port is fixed: one that is killed comes back there
    with served(tmp_path_factory.mktemp("attach"), *arguments) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def observer(front: Served) -> Iterator[Observer]:
    found = Observer(front.run)
    yield found
    found.close()


@pytest.fixture(scope="package")
def truths(servers: tuple[VllmServer, VllmServer]) -> dict[str, Truth]:
    """Of each worker; they know what was announced up to the last `Truth.catch_up`."""
    return {worker: Truth(server) for worker, server in zip(WORKERS, servers, strict=True)}
