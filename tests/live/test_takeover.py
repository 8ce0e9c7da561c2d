"""A supervisor that was killed: the next one of the same cluster takes its engines over, or they end by themselves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, alive, post, served, until

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


def killed_and_scaled(tmp_path: Path, port: int, env: dict[str, str]) -> dict[str, int]:
    """Run a cluster of two, scale it to three, change a setting, kill its supervisor; return its workers."""
    first = Served(["up", "--frontend.port", str(port), *FAST], tmp_path, env=env).wait_up()
    assert post(f"{first.url}/admin/set", {"values": {"router.cost.overlap_credit": "2"}})[0] == 200
    assert post(f"{first.url}/admin/scale", {"pools": {"main": 3}})[0] == 200
    until(lambda: len(pids(first)) == 3, 20)
    before = pids(first)
    first.process.kill()
    first.process.wait(10)
    return before


def test_engines_and_sizes_of_an_older_release_are_taken_over(tmp_path: Path) -> None:
    port, env = free_port(), {"PENSTOCK_STATE_DIR": str(tmp_path / "state")}
    before = killed_and_scaled(tmp_path, port, env)
    path = tmp_path / "state" / f"penstock-{port}.json"
    entries = json.loads(path.read_text())
    for entry in entries.values():  # as a release wrote it that had fewer knobs and lay in another environment
        words = entry["command"]
        settings = json.loads(words[words.index("--settings") + 1])
        del settings["timing"]["link"], settings["scheduling_policy"]
        words[words.index("--settings") + 1] = json.dumps({**settings, "knob_of_yore": 1})
        words[0] = "/opt/older/bin/python"
    path.write_text(json.dumps(entries))
    with served(tmp_path, "up", "--frontend.port", str(port), *FAST, env=env) as second:
        assert "3 of them taken over" in second.text and "not taken over" not in second.text
        assert pids(second) == before
        until(lambda: "router.cost.overlap_credit: 1.0 -> 2.0, by an operator" in second.text, 20, lambda: second.text)
        assert list(second.get("/admin/settings")[1]["changed"]) == ["router.cost.overlap_credit"]


def test_what_is_not_taken_over_is_named_with_its_reason_and_sizes_stay(tmp_path: Path) -> None:
    port, env = free_port(), {"PENSTOCK_STATE_DIR": str(tmp_path / "state")}
    before = killed_and_scaled(tmp_path, port, env)
    other = ["--set", "models.sim.pools.main.sim.timing.speed_up=30", *FAST[2:]]
    with served(tmp_path, "up", "--frontend.port", str(port), *other, env=env) as second:
        for worker in before:
            assert f"{worker} of the cluster before was not taken over: it was started with other" in second.text
        assert "--settings timing.speed_up" in second.text
        assert len(pids(second)) == 3 and not set(pids(second).values()) & set(before.values())


def test_a_size_that_the_config_overrides_is_named(tmp_path: Path) -> None:
    port, env = free_port(), {"PENSTOCK_STATE_DIR": str(tmp_path / "state")}
    killed_and_scaled(tmp_path, port, env)
    larger = [*FAST[:2], "--set", "models.sim.pools.main.replicas=4"]
    with served(tmp_path, "up", "--frontend.port", str(port), *larger, env=env) as second:
        assert "the size 3 of main of the cluster before was not taken over: the config said 2 replicas" in second.text
        assert "3 of them taken over" in second.text and len(pids(second)) == 4
