"""A cluster of prefill and decode engines: it answers as one that does not split, whatever dies or changes its role."""

import http.client
import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, post, request, served, until
from tests.live.test_operate import load, penstock, workers

SPLIT = """
models:
  sim:
    tokenizer: builtin:sim
    pools:
      prefill: {role: prefill, replicas: 2, sim: {timing: {speed_up: 4}}}
      decode: {role: decode, replicas: 2, sim: {timing: {speed_up: 4}}}
router:
  handoff: {conditional: "off"}
"""


def split(folder: Path) -> list[str]:
    config = folder / "split.yaml"
    config.write_text(SPLIT)
    return ["up", str(config), "--frontend.port", str(free_port())]


def question(number: int, tokens: int = 40) -> dict[str, Any]:
    text = f"question {number}: " + f"word{number} " * 200
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True}


def handoffs(cluster: Served) -> dict[str, int]:
    (model,) = cluster.get("/admin/status")[1]["models"]
    return dict(model["handoffs"])


def held(cluster: Served) -> float:
    """Return the largest share of blocks that any engine says is in use."""
    most = 0.0
    for worker in workers(cluster).values():
        status, text = request(f"{worker['url']}/metrics")
        assert status == 200
        line = next(line for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc"))
        most = max(most, float(line.rsplit(" ", 1)[1]))
    return most


def hang_up(cluster: Served, body: dict[str, Any], after: float) -> None:
    """Ask for a stream, and close the connection so many seconds later."""
    parts = urlsplit(cluster.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    raw = json.dumps({**body, "stream": True}).encode()
    connection.request("POST", "/v1/chat/completions", raw, {"content-type": "application/json"})
    time.sleep(after)
    connection.close()


def killed_and_back(cluster: Served, victim: str) -> None:
    """Kill an engine, and wait until it has been started again."""
    before = workers(cluster)[victim]["pid"]
    os.kill(before, signal.SIGKILL)
    until(lambda: workers(cluster).get(victim, {}).get("pid") not in (None, before), 30)


def test_it_answers_as_one_that_does_not_split_and_nothing_stays_held(tmp_path: Path) -> None:
    with served(tmp_path, *split(tmp_path)) as cluster:
        for number in range(4):
            status, ours, headers = post(f"{cluster.url}/v1/chat/completions", question(number))
            assert status == 200
            assert headers["x-penstock-worker"].startswith("decode")
            assert headers["x-penstock-prefill-worker"].startswith("prefill")
            alone = workers(cluster)["prefill-0"]["url"]
            theirs = post(f"{alone}/v1/chat/completions", question(number))[1]
            assert ours["choices"][0]["message"] == theirs["choices"][0]["message"]
            assert ours["usage"]["completion_tokens"] == 40
        assert handoffs(cluster)["done"] == 4
        told = penstock(cluster, "explain", headers["x-request-id"])
        assert "stages: prefill on prefill-" in told and "remote prefill: router.handoff.conditional is off" in told
        assert "Prefills of sim on workers of their own (completed): 4 handed over" in penstock(cluster, "status")

        # A client that hangs up at any moment of its request leaves nothing held.
        for number in range(12):
            hang_up(cluster, question(100 + number, 400), after=0.02 * number)
        until(lambda: cluster.get("/admin/status")[1]["requests"]["inflight"] == 0, 60)
        until(lambda: held(cluster) == 0.0, 30)

        # An engine of either kind is killed, and whoever waited for it is answered all the same.
        with load(cluster, callers=6):
            for victim in ("prefill-0", "decode-1"):
                killed_and_back(cluster, victim)
        until(lambda: held(cluster) == 0.0, 30)


@pytest.mark.slow
def test_nothing_fails_from_two_and_two_over_three_and_one_to_none(tmp_path: Path) -> None:
    with served(tmp_path, *split(tmp_path)) as cluster:
        with load(cluster, callers=10):
            assert "decode-1 is prefill now, and was decode" in penstock(cluster, "flip", "decode-1", "prefill")
            roles = [worker["role"] for worker in workers(cluster).values()]
            assert sorted(roles) == ["decode", "prefill", "prefill", "prefill"]
            before = handoffs(cluster)["done"]
            until(lambda: handoffs(cluster)["done"] > before, 30)
            for worker in ("prefill-0", "prefill-1", "decode-1", "decode-0"):
                penstock(cluster, "flip", worker, "aggregated")
            assert {worker["role"] for worker in workers(cluster).values()} == {"aggregated"}
            penstock(cluster, "flip", "decode-0", "--undo")
            penstock(cluster, "scale", "decode=3")
        assert workers(cluster)["decode-0"]["role"] == workers(cluster)["decode-2"]["role"] == "decode"
        until(lambda: held(cluster) == 0.0, 30)
        assert "there is no worker 'x-1'" in penstock(cluster, "flip", "x-1", "decode", status=1)


@pytest.mark.slow
def test_a_role_stays_when_its_engine_is_started_again(tmp_path: Path) -> None:
    with served(tmp_path, *split(tmp_path)) as cluster:
        penstock(cluster, "flip", "decode-1", "prefill")
        killed_and_back(cluster, "decode-1")
        assert workers(cluster)["decode-1"]["role"] == "prefill"
