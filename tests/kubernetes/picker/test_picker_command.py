"""`penstock picker --for nginx|haproxy` as its user starts it, before simulated engines and a real gateway."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.adapters.listen_address import free_port
from tests.kubernetes.programs import program
from tests.live.cluster import post, request, served, until


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="penstock-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nginx", "haproxy"])
def test_a_picker_killed_under_load_loses_nothing_that_was_answered(kind: str, folder: Path, tmp_path: Path) -> None:
    binary, port = str(program(kind)), free_port()
    words = ["picker", "--for", kind, "--picker.folder", str(folder), "--frontend.port", "0"]
    words += ["--models.sim.pools.main.replicas", "2", "--models.sim.pools.main.sim.timing.speed_up", "10"]
    words += ["--supervise.drain_timeout", "5s"]  # requests whose report was lost with the killed picker end then
    shown = subprocess.run(
        [sys.executable, "-m", "penstock", *words, "--render", "--listen", f"127.0.0.1:{port}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert str(folder / ("nginx.conf" if kind == "nginx" else "haproxy.cfg")) in shown
    workers = folder / ("workers.conf" if kind == "nginx" else "workers.cfg")
    with served(tmp_path, *words) as cluster:
        until(lambda: workers.read_text().count("127.0.0.1:") >= 4, 10)
        start = ["-p", str(folder), "-c", "nginx.conf", "-g", "daemon off;"]
        if kind == "haproxy":
            start = ["-db", "-f", str(folder / "haproxy.cfg"), "-f", str(workers)]
        gateway = subprocess.Popen([binary, *start], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: answers(f"{url}/v1/models"), 10)
            status, _, headers = post(f"{url}/v1/chat/completions", chat("first"))
            assert status == 200
            explained = json.dumps(cluster.get(f"/admin/explain/{headers['x-request-id']}")[1])
            assert '"decisions"' in explained, "a picked request is explained as any other"
            answers_got = under_load(url, kill=cluster.children_named(b"picker_process")[0])
            assert all(text.endswith("data: [DONE]\n\n") for text in answers_got), "every stream is whole"
            until(lambda: request(f"{cluster.url}/health")[0] == 200, 20)
            status, _, headers = post(f"{url}/v1/chat/completions", chat("again"))
            assert status == 200
            until(lambda: cluster.get(f"/admin/explain/{headers['x-request-id']}")[0] == 200, 10)
        finally:
            gateway.send_signal(signal.SIGTERM)
            gateway.wait(10)


@pytest.mark.slow
def test_two_processes_are_asked_in_turn_and_hear_of_their_own_ends(folder: Path, tmp_path: Path) -> None:
    binary, port = str(program("nginx")), free_port()
    words = ["picker", "--for", "nginx", "--picker.folder", str(folder), "--frontend.port", str(free_port())]
    words += ["--models.sim.pools.main.replicas", "2", "--models.sim.pools.main.sim.timing.speed_up", "10"]
    words += ["--frontend.processes", "2"]
    rendering = [sys.executable, "-m", "penstock", *words, "--render", "--listen", f"127.0.0.1:{port}"]
    subprocess.run(rendering, capture_output=True, check=True)
    with served(tmp_path, *words) as cluster:
        until(lambda: (folder / "workers.conf").read_text().count("127.0.0.1:") >= 4, 10)
        logs = [cluster.run / "logs" / f"frontend-{index}.log" for index in range(2)]
        # nginx leaves one that does not listen yet out for ten seconds.
        until(lambda: all(log.exists() and "nginx asks at" in log.read_text() for log in logs), 20)
        start = [binary, "-p", str(folder), "-c", "nginx.conf", "-g", "daemon off;"]
        gateway = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: answers(f"{url}/v1/models"), 10)
            for number in range(12):
                status, _, headers = post(f"{url}/v1/chat/completions", chat(f"number {number} " * 20))
                assert status == 200
                explain = f"/admin/explain/{headers['x-request-id']}"
                until(lambda path=explain: cluster.get(path)[0] == 200, 10)
            until(lambda: both_chose(url, logs), 20, lambda: "both processes choose")
            idle = lambda: [worker["active_requests"] for worker in cluster.get("/admin/status")[1]["workers"]]  # noqa: E731
            until(lambda: idle() == [0, 0], 10, lambda: str(idle()))
        finally:
            gateway.send_signal(signal.SIGTERM)
            gateway.wait(10)


def both_chose(url: str, logs: list[Path]) -> bool:
    """Ask once more, and say whether each process chose: nginx may have left one out for ten seconds."""
    assert post(f"{url}/v1/chat/completions", chat("once more"))[0] == 200
    return all("POST /v1/chat/completions" in log.read_text() for log in logs)


def chat(text: str, **more: object) -> dict[str, object]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 40, **more}


def answers(url: str) -> bool:
    try:
        return request(url)[0] == 200
    except OSError:
        return False


def under_load(url: str, kill: int) -> list[str]:
    """Ask from several threads, kill a process between, and return every answer."""
    texts: list[str] = []

    def client(name: int) -> None:
        for number in range(12):
            data = json.dumps(chat(f"client {name} asks {number}", stream=True)).encode()
            asked = urllib.request.Request(f"{url}/v1/chat/completions", data, {"content-type": "application/json"})
            with urllib.request.urlopen(asked, timeout=30) as answer:
                texts.append(answer.read().decode())
            if (name, number) == (0, 3):
                os.kill(kill, signal.SIGKILL)

    clients = [threading.Thread(target=client, args=(name,)) for name in range(6)]
    for one in clients:
        one.start()
    for one in clients:
        one.join(120)
    assert len(texts) == 72, f"{72 - len(texts)} requests failed"
    return texts
