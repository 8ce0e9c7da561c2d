"""`penstock epp` and `penstock picker --for envoy` as their user starts them, with the real Envoy in front."""

import http.client
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.listen_address import free_port
from penstock.kernel.values import JsonObject
from penstock_kubernetes.picker.envoy_config import EnvoyPlan, envoy_config
from tests.kubernetes.picker.envoy import EXTENSION, patched
from tests.kubernetes.programs import program
from tests.live.cluster import Served, post, request, served, until
from tests.live.test_operate import penstock
from tests.servers import free_ports

pytestmark = pytest.mark.slow
SIM = ("--models.sim.pools.main.replicas", "2", "--models.sim.pools.main.sim.timing.speed_up", "5")


@contextmanager
def envoy(folder: Path, config: dict[str, Any], port: int) -> Iterator[str]:
    path = folder / f"envoy-{port}.json"
    path.write_text(json.dumps(config))
    words = [str(program("envoy")), "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: answers(url), 20)
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return request(f"{url}/v1/models")[0] == 200
    except OSError:
        return False


def pickers(cluster: Served) -> list[int]:
    """Return the pids of the picker processes."""
    return cluster.children_named(b"picker_process")


def chat(text: str, **more: object) -> dict[str, object]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 40, **more}


def stream_of(url: str, text: str, got: list[str]) -> None:
    """Ask for a stream; note its text, or how it failed."""
    data = json.dumps(chat(text, stream=True, max_tokens=1000)).encode()
    asked = urllib.request.Request(f"{url}/v1/chat/completions", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            got.append(answer.read().decode())
    except urllib.error.HTTPError as error:
        got.append(f"refused {error.code} {error.read()[:120]!r}")
    except (OSError, http.client.HTTPException) as error:
        got.append(f"broken {type(error).__name__}")


@pytest.mark.parametrize("way", ["watched", "unwatched", "extension"])
def test_a_picker_killed_under_load_loses_nothing_that_was_answered(way: str, tmp_path: Path) -> None:
    """As we render Envoy's config; with bodies in duplex mode Envoy breaks what passes, and the client can see that."""
    program("envoy")
    port, listen = free_ports(2)
    words = ["picker", "--for", "envoy", "--picker.listen_port", str(listen), "--picker.fallbacks", "0", *SIM]
    words += ["--frontend.port", "0"]
    flags = ["--listen", f"127.0.0.1:{port}", "--failure", "close"]
    config = rendered(*words, *flags, *(["--no-watch-answers"] if way == "unwatched" else []))
    if way == "extension":
        patched(config, mode=EXTENSION)
    with served(tmp_path, *words) as cluster, envoy(tmp_path, config, port) as url:
        status, _, headers = post(f"{url}/v1/chat/completions", chat("first"))
        assert status == 200
        explained = cluster.get(f"/admin/explain/{headers['x-request-id']}")[1] if "x-request-id" in headers else None
        assert explained is None or explained["decisions"]
        texts: list[str] = []

        def client(name: int) -> None:
            for number in range(8):
                stream_of(url, f"client {name} asks {number}", texts)
                if (name, number) == (0, 2):
                    os.kill(pickers(cluster)[0], signal.SIGKILL)

        clients = [threading.Thread(target=client, args=(name,)) for name in range(6)]
        for one in clients:
            one.start()
        for one in clients:
            one.join(120)
        assert len(texts) == 48
        answered = [text for text in texts if not text.startswith(("refused", "broken"))]
        assert answered and all(text.endswith("data: [DONE]\n\n") for text in answered), (
            "no answer is cut without a sign"
        )
        broken = [text for text in texts if text.startswith("broken")]
        assert bool(broken) == (way == "extension"), "what had begun came whole, but where Envoy does not let it"
        until(lambda: post(f"{url}/v1/chat/completions", chat("again"))[0] == 200, 30)


def rendered(*words: str) -> JsonObject:
    """Return Envoy's config as the command prints it."""
    command = [sys.executable, "-m", "penstock", *words, "--render"]
    config: JsonObject = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return config


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP], ids=lambda one: one.name)
def test_one_of_two_pickers_that_goes_under_load_costs_no_answer(signal_number: int, tmp_path: Path) -> None:
    """Two `penstock epp`, as the pods of a Deployment: one gets SIGTERM or hangs, and no request is refused.

    Of one that is killed, the requests that are in choice are refused: one per client at most.
    """
    program("envoy")
    port, *listens = free_ports(3)
    with served(tmp_path, "up", "--frontend.port", "0", *SIM) as engines:
        urls = [worker["url"] for worker in engines.get("/admin/status")[1]["workers"]]
        words = ["epp", "--picker.tls", "false", "--frontend.port", "0", *urls]
        plan = EnvoyPlan(
            listen=f"127.0.0.1:{port}",
            pickers=[f"127.0.0.1:{listen}" for listen in listens],
            engines=[url.removeprefix("http://") for url in urls],
        )
        folders = [tmp_path / "one", tmp_path / "other"]
        for folder in folders:
            folder.mkdir()
        with (
            served(folders[0], *words, "--picker.listen_port", str(listens[0])) as going,
            served(folders[1], *words, "--picker.listen_port", str(listens[1])),
            envoy(tmp_path, envoy_config(plan), port) as url,
        ):
            texts: list[str] = []
            over = threading.Event()

            def client(name: int) -> None:
                while not over.is_set():
                    stream_of(url, f"client {name} asks {len(texts)}", texts)

            clients = [threading.Thread(target=client, args=(name,)) for name in range(6)]
            for one in clients:
                one.start()
            until(lambda: len(texts) > 12, 30)
            sent_to = [going.process.pid] if signal_number == signal.SIGTERM else pickers(going)
            try:
                for pid in sent_to:
                    os.kill(pid, signal_number)
                if signal_number == signal.SIGTERM:
                    going.process.wait(60)
                count = len(texts)
                until(lambda: len(texts) > count + 12, 30)
            finally:
                over.set()
                for one in clients:
                    one.join(60)
                if signal_number == signal.SIGSTOP:
                    for pid in sent_to:
                        os.kill(pid, signal.SIGCONT)
            lost = [text[:160] for text in texts if not text.endswith("data: [DONE]\n\n")]
            if signal_number == signal.SIGKILL:  # what was in choice there; no answer has begun then
                assert len(lost) <= 6 and all(text.startswith("refused 503") for text in lost), lost
            else:
                assert not lost, f"{len(lost)} of {len(texts)}: {lost[:3]}"


def test_a_picker_that_hangs_is_left_out_until_it_goes_on(tmp_path: Path) -> None:
    program("envoy")
    port, listen = free_ports(2)
    with served(tmp_path, "up", "--frontend.port", "0", *SIM) as engines:
        urls = [worker["url"] for worker in engines.get("/admin/status")[1]["workers"]]
        plan = EnvoyPlan(
            listen=f"127.0.0.1:{port}",
            pickers=[f"127.0.0.1:{listen}"],
            engines=[url.removeprefix("http://") for url in urls],
            fail_open=True,
        )
        (folder := tmp_path / "epp").mkdir()
        words = ["epp", "--picker.tls", "false", "--picker.listen_port", str(listen), "--frontend.port", "0", *urls]
        with served(folder, *words) as cluster, envoy(tmp_path, envoy_config(plan), port) as url:

            def seconds() -> float:
                began = time.monotonic()
                status, answer, _ = post(f"{url}/v1/chat/completions", chat("hello"))
                assert status == 200, answer
                return time.monotonic() - began

            def chosen() -> int:
                return sum(worker["requests"] for worker in cluster.get("/admin/status")[1]["workers"])

            seconds()
            before = chosen()
            assert before > 0
            [pid] = pickers(cluster)
            os.kill(pid, signal.SIGSTOP)
            try:
                first, second = seconds(), seconds()
            finally:
                os.kill(pid, signal.SIGCONT)
            assert second < first / 2, "only the first one waited for it"
            until(lambda: seconds() and chosen() > before + 2, 30)


def test_a_restarted_picker_is_asked_again_and_no_request_is_lost(tmp_path: Path) -> None:
    """`penstock restart` under load, with the config that we render."""
    program("envoy")
    port, listen = free_ports(2)
    words = ["picker", "--for", "envoy", "--picker.listen_port", str(listen), "--picker.fallbacks", "0", *SIM]
    words += ["--frontend.port", str(free_port())]
    config = rendered(*words, "--listen", f"127.0.0.1:{port}", "--failure", "close")
    with served(tmp_path, *words) as cluster, envoy(tmp_path, config, port) as url:
        assert post(f"{url}/v1/chat/completions", chat("first"))[0] == 200
        texts: list[str] = []
        over = threading.Event()

        def client(name: int) -> None:
            number = 0
            while not over.is_set():
                stream_of(url, f"client {name} asks {number}", texts)
                number += 1

        clients = [threading.Thread(target=client, args=(name,)) for name in range(4)]
        for one in clients:
            one.start()
        before = pickers(cluster)
        penstock(cluster, "restart")
        until(lambda: pickers(cluster) and not set(pickers(cluster)) & set(before), 60, lambda: cluster.text)
        count = len(texts)
        until(lambda: len(texts) > count + 8, 30)
        over.set()
        for one in clients:
            one.join(60)
        broken = [text for text in texts if not text.endswith("data: [DONE]\n\n")]
        assert not [text for text in broken if not text.startswith("refused 503")], "what had begun came whole"
        assert not broken, f"{len(broken)} of {len(texts)} were refused"
        status, _, headers = post(f"{url}/v1/chat/completions", chat("again"))
        assert status == 200
        until(lambda: cluster.get(f"/admin/explain/{headers['x-request-id']}")[0] == 200, 10)


def test_two_pickers_share_their_placements(tmp_path: Path) -> None:
    program("envoy")
    port, listen = free_port(), two_ports()
    words = ["epp", "--picker.tls", "false", "--picker.listen_port", str(listen), "--frontend.processes", "2"]
    with served(tmp_path, "up", "--frontend.port", "0", *SIM) as engines:
        urls = [worker["url"] for worker in engines.get("/admin/status")[1]["workers"]]
        with served(tmp_path, *words, "--frontend.port", str(free_port()), *urls) as cluster:
            places = [url.removeprefix("http://") for url in urls]
            plan = EnvoyPlan(f"127.0.0.1:{port}", [f"127.0.0.1:{listen}"], places)  # asks the first picker only
            # The command waits for one of the two only.
            until(lambda: [len(each) for each in workers_of(cluster)] == [2, 2], 20)
            with envoy(tmp_path, envoy_config(plan), port) as url:
                texts: list[str] = []
                shared = threading.Event()

                def client(name: int) -> None:
                    while not shared.is_set():
                        stream_of(url, f"a long story {name} " * 50, texts)

                clients = [threading.Thread(target=client, args=(name,)) for name in range(4)]
                for one in clients:
                    one.start()
                try:
                    until(lambda: all(load > 0 for load in loads(cluster)), 20, lambda: f"{loads(cluster)} {texts}")
                finally:
                    shared.set()
                    for one in clients:
                        one.join(60)
                assert texts and all(text.endswith("data: [DONE]\n\n") for text in texts)
                until(lambda: loads(cluster) == [0, 0], 20, lambda: str(loads(cluster)))


def two_ports() -> int:
    """Return a free port whose next one is free as well, outside of those that the system hands out."""
    for port in range(20_000 + os.getpid() % 5000, 32_000, 2):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise AssertionError("no two ports are free")


def loads(cluster: Served) -> list[int]:
    """Return the active requests that each picker process knows of, over all workers."""
    return [sum(worker["active_requests"] for worker in workers) for workers in workers_of(cluster)]


def workers_of(cluster: Served) -> list[list[dict[str, Any]]]:
    """Return the workers that each picker process knows."""
    with closing(sqlite3.connect(cluster.run / "discovery" / "store.db")) as database:
        entries = [bytes(one) for key, one in database.execute("SELECT key, entry FROM entries") if "frontends/" in key]
    urls = [re.findall(rb"admin_url\W+(http://[0-9.:]+)", entry)[0].decode() for entry in entries]
    answered = [request(f"{url}/admin/status?scope=process") for url in urls]
    return [body["workers"] for _, body in answered]
