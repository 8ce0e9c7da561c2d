"""What do clients see when an engine is killed with -9 under load? Nothing: streams go on, new requests are served."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.live.cluster import Served, alive
from tests.vllm.asking import Answer, ask, asking, chat, completion, events, path_of, take
from tests.vllm.children.conftest import WORKERS
from tests.vllm.load import Prompts, drive
from tests.vllm.waiting import comes_back, eventually

LONG = 800
"""Output tokens of the streams that are cut: some seconds."""
EARLY = 20
"""Chunks that each of them has had when its engine is killed..."""
LATE = LONG // 2
"""... and has at most had: none is about to end."""

STREAMS: dict[str, dict[str, Any]] = {
    "text": completion("Tell me of the sea", LONG),
    "chat": chat("Tell me of the land", LONG, ignore_eos=True),
    "token ids": completion(list(range(400, 480)), LONG),
    "ids returned": completion("Tell me of the sky", LONG, return_token_ids=True),
}


@dataclass
class Watched:
    """A stream that is read while things happen."""

    answer: Answer
    task: asyncio.Task[None] | None = None


async def test_a_killed_engine_costs_nobody_an_answer(cluster: Served) -> None:
    status = cluster.get("/admin/status")[1]
    restarts = {worker["id"]: worker["epoch"] for worker in status["workers"]}
    pids = {worker["id"]: worker["pid"] for worker in status["workers"]}
    victim, survivor = WORKERS
    prompts = Prompts(seed=41, families=10)
    ended = asyncio.Event()
    async with asking() as http:
        undisturbed = {name: await ask(http, cluster.url, body, stream=True) for name, body in STREAMS.items()}
        watched: dict[str, Watched] = {}
        bystanders: list[tuple[str, Watched]] = []
        killed = asyncio.Event()

        async def keep_streaming(name: str, body: dict[str, Any]) -> None:
            """Have a stream on the victim: where it is done before the others have begun, the next one begins."""
            while not killed.is_set():
                *others, watched[name] = await begin(http, cluster, body, victim)
                bystanders.extend((name, other) for other in others)
                task = watched[name].task
                assert task is not None
                await task
                if not killed.is_set():
                    bystanders.append((name, watched[name]))

        streaming = [asyncio.create_task(keep_streaming(name, body)) for name, body in STREAMS.items()]
        load = asyncio.create_task(drive(http, cluster.url, endless(prompts, ended), concurrency=3, pause=0.2))
        waiting = [asyncio.create_task(ask(http, cluster.url, completion(f"Unary {i}", 150))) for i in range(4)]
        family = descendants(pids[victim])
        async with asyncio.timeout(120):
            while len(watched) < len(STREAMS) or not all(
                EARLY <= one.answer.chunks <= LATE for one in watched.values()
            ):
                await asyncio.sleep(0.005)
        os.kill(pids[victim], signal.SIGKILL)
        killed.set()
        at_the_kill = {name: one.answer.text for name, one in watched.items()}
        assert not any(one.answer.finish_reason for one in watched.values()), "they must have been running"

        for name, one in watched.items():
            assert one.task is not None
            await asyncio.wait_for(one.task, 60)
            check_whole(name, one.answer, undisturbed[name], at_the_kill[name])
            explained = cluster.get(f"/admin/explain/{one.answer.headers['x-penstock-request-id']}")[1]["request"]
            assert [leg["target"][0] for leg in explained["legs"]] == [victim, survivor], explained
            assert explained["outcome"] == "ok" and explained["isl"] == one.answer.prompt_tokens
            assert explained["osl"] == LONG
        await asyncio.gather(*streaming)
        for name, one in bystanders:
            assert one.task is not None
            await asyncio.wait_for(one.task, 60)
            assert one.answer.text == undisturbed[name].text and one.answer.done, name
        for answer in await asyncio.gather(*waiting):
            assert answer.status == 200 and answer.output_tokens == 150, answer.error

        # Nothing of the killed engine stays behind, and it comes back by itself.
        await eventually(lambda: not any(alive(pid) for pid in family), 30.0, lambda: str(family))
        again = await comes_back(cluster, victim, restarts[victim])
        assert again["pid"] not in family
        served = await ask(http, cluster.url, completion("Back?", 8), headers={"x-penstock-worker": victim})
        assert served.status == 200 and served.worker == victim
        ended.set()
        answers = await load
    assert [a for a in answers if a.status != 200 or a.error or a.finish_reason is None] == []
    assert {a.worker for a in answers} >= {survivor}
    epochs = {worker["id"]: worker["epoch"] for worker in cluster.get("/admin/status")[1]["workers"]}
    assert epochs[survivor] == restarts[survivor]
    assert f"{victim} was killed by SIGKILL" in cluster.text


def check_whole(name: str, answer: Answer, undisturbed: Answer, at_the_kill: str) -> None:
    """One stream, as if nothing had happened."""
    assert answer.status == 200 and answer.error is None and answer.done, (name, answer.error)
    assert answer.finish_reason == "length", name
    assert answer.usage is not None and answer.output_tokens == LONG, (name, answer.usage)
    assert answer.prompt_tokens == undisturbed.prompt_tokens, f"{name}: the prompt as the client sent it"
    assert at_the_kill and undisturbed.text.startswith(at_the_kill), f"{name}: up to the kill"
    assert answer.text.startswith(at_the_kill) and len(answer.text) > len(at_the_kill), f"{name}: and on from there"
    assert len(answer.token_ids) == (LONG if name == "ids returned" else 0), name


async def begin(http: aiohttp.ClientSession, cluster: Served, body: dict[str, Any], worker: str) -> list[Watched]:
    """Start streams until one is on a worker; return all, that one last. A pin there would have to be obeyed."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    begun: list[Watched] = []
    while len(begun) < 12:
        response = await http.post(cluster.url + path_of(body), json=body)
        begun.append(Watched(Answer(response.status, {k.lower(): v for k, v in response.headers.items()})))
        begun[-1].task = asyncio.create_task(_read(response, begun[-1].answer))
        if begun[-1].answer.worker == worker:
            return begun
    raise AssertionError(f"the router never chose {worker}")


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    async with response:
        async for event in events(response):
            take(answer, event)


def endless(prompts: Prompts, ended: asyncio.Event) -> Iterator[dict[str, Any]]:
    while not ended.is_set():
        yield completion(prompts.next(), prompts.output())


def descendants(pid: int) -> set[int]:
    """Return a process and all below it."""
    found, waiting = {pid}, [pid]
    while waiting:
        parent = waiting.pop()
        for task in Path(f"/proc/{parent}/task").iterdir():
            for child in (task / "children").read_text().split():
                found.add(int(child))
                waiting.append(int(child))
    return found
