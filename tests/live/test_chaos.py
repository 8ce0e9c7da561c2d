"""Processes killed at random moments under load: nothing is lost silently, nothing answered twice, all heals."""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, served, stream, until

SECONDS = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "20"))


class Client(threading.Thread):
    """Sends one streamed request after another and writes down how each ended."""

    def __init__(self, url: str, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.url, self.rng, self.stopped = url, random.Random(seed), stop
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self.stopped.is_set():
            tokens = self.rng.randrange(5, 60)
            text = f"topic {self.rng.randrange(5)} " * 30 + f"question {self.rng.random()}"
            body = {
                "model": "sim",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream_options": {"include_usage": True},
            }
            self.ends[self.one(body, tokens)] += 1

    def one(self, body: dict[str, object], tokens: int) -> str:
        """Send one request; what is answered as whole must be whole, exactly once."""
        try:
            events = list(stream(f"{self.url}/v1/chat/completions", body))
        except OSError:
            return "refused"
        if not events:
            return "cut"
        if events[-1] != "[DONE]":
            said = json.loads(events[-1]) if events[-1].startswith("{") else {}
            return "told" if "error" in said else "cut"
        usage = [json.loads(event).get("usage") for event in events[:-1]]
        counted = [entry["completion_tokens"] for entry in usage if entry]
        if events.count("[DONE]") != 1 or counted[-1:] != [tokens]:
            self.wrong.append(f"asked for {tokens} tokens, got {counted} and {events.count('[DONE]')} end marks")
        return "whole"


@pytest.mark.slow
def test_engines_killed_at_random_lose_no_request_silently(tmp_path: Path) -> None:
    rng = random.Random(7)
    arguments = ["--frontend.port", str(free_port()), "--set", "models.sim.pools.main.sim.timing.speed_up=10"]
    with served(tmp_path, "up", *arguments) as cluster:
        stop = threading.Event()
        clients = [Client(cluster.url, seed, stop) for seed in range(6)]
        for client in clients:
            client.start()
        end = time.monotonic() + SECONDS
        kills = 0
        while time.monotonic() < end:
            time.sleep(rng.uniform(0.5, 2.5))  # the moment itself is what is random here
            victims = [worker["pid"] for worker in cluster.get("/admin/status")[1]["workers"]]
            if len(victims) > 1:
                os.kill(rng.choice(victims), signal.SIGKILL)
                kills += 1
        stop.set()
        for client in clients:
            client.join(60)
        ends = sum((client.ends for client in clients), Counter())
        wrong = [text for client in clients for text in client.wrong]
        assert not wrong, wrong
        assert kills >= 3 and ends["whole"] > 50, ends
        assert ends["cut"] == 0 and ends["refused"] == 0, f"a request ended without a word: {ends}"
        until(lambda: len(ready(cluster)) == 4, 60, lambda: str(cluster.get("/admin/status")[1]["workers"]))
        status = cluster.get("/admin/status")[1]
        assert status["requests"]["inflight"] == 0 and status["router_faults"] == 0
        assert sum(worker["active_requests"] for worker in status["workers"]) == 0
        assert cluster.chat("after the storm")[0] == 200
    lines = (next((tmp_path / "runs").iterdir()) / "requests.jsonl").read_text().splitlines()
    ids = [json.loads(line)["id"] for line in lines]
    assert len(ids) == len(set(ids)), "a request was closed twice"
    assert len(ids) >= sum(ends.values())


def ready(cluster: Served) -> list[dict[str, object]]:
    return [worker for worker in cluster.get("/admin/status")[1]["workers"] if worker["state"] == "ready"]
