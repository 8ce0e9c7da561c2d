"""A cluster that plans for itself: replicas follow a ramp, no request fails; it is killed, set by hand, asked why."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.listen_address import free_port
from penstock.runtime.planning.planner_report import newest
from tests.live.cluster import Served, alive, served, until
from tests.live.test_operate import asked, penstock

pytestmark = pytest.mark.live
ROOT = Path(__file__).resolve().parents[2]

FOLLOWING = """
planner:
  policy: static
  load_interval: 500ms
  throughput_interval: 1s
  manual_hold: {hold}
  start: {{assumed: 2s}}
  budget: {{max_gpus: {most}}}
  plugins:
    use:
      follow:
        module: tests.live.following
        name: Follow
        stage: propose
        options: {{rate: "{rate}", window: "2"}}
"""
AGGREGATED = """
models:
  sim:
    tokenizer: builtin:sim
    pools:
      main: {replicas: 1, sim: {timing: {speed_up: 10}}}
frontend: {port: 0}
engine_stats: {interval: 1s}
"""
SPLIT = """
models:
  sim:
    tokenizer: builtin:sim
    pools:
      prefill: {role: prefill, replicas: 1, sim: {timing: {speed_up: 10}}}
      decode: {role: decode, replicas: 1, sim: {timing: {speed_up: 10}}}
router: {handoff: {conditional: "off"}}
frontend: {port: 0}
engine_stats: {interval: 1s}
"""


SLO = """
slo: {ttft: 1s, itl: 50ms}
planner:
  policy: slo
  slo: {hold: 10s}
  load_interval: 1s
  throughput_interval: 5s
  start: {assumed: 2s}
  budget: {max_gpus: 8}
"""


def following(rate: float = 5, most: int = 6, hold: str = "2s") -> str:
    return FOLLOWING.format(rate=rate, most=most, hold=hold)


@contextmanager
def planned(folder: Path, config: str, *words: str) -> Iterator[Served]:
    """A cluster whose planner has had its first tick."""
    (folder / "cluster.yaml").write_text(config)
    with served(folder, "up", "cluster.yaml", *words, env={"PYTHONPATH": str(ROOT)}) as cluster:
        until(lambda: report(cluster) is not None, 30, lambda: logs(cluster))
        yield cluster


def report(cluster: Served) -> dict[str, Any] | None:
    found: dict[str, Any] | None = cluster.get("/admin/status")[1].get("planner")
    return found


def until_reported(cluster: Served, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first report that fits; each frontend hears of it in its own time."""
    found: list[dict[str, Any]] = []

    def heard() -> bool:
        said = report(cluster)
        if said is not None and fits(said):
            found.append(said)
        return bool(found)

    until(heard, 30, lambda: logs(cluster))
    return found[0]


def at_rest(pool: dict[str, Any], replicas: int) -> bool:
    return bool(pool["target"] == pool["ready"] == replicas and not pool["starting"] and not pool["draining"])


def logs(cluster: Served) -> str:
    log = cluster.run / "logs" / "planner.log"
    return cluster.text + (log.read_text() if log.exists() else "no log of the planner")


def ready(cluster: Served) -> dict[str, int]:
    return {pool["name"]: pool["ready"] for pool in cluster.get("/admin/desired")[1]["pools"]}


class Load(threading.Thread):
    """Asks a cluster twice a second, and ten times as often while ``busy`` is set, until it is left."""

    def __init__(self, cluster: Served) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.busy, self.left = threading.Event(), threading.Event()
        self.statuses: list[Future[int]] = []

    def run(self) -> None:
        with ThreadPoolExecutor(max_workers=64) as clients:
            while not self.left.wait(0.05 if self.busy.is_set() else 0.5):
                self.statuses.append(clients.submit(self._ask, f"{len(self.statuses)} {'word ' * 800}"))

    def _ask(self, text: str) -> int:
        return self.cluster.chat(text, max_tokens=60)[0]

    def __enter__(self) -> "Load":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.left.set()
        self.join()


def ramp(cluster: Served, grown: Callable[[dict[str, int]], bool], shrunk: Callable[[dict[str, int]], bool]) -> int:
    """Let many requests come until pools have grown, then few until they have shrunk; return how many were answered."""
    with Load(cluster) as load:
        until(lambda: len(load.statuses) > 5, 30)
        load.busy.set()
        until(lambda: grown(ready(cluster)), 150, lambda: logs(cluster))
        load.busy.clear()
        until(lambda: shrunk(ready(cluster)), 150, lambda: logs(cluster))
    statuses = [status.result() for status in load.statuses]
    assert set(statuses) == {200}
    return len(statuses)


def follows(folder: Path, config: str) -> None:
    """Let a ramp pass, until each pool has had three replicas, and see what is said of it."""
    with planned(folder, config) as cluster:
        answered = ramp(cluster, lambda now: min(now.values()) >= 3, lambda now: set(now.values()) == {1})
        until_reported(cluster, lambda said: all(at_rest(pool, 1) for pool in said["pools"].values()))
        explained = penstock(cluster, "explain", "scale", "--limit", "100")
        assert "requests/s of sim at" in explained
        assert "follow (propose): override" in explained
        status = penstock(cluster, "status")
        assert "Planner: policy static, every 0.5 s; it scales by penstock up" in status
        assert "1 wanted, 1 ready" in status
        assert "sim fresh" in status
        assert "explain scale" in cluster.text  # the banner says where to ask
        found = cluster.get("/admin/status")[1]
        assert found["requests"]["failed"] == found["requests"]["rejected"] == 0
        drained = cluster.get("/admin/desired")[1]["drained"]
        assert drained, "those that went were drained first"
        assert not any(each["cut"] for each in drained.values())  # nothing still ran where an engine was ended
        counts = found["models"][0]["handoffs"]
        if counts is not None:
            assert counts["done"] == answered
            assert counts["failed"] == counts["lost"] == counts["fallback"] == 0  # what was prefilled was taken over
        records = newest(cluster.run / "planner.jsonl", 1000)
        assert len(records) > 10
        assert json.loads(records[0])["tick"] > json.loads(records[-1])["tick"]
        replayed = subprocess.run(
            [sys.executable, "-m", "penstock", "replay", str(cluster.run)], cwd=ROOT, capture_output=True, text=True
        )
        assert replayed.returncode == 0 and "every event came to the same effects again" in replayed.stdout
        assert list((cluster.run / "journal").glob("planner-*")), "the planner's among them"


@pytest.mark.slow
def test_replicas_follow_a_ramp_and_no_request_fails(tmp_path):
    follows(tmp_path, AGGREGATED + following())


@pytest.mark.slow
@pytest.mark.parametrize("pools", ["aggregated", "split"])
def test_the_default_policy_follows_a_ramp_and_no_request_fails(tmp_path, pools):
    config = (AGGREGATED if pools == "aggregated" else SPLIT).replace(
        "{speed_up: 10}}", "{speed_up: 1}, max_num_seqs: 4}"
    )
    with planned(tmp_path, config + SLO) as cluster:
        ramp(
            cluster,
            lambda now: sum(now.values()) >= len(now) + 2,
            lambda now: sum(now.values()) < len(now) + 2,
        )
        explained = penstock(cluster, "explain", "scale")
        assert "requests/s are expected" in explained
        assert "candidates of slo_propose" in explained
        assert "policy slo" in penstock(cluster, "status")
        assert not any(each["cut"] for each in cluster.get("/admin/desired")[1]["drained"].values())


@pytest.mark.slow
def test_prefill_and_decode_follow_a_ramp_and_no_request_fails(tmp_path):
    follows(tmp_path, SPLIT + following(most=8))


@pytest.mark.slow
def test_a_planner_that_is_killed_freezes_counts_and_the_next_one_goes_on(tmp_path):
    with planned(
        tmp_path, AGGREGATED + following(), "--frontend.processes", "2", "--frontend.port", str(free_port())
    ) as cluster:
        before = until_reported(cluster, lambda found: found["tick"] > 3)
        os.kill(before["pid"], signal.SIGKILL)
        assert cluster.chat("while nobody plans")[0] == 200
        assert ready(cluster) == {"main": 1}
        after = until_reported(cluster, lambda found: found["pid"] != before["pid"])
        assert after["restarts"] == 1
        assert after["tick"] > before["tick"]
        assert not alive(before["pid"])
        # What came while nobody planned is in the first look of the next one.
        ticks = [json.loads(line) for line in newest(cluster.run / "planner.jsonl", 1000)]
        assert sum((tick["models"]["sim"]["judged"] or 0) for tick in ticks) == 1


@pytest.mark.slow
def test_other_settings_count_while_it_runs(tmp_path):
    config = following(rate=0.001, most=2).replace('window: "2"', 'window: "60"')  # one request counts for a minute
    with planned(tmp_path, AGGREGATED + config) as cluster:
        assert cluster.chat("Hello")[0] == 200
        until(lambda: ready(cluster) == {"main": 2}, 30, lambda: logs(cluster))
        penstock(cluster, "set", "planner.advisory=true")
        until(lambda: (report(cluster) or {}).get("advisory") is True, 30, lambda: logs(cluster))
        penstock(cluster, "set", "planner.budget.max_gpus=3")
        found = until_reported(cluster, lambda found: found["pools"]["main"]["target"] == 3)
        assert found["restarts"] == 0  # it was not lost, only told other things
        assert ready(cluster) == {"main": 2}


def test_a_pool_goes_to_none_and_who_comes_then_waits_for_the_first(tmp_path):
    config = (
        following().replace("budget: {", "budget: {min_replicas: 0, ").replace('window: "2"', 'window: "2", least: "0"')
    )
    with planned(tmp_path, AGGREGATED + config) as cluster:
        until(lambda: not cluster.get("/admin/desired")[1]["pools"][0]["replicas"], 30, lambda: logs(cluster))
        status, answer, _ = cluster.chat("is anybody there?")
        assert status == 200, answer
        assert "main 0 -> 1" in penstock(cluster, "explain", "scale")
        assert cluster.get("/admin/status")[1]["requests"]["rejected"] == 0


def test_what_a_person_sets_is_noticed_and_left_alone(tmp_path):
    with planned(tmp_path, AGGREGATED + following(hold="1h")) as cluster:
        penstock(cluster, "scale", "main=3")
        until(lambda: any(b["code"] == "manual" for b in (report(cluster) or {})["bound"]), 20, lambda: logs(cluster))
        assert ready(cluster) == {"main": 3}
        assert "an operator set main from 1 to 3" in penstock(cluster, "status")
        assert "main stays at 3, which an operator has set" in penstock(cluster, "explain", "scale")


def test_advice_touches_nothing(tmp_path):
    port = free_port()
    words = ["--planner.advisory", "true", "--planner.metrics_port", str(port), "--runs.records_bytes", "6000"]
    config = following(rate=0.01).replace('window: "2"', 'window: "60"')  # one request counts for a minute
    with planned(tmp_path, AGGREGATED + config, *words) as cluster:
        assert cluster.chat("Hello")[0] == 200
        until(lambda: (report(cluster) or {})["outcome"] == "advise", 20, lambda: logs(cluster))
        assert ready(cluster) == {"main": 1}
        decided = asked(cluster, "explain", "scale")["decisions"][0]
        assert decided["pools"]["main"]["target"] > 1
        assert "it only advises" in penstock(cluster, "status")
        until((cluster.run / "planner.1.jsonl").exists, 20, lambda: logs(cluster))
        from urllib.request import urlopen

        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
        assert 'dynamo_planner_num_decode_replicas{model="sim"} 1' in metrics
        assert 'dynamo_planner_engine_queued_prefill_tokens{model="sim",worker_id="main-0",dp_rank="0"}' in metrics


@pytest.mark.slow
def test_a_planner_beside_a_cluster_scales_it(tmp_path):
    (tmp_path / "alone.yaml").write_text(following(rate=0.01, most=2))
    with served(tmp_path, "up", "--set", "frontend.port=0", "--models.sim.pools.main.replicas", "1") as cluster:
        words = [sys.executable, "-m", "penstock", "planner", "alone.yaml", "--url", cluster.url]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        planner = subprocess.Popen(
            words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            until(lambda: cluster.chat("Hello")[0] == 200 and ready(cluster)["main"] == 2, 30)
        finally:
            planner.send_signal(signal.SIGINT)
            said, _ = planner.communicate(timeout=30)
        assert "main 1 -> 2, because" in said
        assert "Stopped; replica counts stay as they are." in said
        assert planner.returncode == 0
