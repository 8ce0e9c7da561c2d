"""A whole cluster whose membership stands in a Kubernetes API server: no etcd, no NATS, no request lost."""

import os
import signal
from pathlib import Path

import pytest

from penstock.adapters.listen_address import free_port
from tests.kubernetes.conftest import RunningApi
from tests.kubernetes.discovery.conftest import fault
from tests.live.cluster import Served, request, served, until
from tests.live.test_etcd import LIMIT, ready
from tests.live.test_operate import FAST, load, penstock, workers

pytestmark = pytest.mark.slow

SECRET = {"PENSTOCK_CLUSTER_SECRET": "a secret of the tests with Kubernetes"}


ASKED = 16
"""Times that a status is asked for: of two frontends, each answers some of them."""


def reachable(api: RunningApi) -> bool:
    try:
        return request(f"{api.url}/version")[0] == 200
    except OSError:
        return False


def findings(cluster: Served) -> str:
    return " ".join(finding["text"] for finding in cluster.get("/admin/status")[1]["findings"])


def test_a_process_is_killed_and_the_api_server_is_away_and_no_request_is_lost(
    tmp_path: Path, entries: RunningApi
) -> None:
    env = {**SECRET, "KUBECONFIG": str(entries.kubeconfig)}
    store = ["--discovery.store", "kubernetes", "--discovery.ttl", "2", "--set", "name=killed"]
    up = ["up", "--frontend.port", str(free_port()), "--frontend.processes", "2", *FAST, *store]
    up += ["--set", "models.sim.pools.main.replicas=2"]
    with served(tmp_path, *up, env=env) as cluster:
        assert ready(cluster) == {"main-0", "main-1"}
        joined = Served(["join", "--model", "sim", *store], tmp_path, env=env)
        try:
            joined.wait_up()
            until(lambda: len(ready(cluster)) == 3, LIMIT, lambda: joined.text)
            with load(cluster, 4) as callers:
                theirs = joined.children()
                os.kill(joined.process.pid, signal.SIGKILL)
                for pid in theirs:
                    os.kill(pid, signal.SIGKILL)
                left = {"main-0", "main-1"}
                until(lambda: all(set(workers(cluster)) == left for _ in range(ASKED)), LIMIT, lambda: cluster.text)
                # Away for longer than every ttl: membership is as it was, and serving goes on.
                fault(entries, kind="refuse", seconds=6.0)
                until(lambda: "store can't be read" in findings(cluster), LIMIT, lambda: cluster.text)
                count = sum(caller.whole for caller in callers)
                until(lambda: sum(caller.whole for caller in callers) > count + 20, LIMIT)
                assert ready(cluster) == {"main-0", "main-1"}
                until(lambda: "store can't be read" not in findings(cluster), LIMIT, lambda: cluster.text)
                assert ready(cluster) == {"main-0", "main-1"}
                # It hears of changes again.
                penstock(cluster, "scale", "main=1")
                until(lambda: len(ready(cluster)) == 1, LIMIT, lambda: cluster.text)
            assert not any(caller.failed for caller in callers)
        finally:
            joined.stop()
            until(lambda: reachable(entries), LIMIT)  # it is the next tests', too
