"""A disk that is full: traffic goes on, what can't be written is said, and it heals when there is room."""

import json
from pathlib import Path

from tests import server_fixtures
from tests.live.cluster import served, until

small_disk = server_fixtures.small_disk


def test_a_full_disk_stops_no_traffic(small_disk: Path, tmp_path: Path) -> None:
    fast = ["--frontend.port", "0", "--set", "models.sim.pools.main.sim.timing.speed_up=20"]
    with served(tmp_path, "up", *fast, "--runs.dir", str(small_disk)) as cluster:
        assert cluster.chat("before")[0] == 200
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass  # full
        assert [cluster.chat(f"on a full disk {number}")[0] for number in range(30)] == [200] * 30
        workers = cluster.get("/admin/status")[1]["workers"]
        assert len(workers) == 4, "leases that can't be renewed for lack of room must not empty the cluster"
        ballast.unlink()
        records = cluster.run / "requests.jsonl"

        def all_there() -> bool:
            lines = records.read_text().splitlines() if records.exists() else []
            return len(lines) == 31 and all(json.loads(line)["outcome"] == "ok" for line in lines)

        until(all_there, 30, lambda: f"{len(records.read_text().splitlines())} lines")
