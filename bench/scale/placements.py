"""What frontends tell each other of requests: messages, bytes and CPU, by the event planes that there are.

Each frontend is a process with a router, its replica sync and its plane, and requests that end in a moment. What the
telling costs is the difference between four of them and one alone that routes as many of its own. Called by
membership.py.
"""

import asyncio
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from penstock.adapters.planes.nats_plane import NatsPlane
from penstock.adapters.planes.zmq_plane import ZmqPlane
from penstock.adapters.stores.sqlite_store import SqliteStore
from penstock.adapters.task_cancel import cancel_all
from penstock.config.settings.discovery_settings import NatsSettings
from penstock.kernel.values import Prompt, RequestId
from penstock.router.events import Arrived, Closed, Dispatch, Finished, FirstToken, OperatorNote, WorkerJoined
from penstock.router.router import Router
from penstock.router.settings import RouterSettings
from penstock.runtime.cluster_state.placement_sync import FrontendCard, PlacementSync
from penstock.runtime.live_driver import LiveDriver
from penstock.testing.router_world import BLOCK, MODEL, card
from tests.servers import Nats

FRONTENDS = 4
WORKERS = 100
RATE = 100
"""Requests per second of each frontend."""
TAKES = 0.3
SECONDS = 5.0
CELLS = ((1_000, False), (1_000, True), (100_000, False))
"""Tokens of prompts, and whether they come all at once each second."""


class Telling(NamedTuple):
    """What one frontend's requests cost; ``heard``: of the others' requests, those that it came to know."""

    plane: str
    tokens: int
    at_once: bool
    messages: float
    """To each other frontend per request..."""
    bytes: float
    per_second: float
    """... and bytes per second to all of them."""
    alone_ms: float
    """CPU per own request, where there is no other frontend..."""
    ms: float
    """... and where there are."""
    heard: float


def frontend(plane: str, where: str, folder: Path, number: int, tokens: int, at_once: bool, parent: Connection) -> None:
    """Route requests for a while, once told to, and answer with what that took."""

    async def run() -> None:
        name = f"f{number}"
        store = SqliteStore(folder)
        ours: Any = ZmqPlane(name) if plane == "zmq" else NatsPlane(name, NatsSettings(urls=(where,)))
        router = Router(RouterSettings(), name=name, seed=number)
        router.shared = True
        live = LiveDriver({"router": router})
        live.on(OperatorNote, lambda now, sender, effect: None)
        live.on(Closed, lambda now, sender, effect: None)

        def sent(dispatch: Dispatch) -> None:
            live.post("router", FirstToken(id=dispatch.id, attempt=dispatch.attempt))
            ended = Finished(id=dispatch.id, attempt=dispatch.attempt, tokens=100)
            asyncio.get_running_loop().call_later(TAKES, live.post, "router", ended)

        live.on(Dispatch, lambda now, sender, effect: asyncio.get_running_loop().call_soon(sent, effect))
        for worker in range(WORKERS):
            live.post("router", WorkerJoined(card=card(f"w-{worker}", kv_blocks=1 << 20)))
        told, count = [0, 0], [0]
        send, post = ours.send, live.post

        def counted(topic: str, payload: bytes) -> None:
            told[0] += 1
            told[1] += len(payload)
            send(topic, payload)

        def heard(machine: str, event: Any) -> None:
            count[0] += getattr(getattr(event, "placement", None), "step", "") == "placed"
            post(machine, event)

        ours.send = counted
        url = f"http://10.0.0.1:{number}"
        entry = FrontendCard(
            id=name, url=url, admin_url=url, pid=os.getpid(), plane=getattr(ours, "endpoint", ""), run=""
        )
        sync = PlacementSync(store, live, ours, entry, ttl=60.0)
        await sync.announce()
        following = asyncio.create_task(sync.run())
        rng = random.Random(number)
        prompts = [[rng.getrandbits(64) for _ in range(tokens // BLOCK)] for _ in range(20)]
        parent.send(None)
        others = await asyncio.to_thread(parent.recv)
        while len(sync.cards) < others:  # noqa: ASYNC110 - nothing says so
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # connections are made
        parent.send(None)
        await asyncio.to_thread(parent.recv)
        live.post = heard  # type: ignore[method-assign]
        told[:] = 0, 0
        requests, began, spent = 0, time.monotonic(), time.process_time()
        while (now := time.monotonic() - began) < SECONDS:
            due = RATE * int(now + 1) if at_once else int(RATE * now)
            while requests < due:
                requests += 1
                blocks = prompts[requests % len(prompts)]
                prompt = Prompt(tokens, blocks)
                post("router", Arrived(id=RequestId(f"{number:04x}{requests:012x}"), model=MODEL, prompt=prompt))
            await asyncio.sleep(0.01)
        await asyncio.sleep(2 * TAKES)
        parent.send((requests, *told, time.process_time() - spent, count[0]))
        await asyncio.to_thread(parent.recv)
        await cancel_all([following])
        await ours.close()
        await store.close()
        live.close()

    asyncio.run(run())


def told(plane: str, where: str, frontends: int, tokens: int, at_once: bool) -> list[tuple[float, ...]]:
    """Return, by frontend: requests, messages, bytes, seconds of CPU, requests of others that it heard of."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="penstock-placements-", ignore_cleanup_errors=True) as folder:
        pipes, processes = [], []
        for number in range(frontends):
            ours, theirs = context.Pipe()
            arguments = (plane, where, Path(folder), number, tokens, at_once, theirs)
            processes.append(context.Process(target=frontend, args=arguments, daemon=True))
            pipes.append(ours)
        for process in processes:
            process.start()
        for go in (frontends - 1, None):
            for pipe in pipes:
                pipe.recv()
            for pipe in pipes:
                pipe.send(go)
        found = [pipe.recv() for pipe in pipes]
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send("end")
            process.join(10)
        return found


def measured() -> list[Telling]:
    """Return what is told on each plane that is there."""
    rows = [telling("zmq", "", tokens, at_once) for tokens, at_once in CELLS]
    if shutil.which("nats-server") is not None:
        with tempfile.TemporaryDirectory(prefix="penstock-nats-") as folder:
            nats = Nats(Path(folder))
            nats.start()
            try:
                rows += [telling("nats", nats.url, tokens, at_once) for tokens, at_once in CELLS]
            finally:
                nats.kill()
    return rows


def telling(plane: str, where: str, tokens: int, at_once: bool) -> Telling:
    """Return what four frontends tell each other, beside one alone."""
    alone = told(plane, where, 1, tokens, at_once)
    found = told(plane, where, FRONTENDS, tokens, at_once)
    requests, messages, size, spent, heard = (sum(each) for each in zip(*found, strict=True))
    fan = FRONTENDS - 1 if plane == "zmq" else 1  # a broker takes a message once
    row = Telling(
        plane,
        tokens,
        at_once,
        messages / requests,
        size / requests,
        fan * size / FRONTENDS / SECONDS,
        1e3 * alone[0][3] / alone[0][0],
        1e3 * spent / requests,
        heard / (requests * (FRONTENDS - 1)),
    )
    print(*row, file=sys.stderr, flush=True)
    return row
