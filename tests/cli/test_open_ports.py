"""Does the doctor tell which ports of this machine's engines others reach, of those started here and attached ones?"""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.cli.doctor_checks import open_ports
from penstock.cli.doctor_checks.finding import Finding
from penstock.cli.doctor_checks.open_ports import check_open_ports
from penstock.cli.shared.admin_client import AdminClient
from penstock.frontend.admin.admin_answers import ClusterStatus
from tests.cli.conftest import FakeCluster, worker

ENGINE = """
import socket, subprocess, sys
http, events = socket.create_server(("127.0.0.1", 0)), socket.create_server((sys.argv[1], 0))
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[events.fileno()])
number = events.getsockname()[1]
events.close()  # its child has it, as an engine core has its side channel
print(http.getsockname()[1], number, flush=True)
input()
child.communicate(b"\\n")
"""


class Engine:
    def __init__(self, bound: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, bound], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.http, self.events = map(int, self.process.stdout.readline().split())


@pytest.fixture(params=["0.0.0.0", "127.0.0.1"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(open_ports, "_outward", lambda bound: "127.0.0.1")  # a machine without a network
    engine = Engine(request.param)
    engine.bound = request.param  # type: ignore[attr-defined]
    yield engine
    engine.process.communicate("\n")


def said(cluster: FakeCluster, **row: object) -> list[Finding]:
    cluster.status["workers"] = [worker("main-0", **row)]
    return list(check_open_ports(AdminClient(cluster.url).get("/admin/status", ClusterStatus)))


@pytest.mark.parametrize("attached", [False, True])
def test_ports_that_are_bound_for_others_are_named(cluster: FakeCluster, engine: Engine, attached: bool) -> None:
    pid = None if attached else engine.process.pid
    [finding] = said(cluster, pid=pid, url=f"http://127.0.0.1:{engine.http}")
    if engine.bound == "0.0.0.0":  # type: ignore[attr-defined]
        assert finding.level == "warning" and f"from other machines at port {engine.events}" in finding.text
        assert "127.0.0.1" in (finding.hint or "") and str(engine.http) not in finding.text
    else:
        assert finding.level == "ok"


def test_an_engine_of_another_machine_or_none_is_not_looked_at(cluster: FakeCluster) -> None:
    assert said(cluster, url="http://192.0.2.7:8000", pid=1) == []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert said(cluster, url=f"http://127.0.0.1:{port}", pid=None) == []
