"""What a crash and a restart leave behind: counts, reasons, history and names that go on."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.live.cluster import Served, served, stream, until
from tests.live.test_operate import FAST, penstock, workers


def ask(cluster: Served, number: int) -> None:
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": f"question {number} " * 2000}],
        "max_tokens": 8,
    }
    assert list(stream(f"{cluster.url}/v1/chat/completions", body))[-1] == "[DONE]"


def ids(cluster: Served) -> list[str]:
    return [entry["id"] for entry in cluster.get("/admin/requests?limit=100")[1]["requests"]]


def explained(cluster: Served, request: str) -> Any:
    status, found = cluster.get(f"/admin/explain/{request}")
    assert status == 200, found
    return found


@pytest.mark.slow
def test_a_crash_leaves_a_trace_and_a_restart_forgets_nothing(tmp_path: Path) -> None:
    with served(tmp_path, "up", "--set", "frontend.port=0", *FAST, "--models.sim.pools.main.replicas", "2") as cluster:
        ask(cluster, 0)
        (request,) = ids(cluster)
        found = explained(cluster, request)
        ttft = (found["request"]["first"] - found["request"]["arrived"]) / 1e9
        shown = [value for value in cluster.get("/admin/timeline")[1]["columns"]["ttft_p50"] if value is not None]
        assert shown == pytest.approx([ttft], rel=0.03)  # the page's bins are 2 % wide
        record = json.loads((cluster.run / "requests.jsonl").read_text()) if _written(cluster) else {}
        assert record["ttft"] == pytest.approx(ttft, abs=2e-3)

        victim = sorted(workers(cluster))[0]
        os.kill(workers(cluster)[victim]["pid"], signal.SIGKILL)
        until(lambda: workers(cluster).get(victim, {}).get("restarts") == 1, 30, lambda: cluster.text)
        said = " ".join(penstock(cluster, "status").split())
        assert f"{victim}: 1 time" in said and "it was killed by SIGKILL" in said
        assert "No findings" not in said and f"warning: {victim} was killed by SIGKILL" in said
        assert "TTFT p50" in said and "last minute: 1 request ended" in said
        assert victim in " ".join(cluster.get("/health")[1]["notes"])
        until(lambda: f"Z {victim} was killed by SIGKILL" in cluster.text, 10, lambda: cluster.text)
        from urllib.request import urlopen

        with urlopen(f"{cluster.url}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
        assert f'penstock_process_restarts_total{{kind="engine",process="{victim}"}} 1' in metrics
        log = (cluster.run / "logs" / "frontend-0.log").read_text()
        assert any("SIGKILL" in line and "warning" in line.lower() for line in log.splitlines()), log

        before, names = cluster.get("/admin/status")[1], sorted(workers(cluster))
        assert before["requests"]["ok"] == 1
        penstock(cluster, "restart")
        frontend = before["frontends"]
        until(lambda: not set(frontend) & set(cluster.get("/admin/status")[1]["frontends"]), 30)
        after = cluster.get("/admin/status")[1]
        assert after["requests"]["ok"] == 1 and after["requests"]["total"] == 1
        assert sorted(workers(cluster)) == names
        again = explained(cluster, request)
        assert again["decisions"] == found["decisions"]
        assert (again["request"]["first"] - again["request"]["arrived"]) / 1e9 == pytest.approx(ttft, abs=2e-3)
        assert ids(cluster) == [request]
        assert [each["request"] for each in cluster.get("/admin/decisions?limit=9")[1]["decisions"]] == [request]
        ask(cluster, 1)
        assert cluster.get("/admin/status")[1]["requests"]["ok"] == 2
        assert len(ids(cluster)) == 2 and ids(cluster)[1] == request
        assert cluster.get("/admin/status")[1]["crashes"][0]["count"] == 1


def _written(cluster: Served) -> bool:
    until(lambda: (cluster.run / "requests.jsonl").exists(), 15)
    return True
