"""A live pool shrinks: a replica sleeps, is no candidate, and is woken by the next growth, or started anew."""

from pathlib import Path
from typing import Any

import pytest

from tests.live.cluster import Served, post, served, until
from tests.live.test_operate import FAST, asked, penstock, workers

POOL = "models.sim.pools.main"
LOAD, WAKE = 1.5, 0.2


def replicas(up: Served) -> dict[str, dict[str, Any]]:
    """Return the replicas once all that are starting have started: their status is written some times a second."""
    seen: dict[str, dict[str, Any]] = {}

    def settled() -> bool:
        (pool,) = up.get("/admin/desired")[1]["pools"]
        seen.clear()
        seen.update((each["id"], each) for each in pool["replicas"])
        return all(each["state"] != "starting" for each in seen.values())

    until(settled, 10.0, lambda: str(seen))
    return seen.copy()


@pytest.mark.slow
def test_a_replica_sleeps_in_place_of_ending_and_the_next_growth_wakes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SIM_FAULTS", "1")
    knobs = {"replicas": 2, "sleeping": 1, "sim.load_time": LOAD, "sim.wake_time": WAKE}
    words = [word for name, value in knobs.items() for word in ("--set", f"{POOL}.{name}={value}")]
    with served(tmp_path, "up", *FAST, *words, "--set", "frontend.port=0") as up:
        first = replicas(up)
        start = first["main-1"]["start"]
        assert not start["woken"] and start["phases"]["weights"] >= LOAD
        assert sum(spent for spent in start["phases"].values() if spent is not None) <= start["seconds"] + 0.05
        assert {"spawn", "import", "weights", "warm-up", "probe", "announce"} <= start["phases"].keys()
        assert start["phases"]["compile"] is None, "a simulated engine compiles nothing, and unknown is not 0"

        penstock(up, "scale", "main=1")
        asleep = replicas(up)["main-1"]
        assert asleep["asleep"] and asleep["pid"] == first["main-1"]["pid"]
        assert asleep["host_memory"] > 1 << 20
        assert list(workers(up)) == ["main-0"]
        assert {up.chat("Hello")[2]["x-penstock-worker"] for _ in range(4)} == {"main-0"}

        penstock(up, "scale", "main=2")
        woken = replicas(up)["main-1"]
        assert woken["pid"] == first["main-1"]["pid"] and woken["start"]["woken"]
        assert WAKE <= woken["start"]["phases"]["wake"] <= woken["start"]["seconds"] < LOAD
        assert sorted(workers(up)) == ["main-0", "main-1"]
        text = penstock(up, "explain", "start")
        assert "woken" in text and "started" in text and "WEIGHTS" in text
        assert "was woken within" in penstock(up, "explain", "start", "main-1")
        assert [each["id"] for each in asked(up, "explain", "start")["replicas"]] == ["main-0", "main-1"]
        assert "main-7" in penstock(up, "explain", "start", "main-7", status=2)

        post(workers(up)["main-1"]["url"] + "/fault", {"kind": "no_wake"})
        penstock(up, "scale", "main=1")
        penstock(up, "scale", "main=2")
        anew = replicas(up)["main-1"]
        assert anew["pid"] != first["main-1"]["pid"] and not anew["start"]["woken"]

        post(workers(up)["main-1"]["url"] + "/fault", {"kind": "no_sleep"})
        penstock(up, "scale", "main=1")
        assert list(replicas(up)) == ["main-0"], "one that can't fall asleep ends"
