"""Two vLLM servers that somebody else started, and `penstock attach` before them.

The first is the shared one: it has a LoRA adapter and tells every pass through our plug-in. The second knows nothing of
Penstock, and is ended by the last file. The files run in the order of their names; what they leave in the servers'
caches is of no matter to the next.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, served
from tests.vllm.observer import Observer
from tests.vllm.server import VllmServer, events_config
from tests.vllm.truth import Truth

WORKERS = ("attached-0", "attached-1")
SHUTDOWN_TIMEOUT = 30
"""Seconds that the second, when it was told to end, lets its requests run."""


@pytest.fixture(scope="package")
def servers(
    shared: VllmServer, venv: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, VllmServer]]:
    flags = ["--kv-events-config", events_config("kv@plain"), "--scheduling-policy", "priority"]
    flags += ["--shutdown-timeout", str(SHUTDOWN_TIMEOUT)]
    plain = VllmServer(venv, checkpoint, free_port(), tmp_path_factory.mktemp("plain") / "vllm.log", flags=flags)
    try:
        for server in (shared, plain):
            server.wait_ready()
        yield shared, plain
    finally:
        plain.stop()


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
