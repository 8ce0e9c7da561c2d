"""What does a cluster do in a storm? Load of every kind, while engines, a frontend, events and clients go at random.

usage: python -m tests.soak.storm [SECONDS] [--docs docs/bench/soak.md]

It starts a cluster of two frontends and four simulated engines, storms for so many seconds, lets it calm down, and
holds what clients saw against what the cluster wrote down. `Finding`s are what must not be; the table is what was.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from penstock.adapters.listen_address import free_port
from penstock_lab.report.markdown import write_part
from tests.live.cluster import Served, post
from tests.soak.caches import disagreements, tasks_of

CLIENTS = 24
TOPICS = 40
"""Different beginnings of prompts: enough to fill the engines' caches, so that they evict."""
AROUND_KILL = 2.5
"""Seconds around the end of a frontend in which its clients may see a broken connection, and its last records go."""
FULL = 220.0
"""MiB that a frontend may come to before growth counts: 20 minutes of storm lead to 165, where it stays. Three minutes
end on the way there, so that growth below this says nothing."""
CALM = 7.0
"""Seconds after the storm until predictions have faded and every event gap is filled."""


@dataclass
class Asked:
    """One request as its client saw it."""

    id: str
    body: dict[str, Any]
    end: str
    """whole, left (by the client), told (a typed error) or cut."""
    at: float
    text: str = ""
    reason: str = ""


@dataclass
class Storm:
    """The books of one run."""

    url: str
    seed: int
    asked: list[Asked] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    engine_kills: int = 0
    faults: int = 0
    frontend_kills: list[float] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the start, MiB) of the frontend that lives through it."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.number = 0

    # --- clients ----------------------------------------------------------------------------------------------------

    def request(self, rng: random.Random) -> dict[str, Any]:
        tokens = rng.choice((1, 8, 30, 30, 120, 400))
        topic = rng.randrange(TOPICS)
        text = f"topic {topic} " * rng.choice((20, 150)) + f"question {rng.random()}"
        body: dict[str, Any] = {"model": "sim", "max_tokens": tokens, "temperature": 0}
        if rng.random() < 0.5:
            body["ignore_eos"] = True
        if rng.random() < 0.7:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
            body["ignore_eos"] = True
        if rng.random() < 0.75:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    async def client(self, http: aiohttp.ClientSession, seed: int, until: float) -> None:
        rng = random.Random(seed)
        while time.monotonic() < until:
            self.number += 1
            self.asked.append(await self.one(http, self.request(rng), f"soak-{self.seed}-{self.number}", rng))

    async def one(self, http: aiohttp.ClientSession, body: dict[str, Any], id: str, rng: random.Random) -> Asked:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        leave = rng.randrange(1, 12) if body.get("stream") and rng.random() < 0.15 else None
        try:
            async with http.post(self.url + path, json=body, headers={"x-request-id": id}) as answer:
                if answer.status != 200:
                    said = (await answer.json())["error"]
                    return Asked(id, body, "told", time.monotonic(), reason=f"{answer.status} {said['message']}")
                if not body.get("stream"):
                    return self.judged(id, body, [await answer.json(), "[DONE]"])
                events: list[Any] = []
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        raw = line[6:].strip()
                        events.append("[DONE]" if raw == b"[DONE]" else json.loads(raw))
                        if leave is not None and len(events) >= leave:
                            return Asked(id, body, "left", time.monotonic())
                return self.judged(id, body, events)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Asked(id, body, "cut", time.monotonic(), reason=f"{type(error).__name__}: {error}")

    def judged(self, id: str, body: dict[str, Any], events: list[Any]) -> Asked:
        """Hold an answer that came to its end against what was asked."""
        now = time.monotonic()
        if not events or events[-1] != "[DONE]":
            error = events[-1].get("error") if events and isinstance(events[-1], dict) else None
            if error is None:
                return Asked(id, body, "cut", now, reason="the stream ended without its end mark")
            return Asked(id, body, "told", now, reason=str(error["message"]))
        chunks = [event for event in events if isinstance(event, dict)]
        usage = [event["usage"] for event in chunks if event.get("usage")]
        text = "".join(_words(choice) for event in chunks for choice in event["choices"])
        if events.count("[DONE]") != 1 or len(usage) != 1:
            self.wrong.append(f"{id}: {events.count('[DONE]')} end marks, {len(usage)} times usage")
        elif body.get("ignore_eos") and usage[0]["completion_tokens"] != body["max_tokens"]:
            self.wrong.append(f"{id}: {usage[0]['completion_tokens']} tokens instead of {body['max_tokens']}")
        if len({event["id"] for event in chunks}) != 1:
            self.wrong.append(f"{id}: one stream spoke with several ids")
        return Asked(id, body, "whole", now, text)

    # --- the storm --------------------------------------------------------------------------------------------------

    async def kill_engines(self, http: aiohttp.ClientSession, until: float) -> None:
        while time.monotonic() < until:
            await asyncio.sleep(self.rng.uniform(1.0, 5.0))  # the moment itself is what is random here
            status = await self.status(http)
            ready = [worker["pid"] for worker in status.get("workers", ()) if worker["state"] == "ready"]
            # One that was killed just before may still be listed: two that really run, so that one is left to serve.
            alive = [pid for pid in ready if runs(pid)]
            if len(alive) > 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.rng.choice(alive), signal.SIGKILL)
                    self.engine_kills += 1

    async def spoil_events(self, http: aiohttp.ClientSession, until: float) -> None:
        kinds = ("drop_events", "reorder_events", "repeat_events")
        while time.monotonic() < until:
            await asyncio.sleep(self.rng.uniform(0.5, 3.0))
            workers = (await self.status(http)).get("workers", ())
            if not workers:
                continue
            fault = {"kind": self.rng.choice(kinds), "count": self.rng.randrange(1, 6)}
            try:
                async with http.post(self.rng.choice(workers)["url"] + "/fault", json=fault) as answer:
                    self.faults += answer.status == 200
            except (aiohttp.ClientError, OSError):
                continue  # it was killed just then

    async def kill_a_frontend(self, pid_of: Any, until: float, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            if time.monotonic() >= until:
                return
            self.frontend_kills.append(time.monotonic())
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(pid_of(1), signal.SIGKILL)

    async def watch_memory(self, pid: int, until: float) -> None:
        started = time.monotonic()
        while time.monotonic() < until:
            self.memory.append((time.monotonic() - started, rss(pid)))
            await asyncio.sleep(1.0)

    async def status(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        try:
            async with http.get(self.url + "/admin/status") as answer:
                found: dict[str, Any] = await answer.json() if answer.status == 200 else {}
                return found
        except (aiohttp.ClientError, OSError, ValueError):
            return {}

    async def rage(self, seconds: float, pid_of: Any) -> None:
        """Let everything loose for so long."""
        until = time.monotonic() + seconds
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            await asyncio.gather(
                *(self.client(http, self.seed * 1000 + number, until) for number in range(CLIENTS)),
                self.kill_engines(http, until),
                self.spoil_events(http, until),
                self.kill_a_frontend(pid_of, until, max(20.0, seconds / 8)),
                self.watch_memory(pid_of(0), until),
            )

    # --- afterwards -------------------------------------------------------------------------------------------------

    def excused(self, at: float) -> bool:
        """Whether a frontend was killed at about that time."""
        return any(kill - AROUND_KILL <= at <= kill + AROUND_KILL for kill in self.frontend_kills)

    async def probe(self, count: int) -> tuple[int, list[str]]:
        """Ask single workers for prompts of the storm: is what we think they hold what they hold?"""
        rng = random.Random(self.seed)
        wrong: list[str] = []
        hits = 0
        async with aiohttp.ClientSession() as http:
            workers = [worker["id"] for worker in (await self.status(http))["workers"]]
            known = [asked.body for asked in self.asked[-400:] if asked.end == "whole"]
            for _ in range(count):
                old = rng.choice(known)
                body = {name: value for name, value in old.items() if not name.startswith("stream")} | {"max_tokens": 1}
                worker = rng.choice(workers)
                path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
                # A new connection each time, so that every frontend process is asked.
                headers = {"x-penstock-worker": worker, "connection": "close"}
                async with http.post(self.url + path, json=body, headers=headers) as answer:
                    usage = (await answer.json())["usage"]
                    said = int(answer.headers["x-penstock-expected-cached-tokens"])
                held = usage["prompt_tokens_details"]["cached_tokens"]
                hits += held > 0
                if said != held:
                    wrong.append(f"{worker} was thought to hold {said} tokens of a prompt and held {held}")
        return hits, wrong

    async def again(self, count: int) -> list[str]:
        """Ask the calm cluster again for what was answered in the storm: the texts must be equal."""
        rng = random.Random(self.seed)
        whole = [asked for asked in self.asked if asked.end == "whole"]
        wrong: list[str] = []
        async with aiohttp.ClientSession() as http:
            for asked in rng.sample(whole, min(count, len(whole))):
                body = {name: value for name, value in asked.body.items() if not name.startswith("stream")}
                repeated = await self.one(http, body, f"{asked.id}-again", rng)
                if repeated.text != asked.text:
                    wrong.append(f"{asked.id} had another text in the storm")
        return wrong


def _words(choice: dict[str, Any]) -> str:
    part = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content")
    return part or ""


def runs(pid: int) -> bool:
    """Tell whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rss(pid: int) -> float:
    """Return a process's resident memory in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def frontend_pids(run: Path) -> dict[int, int]:
    """Return index -> pid of the frontends, from what they say in the discovery folder."""
    found: dict[int, int] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"penstock.frontend.frontend_process" in words and str(run).encode() in words:
                index = int(words[words.index(b"--index") + 1])
                if (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    found[index] = int(process.name)
    return found


def soak(seconds: float, folder: Path, seed: int = 1) -> tuple[dict[str, Any], list[str]]:
    """Run a storm; return what happened, by name, and the findings: what must not have happened."""
    arguments = ["up", "--frontend.port", str(free_port()), "--frontend.processes", "2"]
    sim = "models.sim.pools.main.sim"
    arguments += ["--set", f"{sim}.kv_blocks=600", "--set", f"{sim}.timing.speed_up=8"]
    # Every prompt is new, so a cache of this size is full before memory is first looked at, and must stay as it is.
    arguments += ["--set", "frontend.tokenize.cache_bytes=8388608"]
    cluster = Served(arguments, folder, {"PENSTOCK_SIM_FAULTS": "1"}).wait_up()
    try:
        pids = frontend_pids(cluster.run)
        start_files, start_tasks = files(pids[0]), asyncio.run(tasks_of(cluster.run, pids[0]))
        storm = Storm(cluster.url, seed)
        asyncio.run(storm.rage(seconds, lambda index: frontend_pids(cluster.run)[index]))
        wait_calm(cluster)
        hits, index_wrong = asyncio.run(storm.probe(120))
        text_wrong = asyncio.run(storm.again(60))
        blocks, cache_wrong = asyncio.run(disagreements(cluster.run))
        time.sleep(2.0)  # idle connections of ours are closed by now
        end_files, status = files(pids[0]), cluster.get("/admin/status")[1]
        end_tasks = asyncio.run(tasks_of(cluster.run, pids[0]))
        survived = frontend_pids(cluster.run).get(0) == pids[0]
    finally:
        cluster.stop()
    records = [json.loads(line) for path in cluster.run.glob("requests*.jsonl") for line in path.open()]
    happened, found = judge(storm, records, status, hits, index_wrong, text_wrong, (start_files, end_files), survived)
    happened["blocks in the engines' caches, and in each index"] = blocks
    happened["tasks of that frontend (start, end)"] = f"{start_tasks}, {end_tasks}"
    if end_tasks > start_tasks + 12:
        found.append(f"tasks grew from {start_tasks} to {end_tasks}")
    return happened, found + cache_wrong


def wait_calm(cluster: Served) -> None:
    """Wait until all workers are back and predictions have faded."""
    end = time.monotonic() + 90.0
    while time.monotonic() < end:
        status = cluster.get("/admin/status")[1]
        workers = status["workers"]
        if len(workers) == 4 and all(w["state"] == "ready" and w["breaker"] == "closed" for w in workers):
            break
        time.sleep(0.5)
    for worker in workers:
        post(f"{worker['url']}/fault", {"kind": "none"})
        # A lost message shows only when the next one comes.
        body = {"model": "sim", "prompt": f"calm {worker['id']} " * 80, "max_tokens": 1}
        post(f"{cluster.url}/v1/completions", body, {"x-penstock-worker": worker["id"]})
    time.sleep(CALM)


def judge(
    storm: Storm,
    records: list[dict[str, Any]],
    status: dict[str, Any],
    hits: int,
    index_wrong: list[str],
    text_wrong: list[str],
    descriptors: tuple[int, int],
    survived: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Hold the books against each other."""
    ends = Counter(asked.end for asked in storm.asked)
    found = list(storm.wrong) + index_wrong + text_wrong
    silent = [a for a in storm.asked if a.end == "cut" and not storm.excused(a.at)]
    found += [f"{a.id} ended without a word: {a.reason}" for a in silent]
    told = [a for a in storm.asked if a.end == "told"]
    found += [f"{a.id} was refused: {a.reason}" for a in told]
    closed = Counter(record["id"] for record in records)
    found += [f"{id} was closed {count} times" for id, count in closed.items() if count > 1]
    missing = [a for a in storm.asked if a.id not in closed and not storm.excused(a.at)]
    found += [f"{a.id} ({a.end}) has no end in the cluster's records" for a in missing]
    by_id = {record["id"]: record for record in records}
    for asked in storm.asked:
        record = by_id.get(asked.id)
        if record is not None and asked.end == "whole" and record["outcome"] != "ok":
            found.append(f"{asked.id} was whole for its client and {record['outcome']} for the cluster")
    moved = sum(len(record.get("legs", [])) > 1 for record in records)  # one that was never placed has none
    quarter = max(1, len(storm.memory) // 4)
    early = statistics.median(m for _, m in storm.memory[quarter : 2 * quarter])
    late = statistics.median(m for _, m in storm.memory[-quarter:])
    if late > 1.35 * early and late > FULL:
        found.append(f"the frontend's memory grew from {early:.0f} to {late:.0f} MiB")
    if descriptors[1] > descriptors[0] + 40:
        found.append(f"open files grew from {descriptors[0]} to {descriptors[1]}")
    if not survived:
        found.append("the frontend that nobody killed is not there any more")
    if status["requests"]["inflight"] or status["router_faults"]:
        found.append(f"{status['requests']['inflight']} requests and {status['router_faults']} faults are left")
    if not hits:
        found.append("no probe hit a cache: the index was not tested")
    happened = {
        "requests": len(storm.asked),
        "answered in full": ends["whole"],
        "left by their clients": ends["left"],
        "broken with their frontend": ends["cut"] - len(silent),
        "refused or broken otherwise": len(told) + len(silent),
        "engines killed": storm.engine_kills,
        "frontends killed": len(storm.frontend_kills),
        "faults of KV events": storm.faults,
        "answers that took more than one worker": moved,
        "answers asked for again with an equal text": 60 - len(text_wrong),
        "cache probes, of them hits, of them wrong": f"120, {hits}, {len(index_wrong)}",
        "frontend memory, MiB (second quarter, last quarter)": f"{early:.0f}, {late:.0f}",
        "open files of that frontend (start, end)": f"{descriptors[0]}, {descriptors[1]}",
    }
    return happened, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("seconds", type=float, nargs="?", default=1200.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--docs", type=Path, help="replace the table in this page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        happened, found = soak(options.seconds, Path(folder), options.seed)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    lines = [f"{day}, {options.seconds:g} s, seed {options.seed}", "", "| what | how often |", "|---|---:|"]
    lines += [
        f"| {name} | {value:,} |" if isinstance(value, int) else f"| {name} | {value} |"
        for name, value in happened.items()
    ]
    lines += ["", f"Findings: {len(found) or 'none'}."] + [f"- {text}" for text in found[:50]]
    table = "\n".join(lines)
    print(table)
    if options.docs is not None:
        write_part(options.docs, table)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
