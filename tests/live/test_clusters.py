"""Is a cluster before other clusters one service, with each of them as a server (docs/guides/scaling.md)?"""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, post, request, served, until

FAST = ["--set", "models.sim.pools.main.sim.timing.speed_up=20", "--set", "models.sim.pools.main.replicas=1"]
MANY = 24


def ask(cluster: Served, number: int) -> int:
    content = f"{number} of {MANY} " * 60
    body = {"model": "sim", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return post(f"{cluster.url}/v1/chat/completions", body)[0]


def answered(cluster: Served) -> int:
    return sum(worker["requests"] for worker in request(f"{cluster.url}/admin/status")[1]["workers"])


def test_a_cluster_before_clusters_serves_by_each_and_loses_nothing_with_one(tmp_path: Path) -> None:
    with ExitStack() as running:
        below = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            words = ["up", "--frontend.port", str(free_port()), "--set", f"name={name}", *FAST]
            below.append(running.enter_context(served(tmp_path / name, *words)))
        above = running.enter_context(
            served(tmp_path, "attach", *(each.url for each in below), "--frontend.port", str(free_port()))
        )
        assert [ask(above, number) for number in range(MANY)] == [200] * MANY
        until(lambda: sum(map(answered, below)) >= MANY, 20)
        assert min(map(answered, below)) > 0, "both take part"
        for pid in (below[0].process.pid, *below[0].children()):
            os.kill(pid, signal.SIGKILL)
        assert [ask(above, number) for number in range(MANY)] == [200] * MANY
