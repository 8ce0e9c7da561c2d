"""Is a process without the cluster's secret kept out of a running cluster, and is that seen by its operator?"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.adapters.listen_address import free_port
from penstock.adapters.stores.sqlite_store import SqliteStore
from penstock.config.cluster_secret_file import SECRET_ENV
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.runtime.cluster_state.membership import MembershipEntry, key_of
from tests.live.cluster import Served, request, served, until

EVIL = WorkerCard(id=WorkerId("evil"), epoch=1, model="sim", url="http://127.0.0.1:9")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    arguments = ["--set", "models.sim.pools.main.replicas=1", "--set", "models.sim.pools.main.sim.timing.speed_up=20"]
    folder = tmp_path_factory.mktemp("trust")
    with served(folder, "up", "--frontend.port", str(free_port()), "--frontend.processes", "2", *arguments) as found:
        yield found


def status(cluster: Served) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get("/admin/status")[1]
    return found


def findings(cluster: Served) -> str:
    return json.dumps(status(cluster)["findings"])


def apart(cluster: Served) -> bool:
    """Say whether the stranger is nobody's neighbour; it has the port as well, so it may be the one that answers."""
    frontends = status(cluster)["frontends"]
    return len(frontends) == 1 or not any(name.startswith("frontend-9-") for name in frontends)


def test_frontends_that_share_the_secret_hear_each_other(cluster: Served) -> None:
    until(lambda: len(status(cluster)["frontends"]) == 2, 20)
    assert cluster.chat()[0] == 200
    assert "secret" not in findings(cluster)
    notes = [line for line in cluster.get("/metrics")[1].splitlines() if line.startswith("penstock_notes_total")]
    for kind in ("refused", "foreign", "stranger", "wrong_secret"):
        assert kind not in "".join(notes), "nothing was refused"


@pytest.mark.parametrize("secret", [None, ClusterSecret("the secret of another cluster")])
def test_a_foreign_writer_can_not_add_a_worker_and_is_seen(cluster: Served, secret: ClusterSecret | None) -> None:
    async def write() -> None:
        store = SqliteStore(cluster.run / "discovery", secret=secret)
        await store.put(key_of(EVIL.id), msgspec.json.encode(MembershipEntry(card=EVIL)))

    asyncio.run(write())
    until(lambda: "not signed with this cluster's secret" in findings(cluster), 20)
    assert [worker["id"] for worker in status(cluster)["workers"]] == ["main-0"]
    assert [cluster.chat(f"still ours {n}")[0] for n in range(10)] == [200] * 10
    assert 'kind="store_entry_foreign"' in cluster.get("/metrics")[1]
    told = subprocess.run(
        [sys.executable, "-m", "penstock", "doctor", "--url", cluster.url], capture_output=True, text=True, check=False
    )
    assert "not signed with this cluster's secret" in told.stdout and SECRET_ENV in told.stdout


def test_a_frontend_with_another_secret_stays_outside(cluster: Served) -> None:
    env = {**os.environ, SECRET_ENV: "the secret of another cluster"}
    command = [sys.executable, "-m", "penstock.frontend.frontend_process", "--run", str(cluster.run), "--index", "9"]
    stranger = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert stranger.stdout is not None
        said = json.loads(stranger.stdout.readline())
        assert apart(cluster)
        until(lambda: "not signed" in json.dumps(request(f"{said['admin_url']}/admin/status")[1]), 20)
        theirs = request(f"{said['admin_url']}/admin/status?scope=process")[1]["workers"]
        assert "main-0" not in [worker["id"] for worker in theirs]
        for _ in range(4):
            assert apart(cluster)
    finally:
        stranger.terminate()
        stranger.wait(30)
        stranger.stdout.close()


def test_join_needs_the_secret_of_the_same_user(cluster: Served, tmp_path: Path) -> None:
    secret = cluster.run / "cluster.secret"
    secret.chmod(0o644)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "join", "--url", cluster.url],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2 and "chmod 600" in done.stdout + done.stderr
    finally:
        secret.chmod(0o600)
    with served(tmp_path, "join", "--url", cluster.url):
        until(lambda: len(status(cluster)["workers"]) == 2, 20)
        assert all(worker["index"] == "exact" for worker in status(cluster)["workers"])
    until(lambda: len(status(cluster)["workers"]) == 1, 20)
