"""A cluster that is changed while it serves: scaled, drained, restarted, and no request is lost on the way."""

import http.client
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.adapters.listen_address import free_port
from penstock.cli.main import main
from tests.live.cluster import Served, alive, post, served, until

FAST = ["--set", "models.sim.pools.main.sim.timing.speed_up=20"]


def penstock(cluster: Served, *arguments: str, status: int = 0, limit: float = 120.0) -> str:
    """Run a command on a cluster, and return what it prints.

    It runs in this process, whose start takes longer than most commands; in one of its own where a thread calls, since
    what is printed is caught for the whole process.
    """
    words = [*arguments, "--url", cluster.url]
    if threading.current_thread() is not threading.main_thread():
        command = [sys.executable, "-m", "penstock", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        code, text = done.returncode, done.stdout + done.stderr
    else:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(words)
        text = out.getvalue() + err.getvalue()
    assert code == status, f"{arguments}: {text}\n{cluster.text}"
    return text


def asked(cluster: Served, *arguments: str) -> Any:
    return json.loads(penstock(cluster, *arguments, "--json").split("\n... ")[0].strip().split("\n\x1b")[0])


def workers(cluster: Served) -> dict[str, dict[str, Any]]:
    return {worker["id"]: worker for worker in cluster.get("/admin/status")[1]["workers"]}


class Caller(threading.Thread):
    """Asks again and again, over one connection for as long as the server keeps it or over a new one each time."""

    def __init__(self, url: str, number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.address = (parts.hostname, parts.port)
        self.number = number
        self.kept = number % 2 == 0
        self.streamed = number % 4 < 2
        self.stopped = stop
        self.whole = 0
        self.failed: list[str] = []

    def run(self) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self.stopped.is_set():
            if connection is None or not self.kept:
                connection = http.client.HTTPConnection(*self.address, timeout=60)
            try:
                self.ask(connection)
                if connection.sock is None:  # the answer said that the connection ends with it
                    connection = None
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                connection = None

    def ask(self, connection: http.client.HTTPConnection) -> None:
        text = f"caller {self.number} asks for the {self.whole}th time. " * 8
        body = {
            "model": "sim",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 24,
            "ignore_eos": True,
            "stream": self.streamed,
            "stream_options": {"include_usage": True} if self.streamed else None,
        }
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        raw = answer.read().decode()
        if answer.status != 200:
            raise ValueError(f"{answer.status} {raw}")
        if self.streamed:
            events = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
            if events[-1] != "[DONE]":
                raise ValueError(f"a stream ended with {events[-1]}")
            usage = json.loads(events[-2])["usage"]
        else:
            usage = json.loads(raw)["usage"]
        if usage["completion_tokens"] != 24:
            raise ValueError(f"{usage['completion_tokens']} tokens instead of 24")
        self.whole += 1


@contextmanager
def load(cluster: Served, callers: int = 8) -> Iterator[list[Caller]]:
    """Keep asking meanwhile; every request must be answered whole."""
    stop = threading.Event()
    found = [Caller(cluster.url, number, stop) for number in range(callers)]
    for caller in found:
        caller.start()
    until(lambda: all(caller.whole or caller.failed for caller in found), 60)
    try:
        yield found
        seen = [caller.whole for caller in found]
        until(lambda: all(c.whole > n or c.failed for c, n in zip(found, seen)), 60)
    finally:
        stop.set()
        for caller in found:
            caller.join(60)
    failed = [text for caller in found for text in caller.failed]
    assert not failed, f"{len(failed)} of {sum(c.whole for c in found)} failed: {failed[:5]}\n{cluster.text}"


def test_scaling_up_and_down_under_load_fails_no_request(tmp_path: Path) -> None:
    with served(tmp_path, "up", "--frontend.port", str(free_port()), *FAST) as cluster:
        before = workers(cluster)
        with load(cluster):
            told = penstock(cluster, "scale", "main=5")
            assert "5 of 5 ready (before: 4)" in told
            watched = [sys.executable, "-m", "penstock", "profile", cluster.url, "--watch", "1s", "--out", "seen"]
            done = subprocess.run(watched, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
            assert done.returncode == 0 and "passes of 5 engines" in done.stdout, done.stdout + done.stderr
            assert workers(cluster).keys() - before.keys() == {"main-4"}
            told = penstock(cluster, "scale", "main=2")
            assert all(f"main-{n} was drained" in told and "cut off" not in told for n in (2, 3, 4))
            after = workers(cluster)
            assert len(after) == 2 and after.keys() < before.keys(), "the youngest go"
        assert not alive(before["main-3"]["pid"])
        found = asked(cluster, "scale")["pools"]
        assert [(pool["name"], pool["desired"], pool["ready"]) for pool in found] == [("main", 2, 2)]
        for wrong, said in (("nope=1", "pools: main"), ("main=-1", "0 to 1024"), ("main=2000", "0 to 1024")):
            assert said in penstock(cluster, "scale", wrong, status=1)
        assert "is not POOL=N" in penstock(cluster, "scale", "main", status=2)


@pytest.mark.slow
def test_a_pool_can_be_emptied_and_filled(tmp_path: Path) -> None:
    small = ["--set", "models.sim.pools.main.replicas=1"]
    state = {"PENSTOCK_STATE_DIR": str(tmp_path / "state")}
    port = free_port()
    with served(tmp_path, "up", "--frontend.port", str(port), *FAST, *small, env=state) as cluster:
        penstock(cluster, "scale", "main=0")
        status, body, headers = cluster.chat()
        assert status == 503 and "retry-after" in headers, body
        file = json.loads((tmp_path / "state" / f"penstock-{port}.json").read_text())
        assert set(file) == {f"penstock-{port}_main"} and file[f"penstock-{port}_main"]["command"]
        assert not {"lease", "pid", "resources"} & set(file[f"penstock-{port}_main"])
        penstock(cluster, "scale", "main=1")
        assert cluster.chat()[0] == 200


@pytest.mark.slow
def test_a_drained_engine_finishes_what_it_has_and_stays_away_until_that_is_undone(tmp_path: Path) -> None:
    slow = ["--set", "models.sim.pools.main.replicas=2"]
    with served(tmp_path, "up", "--frontend.port", "0", *slow) as cluster:
        ends: list[tuple[int, Any]] = []
        pinned = {"x-penstock-worker": "main-1"}
        body = {"model": "sim", "messages": [{"role": "user", "content": "slowly"}], "max_tokens": 500}
        long = {**body, "ignore_eos": True}

        def ask() -> None:
            ends.append(post(f"{cluster.url}/v1/chat/completions", long, pinned)[:2])

        running = [threading.Thread(target=ask) for _ in range(3)]
        for thread in running:
            thread.start()
        until(lambda: workers(cluster)["main-1"]["active_requests"] == 3, 30)
        pid = workers(cluster)["main-1"]["pid"]
        told = penstock(cluster, "drain", "main-1")
        assert "3 requests finished" in told and "cut off" not in told
        for thread in running:
            thread.join(30)
        assert [status for status, _ in ends] == [200] * 3
        assert all(answer["usage"]["completion_tokens"] == 500 for _, answer in ends)
        assert not alive(pid)
        until(lambda: set(workers(cluster)) == {"main-0"}, 10)  # the frontend reads of it in the store
        penstock(cluster, "drain", "main-1", "--undo")
        until(lambda: set(workers(cluster)) == {"main-0", "main-1"}, 30)
        assert "is not drained" in penstock(cluster, "drain", "main-1", "--undo", status=1)
        assert "main-0, main-1, frontend-0" in penstock(cluster, "drain", "main-9", status=1)
        assert "only frontend" in penstock(cluster, "drain", "frontend-0", status=1)


@pytest.mark.slow
def test_at_the_deadline_of_a_drain_what_still_runs_goes_on_elsewhere(tmp_path: Path) -> None:
    slow = ["--set", "models.sim.pools.main.replicas=2"]
    with served(tmp_path, "up", "--frontend.port", "0", *slow, "--supervise.stop_grace", "0.2") as cluster:
        body = {
            "model": "sim",
            "messages": [{"role": "user", "content": "very slowly"}],
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        ends: list[str] = []

        def ask() -> None:
            connection = http.client.HTTPConnection(urlsplit(cluster.url).netloc, timeout=60)
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            ends.append(connection.getresponse().read().decode())

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: any(worker["active_requests"] for worker in workers(cluster).values()), 30)
        (busy,) = [name for name, worker in workers(cluster).items() if worker["active_requests"]]
        told = penstock(cluster, "drain", busy, "--timeout", "0.2")
        assert "1 were cut off there" in told
        thread.join(60)
        events = [line[6:] for line in ends[0].splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", events[-3:]
        assert json.loads(events[-2])["usage"]["completion_tokens"] == 400


@pytest.mark.slow
def test_an_attached_server_is_drained_and_let_in_again(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    with served(tmp_path / "below", "up", "--frontend.port", "0", *FAST) as below:
        urls = [worker["url"] for worker in list(workers(below).values())[:2]]
        with served(tmp_path, "attach", *urls, "--frontend.port", "0") as front:
            assert "runs on by itself" in penstock(front, "drain", "attached-0")
            assert workers(front)["attached-0"]["state"] == "draining"
            answered = {front.chat(f"question {n}")[2]["x-penstock-worker"] for n in range(6)}
            assert answered == {"attached-1"}
            assert "can't be scaled" in penstock(front, "scale", "attached=3", status=1)
            penstock(front, "drain", "attached-0", "--undo")
            until(lambda: workers(front)["attached-0"]["state"] == "ready", 30)


@pytest.mark.slow
def test_one_of_two_frontends_is_drained_under_load(tmp_path: Path) -> None:
    two = ["--frontend.port", str(free_port()), "--frontend.processes", "2", *FAST]
    with served(tmp_path, "up", *two) as cluster, load(cluster):
        assert "has ended" in penstock(cluster, "drain", "frontend-1")
        until(lambda: len(cluster.get("/admin/status")[1]["frontends"]) == 1, 20)
        penstock(cluster, "drain", "frontend-1", "--undo")
        until(lambda: len(cluster.get("/admin/status")[1]["frontends"]) == 2, 30)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rolling_restart_under_load_fails_no_request(tmp_path: Path, processes: int) -> None:
    arguments = ["--frontend.port", str(free_port()), "--frontend.processes", str(processes), *FAST]
    arguments += ["--set", "models.sim.pools.main.replicas=2"]
    with served(tmp_path, "up", *arguments) as cluster:
        before, family = {w["pid"] for w in workers(cluster).values()}, cluster.children()
        with load(cluster):
            told = penstock(cluster, "restart")
            assert "main-0, main-1, frontend-0" in told
        assert not before & {w["pid"] for w in workers(cluster).values()}
        assert len(workers(cluster)) == 2
        until(lambda: not any(alive(pid) for pid in family), 60)
        until(lambda: len(cluster.children()) == 4 + processes, 20)
    (journal,) = (cluster.run / "journal").glob("fleet-*")
    words = [sys.executable, "-m", "penstock", "replay", str(journal), "--json"]
    replayed = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    # Two engines and three successors: started, probed, published, acknowledged. Three of them: withdrawn, asked for
    # requests at least once, dead, stopped. The pool is added, begins and is restarted, and the frontend replaced.
    assert replayed["mismatch"] is None and replayed["problems"] == []
    assert replayed["records"] >= 5 * 4 + 3 * 4 + 4


def changes(cluster: Served) -> list[tuple[Any, ...]]:
    file = cluster.run / "changes.jsonl"
    until(file.exists, 20)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line["time"].endswith("Z") for line in lines)
    by_others = (line for line in lines if line["by"] != "supervisor")
    return [(line["key"], line["old"], line["new"], line["by"]) for line in by_others]


@pytest.mark.slow
def test_a_setting_is_taken_by_all_frontends_and_by_those_that_come_later(tmp_path: Path) -> None:
    two = ["--frontend.port", str(free_port()), "--frontend.processes", "2", *FAST]
    key = "admin-key-for-the-test"
    secret = {"PENSTOCK_FRONTEND__SECURITY__ADMIN_KEYS": key, "PENSTOCK_ADMIN_KEY": key}
    with served(tmp_path, "up", *two, "--set", "models.sim.pools.main.replicas=1", env=secret) as cluster:

        def told(*arguments: str, status: int = 0) -> str:
            words = [sys.executable, "-m", "penstock", *arguments, "--url", cluster.url, "--admin-key", key]
            done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == status, done.stdout + done.stderr
            return done.stdout + done.stderr

        assert "All 2 frontends took it" in told("set", "frontend.limits.prompt_max=20", "logs.level=debug")
        until(lambda: len(changes(cluster)) == 2, 20)
        by = {line[3] for line in changes(cluster)}
        assert len(by) == 1 and by.pop().startswith("key-"), "who did it is a name, never the key"
        assert changes(cluster)[0][:3] == ("frontend.limits.prompt_max", None, 20)
        outcomes = {cluster.chat("a prompt of more than twenty tokens " * 4)[0] for _ in range(8)}
        assert outcomes == {400}
        told("restart")
        outcomes = {cluster.chat("a prompt of more than twenty tokens " * 4)[0] for _ in range(8)}
        assert outcomes == {400}, "a new process goes by what was changed"
        assert "frontend.limits.prompt_max: 20 -> unset" in told("set", "frontend.limits.prompt_max=null")
        assert cluster.chat("a prompt of more than twenty tokens " * 4)[0] == 200
        for wrong, said in (
            ("router.mode=random", "start the cluster again"),
            ("models.sim.pools.main.replicas=3", "penstock scale"),
            ("router.attempts_max=0", "out of range"),
            ("router.atempts_max=2", "did you mean router.attempts_max?"),
        ):
            assert said in told("set", "router.attempts_max=2", wrong, status=1)
        shown = json.loads(told("set", "--json"))
        assert shown["settings"]["router.attempts_max"] == 3, "all or none"
        assert set(shown["changed"]) == {"logs.level"}
        assert "router.attempts_max" in told("set")


def test_sighup_reads_the_config_again(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"

    def write(text: str) -> None:
        config.write_text(f"frontend: {{port: 0}}\n{text}")

    small = "models: {sim: {tokenizer: 'builtin:sim', pools: {main: {replicas: %d}}}}\n"
    write(small % 1)
    with served(tmp_path, "up", str(config)) as cluster:
        write(small % 2 + "router: {mode: random, attempts_max: 5}\nsupervise: {drain_timeout: 5s}\n")
        cluster.process.send_signal(signal.SIGHUP)
        until(lambda: "router.attempts_max: 3 -> 5" in cluster.text, 20, lambda: cluster.text)
        assert "router.mode can't be changed while the cluster runs" in cluster.text
        assert "models.sim.pools.main.replicas can't be changed" in cluster.text and "penstock scale" in cluster.text
        until(lambda: cluster.get("/admin/settings")[1]["settings"]["router.attempts_max"] == 5, 20)
        assert ("router.attempts_max", 3, 5, "SIGHUP") in changes(cluster)
        write("router: {attempts_max: none}\n")
        cluster.process.send_signal(signal.SIGHUP)
        until(lambda: "nothing was changed" in cluster.text, 20, lambda: cluster.text)
        assert cluster.chat()[0] == 200
        assert cluster.get("/admin/settings")[1]["settings"]["router.attempts_max"] == 5


def kill_frontend(cluster: Served) -> str:
    """Kill the only frontend with -9; return its key in the store."""
    (key,) = cluster.keys("frontends/")
    pid = int(key.rpartition("-")[2])
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid), 20)
    return key


@pytest.mark.slow
def test_who_connects_while_the_frontend_is_down_waits_for_the_next_one(tmp_path: Path) -> None:
    small = ["--frontend.port", "0", "--set", "models.sim.pools.main.replicas=1", *FAST]
    with served(tmp_path, "up", *small) as cluster:
        key = kill_frontend(cluster)
        assert cluster.chat()[0] == 200, "the connection waited in the socket that the supervisor holds"
        until(lambda: key not in cluster.keys("frontends/"), 30)
        kill_frontend(cluster)
        assert cluster.chat()[0] == 200
