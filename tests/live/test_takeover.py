"""A supervisor that was killed: the next one of the same cluster takes its engines over, or they end by themselves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.adapters.engine_ports import free_port
from tests.live.cluster import Served, alive, served, until

FAST = ["--set", "models.sim.pools.main.sim.timing.speed_up=20", "--set", "models.sim.pools.main.replicas=2"]


def pids(cluster: Served) -> dict[str, int]:
    return {worker["id"]: worker["pid"] for worker in cluster.get("/admin/status")[1]["workers"]}


def test_the_next_supervisor_takes_the_engines_over(tmp_path: Path) -> None:
    port = free_port()
    state = {"PENSTOCK_STATE_DIR": str(tmp_path / "state")}
    first = Served(["up", "--frontend.port", str(port), *FAST], tmp_path, env=state).wait_up()
    before, family = pids(first), first.children()
    text = "A story that is in the cache. " * 60
    status, _body, headers = first.chat(text)
    assert status == 200
    request = headers["x-penstock-request-id"]
    until(lambda: first.get(f"/admin/explain/{request}")[0] == 200 and counted(first) == 1, 20)
    file = json.loads((tmp_path / "state" / f"penstock-{port}.json").read_text())
    assert {entry["worker"]: entry["pid"] for entry in file.values()} == before
    first.process.kill()
    first.process.wait(10)
    with served(tmp_path, "up", "--frontend.port", str(port), *FAST, env=state) as second:
        assert "2 of them taken over" in second.text
        assert pids(second) == before
        assert "was killed" in second.text and "goes on" in second.text
        assert second.get(f"/admin/explain/{request}")[1]["request"]["id"] == request
        assert counted(second) == 1, "the counts are those of the whole run"
        [crash] = second.get("/admin/status")[1]["crashes"]
        assert (crash["name"], crash["reason"]) == ("supervisor", "was killed")
        words = [sys.executable, "-m", "penstock", "events", "--url", second.url]
        events = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        assert [line.split("Z ")[1].split(":")[0] for line in events] == [
            f"cluster penstock-{port} starts",
            "supervisor was killed",
            f"cluster penstock-{port} starts",
        ]
        status, body, _headers = second.chat(text)
        assert status == 200 and body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "their caches are warm"
        until(lambda: all(worker["index"] == "exact" for worker in workers(second)), 20)
    until(lambda: not any(alive(pid) for pid in family), 20)
    assert not list((tmp_path / "state").iterdir()), "nothing is left after a clean end"


def counted(cluster: Served) -> int:
    requests: dict[str, int] = cluster.get("/admin/status")[1]["requests"]
    return requests["ok"]


def workers(cluster: Served) -> list[dict[str, object]]:
    found: list[dict[str, object]] = cluster.get("/admin/status")[1]["workers"]
    return found


@pytest.mark.slow
def test_without_a_next_one_they_end_by_themselves(tmp_path: Path) -> None:
    arguments = ["--frontend.port", str(free_port()), *FAST, "--set", "supervise.orphan_grace=3"]
    cluster = Served(["up", *arguments], tmp_path).wait_up()
    engines, family = set(pids(cluster).values()), cluster.children()
    cluster.process.kill()
    cluster.process.wait(10)
    until(lambda: not any(alive(pid) for pid in family - engines - shims(engines)), 20)
    until(lambda: not any(alive(pid) for pid in family), 40)


def shims(engines: set[int]) -> set[int]:
    return {int(stat(pid)[1]) for pid in engines if alive(pid)}


def stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


@pytest.mark.slow
def test_a_namespace_has_one_live_owner(tmp_path: Path) -> None:
    state = {"PENSTOCK_STATE_DIR": str(tmp_path / "state")}
    mine = ["--supervise.namespace", "prod", "--frontend.port", "0", *FAST]
    with served(tmp_path, "up", *mine, env=state) as first:
        second = Served(["up", *mine], tmp_path, env=state)
        assert second.process.wait(30) == 2
        until(lambda: "--supervise.namespace" in second.text, 5, lambda: second.text)
        assert str(first.process.pid) in second.text
        assert first.chat()[0] == 200
        assert set(json.loads((tmp_path / "state" / "prod.json").read_text())) == {"prod_main", "prod_main_1"}
