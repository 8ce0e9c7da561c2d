"""Do the blocks of docs/guides/vendor-clients.md run as they stand? Addresses alone are others here."""

import asyncio
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from aiohttp import web

from penstock.adapters.listen_address import free_port
from tests.extras.image_engine import ImageEngine
from tests.extras.video_engine import VideoEngine
from tests.frontend.test_overflow_clients import client
from tests.live.cluster import Served, served

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/vendor-clients.md"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTSIDE = ("gpu1:9000", "gpu2:9000")
"""Addresses of servers that a reader has."""
MODEL = "MODEL"


class Snippet(NamedTuple):
    """A block of the page, and the command line that starts what it talks to."""

    heading: str
    text: str
    command: str


def page() -> tuple[list[str], list[Snippet]]:
    """Return the page's command lines, and its Python: each for the command of its section, else for the first."""
    commands: list[str] = []
    snippets: list[Snippet] = []
    for section in re.split(r"^(?=## )", PAGE.read_text(), flags=re.MULTILINE):
        heading, mine = section.splitlines()[0].strip("# "), commands[0] if commands else ""
        for kind, text in BLOCK.findall(section):
            if kind == "bash":
                mine = text.strip()
                commands.append(mine)
            else:
                snippets.append(Snippet(heading, text, mine))
    return commands, snippets


COMMANDS, SNIPPETS = page()


class DoneAtOnce(VideoEngine):
    """Its videos are ready when somebody looks."""

    def _job(self, request: web.Request) -> dict[str, object]:
        job = super()._job(request)
        job["status"] = "completed"
        return job


@contextmanager
def diffusion_server() -> Iterator[str]:
    """Run a server of videos, images and files in a thread; gives its address."""
    videos, images, loop, port = DoneAtOnce("e"), ImageEngine("e"), asyncio.new_event_loop(), free_port()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def start() -> web.AppRunner:
        app = web.Application()
        videos.add_routes(app)
        images.add_routes(app)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


class Started(NamedTuple):
    """A cluster, and the page's addresses with what stands for them here."""

    cluster: Served
    addresses: dict[str, str]


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Started]]:
    """Start each command of the page when the first block needs it."""
    started: dict[str, Started] = {}
    with ExitStack() as stack:

        class Lazily(dict[str, Started]):
            def __missing__(self, command: str) -> Started:
                program, *words = shlex.split(command)
                assert program == "penstock"
                addresses = {each: stack.enter_context(diffusion_server()) for each in OUTSIDE if each in command}
                options = dict(pairwise(words))
                port, own = options.get("--frontend.port", "8000"), str(free_port())
                addresses[f"127.0.0.1:{port}"] = f"127.0.0.1:{own}"
                grpc = options.get("--frontend.grpc_port")
                if grpc is not None:
                    addresses[f"127.0.0.1:{grpc}"] = f"127.0.0.1:{free_port()}"
                here = {port: own, grpc: addresses.get(f"127.0.0.1:{grpc}", ":").rpartition(":")[2]}
                words = [here.get(word, replaced(word, addresses)) for word in words]
                words += [] if "--frontend.port" in words else ["--frontend.port", own]
                folder = tmp_path_factory.mktemp("cluster")
                self[command] = Started(stack.enter_context(served(folder, *words)), addresses)
                return self[command]

        yield Lazily(started)


def replaced(text: str, addresses: dict[str, str]) -> str:
    for written, here in addresses.items():
        text = text.replace(written, here)
    return text


def test_the_page_has_blocks_and_each_command_has_one_that_needs_it() -> None:
    assert len(SNIPPETS) >= 8
    assert {snippet.command for snippet in SNIPPETS} == set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS, ids=[f"{n}-{each.heading[:24]}" for n, each in enumerate(SNIPPETS)])
def test_a_block_runs_as_it_stands(snippet: Snippet, clusters: dict[str, Started], tmp_path: Path) -> None:
    for package in re.findall(r"^(?:from|import) ([\w.]+)", snippet.text, re.MULTILINE):
        client(package)
    started = clusters[snippet.command]
    program = replaced(snippet.text, started.addresses)
    assert not re.search(r"127\.0\.0\.1:80\d\d\b", program), "an address that no command of the page gives"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{program}\n{done.stdout}{done.stderr}"
    if "print(" in program:
        assert done.stdout.strip()
    assert started.cluster.get("/admin/status")[1]["requests"]["ok"] >= 1
