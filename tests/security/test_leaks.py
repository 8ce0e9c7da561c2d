"""Does a secret or a prompt's text turn up anywhere that somebody may look? Markers are planted, then looked for."""

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, post, request, served, until

pytestmark = pytest.mark.slow
API, ADMIN, CLUSTER = "sk-MARK-api-key", "sk-MARK-admin-key", "MARK-cluster-secret-0001"
TEXT = "MARK-of-a-prompt"
"""In prompts, messages, tools, documents and whatever else a client says."""
WRONG = "sk-MARK-wrong-key"
MARK = b"MARK-"
BEARER = {"authorization": f"Bearer {API}"}
ROOT = {"authorization": f"Bearer {ADMIN}"}


@pytest.fixture(scope="module", params=["text", "json"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("leaks")
    (folder / "c.yaml").write_text(
        f"frontend: {{port: {free_port()}, processes: 2,\n"
        "           limits: {prompt_max: 4000, body_max: 100000}}\n"
        f"logs: {{level: debug, format: {request.param}}}\n"
        "supervise: {restart_backoff: 0.2}\n"
        "models: {sim: {tokenizer: 'builtin:sim', pools: {main: {replicas: 2, sim: {timing: {speed_up: 10}}}}},\n"
        "         blind: {pools: {main: {replicas: 1, sim: {timing: {speed_up: 10}}}}}}\n"
    )
    env = {
        "PENSTOCK_FRONTEND__SECURITY__API_KEYS": API,
        "PENSTOCK_FRONTEND__SECURITY__ADMIN_KEYS": ADMIN,
        "PENSTOCK_CLUSTER_SECRET": CLUSTER,
        "PENSTOCK_ADMIN_KEY": ADMIN,
        "PENSTOCK_API_KEY": API,
    }
    with served(folder, "up", "c.yaml", env=env) as found:
        drive(found)
        yield found


def drive(cluster: Served) -> None:
    """Use everything, well and badly."""
    chat = {"model": "sim", "messages": [{"role": "user", "content": TEXT * 20}], "max_tokens": 6}
    tools = [{"type": "function", "function": {"name": "f", "description": TEXT, "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": TEXT})}}
    bodies: list[tuple[str, Any]] = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "tools": tools, "stream": True, "user": TEXT}),
        (
            "/v1/chat/completions",
            {**chat, "messages": [*chat["messages"], {"role": "assistant", "tool_calls": [call]}]},
        ),
        ("/v1/chat/completions", {**chat, "model": "blind"}),
        ("/v1/chat/completions", {**chat, "messages": [{"role": TEXT, "content": [{"type": "image_url", "x": TEXT}]}]}),
        (
            "/v1/chat/completions",
            {**chat, "stop": [TEXT], "chat_template_kwargs": {"a": TEXT}, "metadata": {"b": TEXT}},
        ),
        ("/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": TEXT * 5000}]}),
        ("/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": TEXT * 50_000}]}),
        ("/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": {"a": TEXT}}]}),
        ("/v1/chat/completions", {**chat, "temperature": TEXT, "max_tokens": TEXT}),
        ("/v1/chat/completions", {**chat, "nvext": {"cache_salt": TEXT, "extra_fields": ["worker_id", "timing"]}}),
        ("/v1/chat/completions", {**chat, "nvext": {"agent_hints": {"priority": TEXT}}}),
        ("/v1/chat/completions", {**chat, "nvext": TEXT}),
        ("/v1/completions", {"model": "sim", "prompt": TEXT * 10, "max_tokens": 4, "echo": True}),
        ("/v1/completions", {"model": "sim", "prompt": [TEXT, TEXT], "max_tokens": 4}),
        ("/v1/completions", {"model": "sim", "prompt": {"a": TEXT}}),
        ("/v1/embeddings", {"model": "sim", "input": TEXT}),
        ("/v1/tokenize", {"model": "sim", "prompt": TEXT}),
        ("/v1/responses", {"model": "sim", "input": TEXT}),
        ("/v1/messages", {"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/rerank", {"model": "sim", "query": TEXT, "documents": [TEXT]}),  # which the engine does not know
    ]
    headers = {**BEARER, "cookie": f"a={TEXT}", "x-penstock-cache-salt": TEXT, "referer": f"http://x/?{TEXT}"}
    for path, body in bodies:
        post(f"{cluster.url}{path}", body, headers)
    for raw in (b'{"model":"sim","messages":"' + TEXT.encode(), TEXT.encode(), b"\xff" + TEXT.encode()):
        request(f"{cluster.url}/v1/chat/completions", raw, BEARER)
    for wrong in ({"authorization": f"Bearer {WRONG}"}, {"authorization": WRONG}, {"x-api-key": WRONG}):
        request(f"{cluster.url}/v1/models?api_key={API}", None, wrong)
        request(f"{cluster.url}/admin/status?key={ADMIN}", None, wrong)
    basic = base64.b64encode(f"admin:{ADMIN}".encode()).decode()
    for path in ("/ui", "/admin/status", "/admin/requests", f"/admin/explain/x?key={ADMIN}"):
        request(f"{cluster.url}{path}", None, {"authorization": f"Basic {basic}"})
    raw_lines(cluster, f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization : Bearer {API}\r\n\r\n")
    raw_lines(cluster, f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{TEXT}\r\n\r\n")
    raw_lines(cluster, f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API}\x00\r\n\r\n")
    raw_lines(cluster, f"{TEXT}\r\n\r\n")
    broken_streams(cluster, chat)
    raw_lines(
        cluster,
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API}\r\ncontent-length: 500\r\n\r\n"
        + json.dumps(chat)[:100],
    )


def raw_lines(cluster: Served, text: str) -> None:
    host, port = cluster.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(text.encode())
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65_536):
            pass


def broken_streams(cluster: Served, chat: dict[str, Any]) -> None:
    """Kill the engine that answers, twice, so that requests are retried, moved and explained."""
    url = f"{cluster.url}/v1/chat/completions"
    for _ in range(2):
        body = json.dumps({**chat, "max_tokens": 80, "ignore_eos": True, "stream": True}).encode()
        sent = urllib.request.Request(url, data=body, headers={"content-type": "application/json", **BEARER})
        with urllib.request.urlopen(sent, timeout=30) as answer, contextlib.suppress(OSError):
            answer.readline()
            worker = answer.headers["x-penstock-worker"]
            pid = next(w["pid"] for w in status(cluster)["workers"] if w["id"] == worker)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            answer.read()
        until(lambda: len(status(cluster)["workers"]) == 3, 30)


def status(cluster: Served) -> dict[str, Any]:
    found: dict[str, Any] = request(f"{cluster.url}/admin/status", None, ROOT)[1]
    return found


def marked(text: bytes) -> str:
    """Return where a marker stands in a text, with what is around it; nothing where none does."""
    at = text.find(MARK)
    return "" if at < 0 else text[max(0, at - 200) : at + 100].decode("utf-8", "replace")


def test_it_was_driven(cluster: Served) -> None:
    requests = status(cluster)["requests"]
    assert requests["ok"] >= 6 and requests["rejected"] + requests["failed"] >= 1
    until(lambda: (cluster.run / "requests.jsonl").stat().st_size > 2000, 20)


def test_files_of_the_run_hold_hashes_and_lengths_never_text(cluster: Served) -> None:
    test_it_was_driven(cluster)
    folder = cluster.run.parent.parent
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("cluster.secret",)]
    assert {"requests.jsonl", "decisions.jsonl", "config.yaml", "run.json", "frontend-0.log"} <= {f.name for f in files}
    for path in files:
        assert not marked(path.read_bytes()), f"{path}: {marked(path.read_bytes())}"
    assert "MARK" not in cluster.text
    secret = cluster.run / "cluster.secret"
    assert secret.read_text().strip() == CLUSTER and secret.stat().st_mode & 0o077 == 0


PATHS = ("/health", "/v1/models", "/metrics", "/openapi.json", "/ui", "/admin/status", "/admin/requests?limit=1000")


@pytest.mark.parametrize("path", [*PATHS, "/admin/decisions?limit=1000"])
def test_no_answer_shows_them(cluster: Served, path: str) -> None:
    for keys in (BEARER, ROOT):
        _, body = request(f"{cluster.url}{path}", None, keys)
        assert not marked(json.dumps(body).encode()), marked(json.dumps(body).encode())


def test_explain_shows_no_text(cluster: Served) -> None:
    ids = [entry["id"] for entry in request(f"{cluster.url}/admin/requests?limit=1000", None, ROOT)[1]["requests"]]
    assert len(ids) > 8
    for found in ids:
        said = json.dumps(request(f"{cluster.url}/admin/explain/{found}", None, ROOT)[1])
        assert not marked(said.encode()), marked(said.encode())


def test_errors_repeat_no_key(cluster: Served) -> None:
    for path, headers in (
        ("/v1/models", {"authorization": f"Bearer {WRONG}"}),
        ("/admin/status", {"authorization": f"Bearer {WRONG}"}),
        ("/admin/status", BEARER),
        ("/v1/nothing", BEARER),
    ):
        code, body = request(f"{cluster.url}{path}", None, headers)
        assert code in (401, 403, 404) and not marked(json.dumps(body).encode())


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["doctor"], ["doctor", "--json"]])
def test_commands_show_none(cluster: Served, command: list[str]) -> None:
    env = {**os.environ, "PENSTOCK_ADMIN_KEY": ADMIN, "PENSTOCK_API_KEY": API}
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *command, "--url", cluster.url], capture_output=True, env=env, check=False
    )
    assert done.stdout and not marked(done.stdout + done.stderr), marked(done.stdout + done.stderr)


def test_config_show_hides_them(cluster: Served) -> None:
    env = {
        **os.environ,
        "PENSTOCK_FRONTEND__SECURITY__API_KEYS": API,
        "PENSTOCK_FRONTEND__SECURITY__ADMIN_KEYS": ADMIN,
        "PENSTOCK_CLUSTER_SECRET": CLUSTER,
    }
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "config", "show"], capture_output=True, env=env, check=False
    )
    assert done.returncode == 0 and b"kept secret" in done.stdout and not marked(done.stdout + done.stderr)


def test_no_process_has_them_in_its_arguments(cluster: Served) -> None:
    found = cluster.children()
    assert len(found) >= 5
    for pid in found:
        with contextlib.suppress(OSError):
            assert not marked(Path(f"/proc/{pid}/cmdline").read_bytes())


def test_engines_are_not_told_what_they_need_not_know(cluster: Served) -> None:
    """A simulated engine knows the cluster's secret, for its events, and no key of a client or an administrator."""
    for worker in status(cluster)["workers"]:
        env = Path(f"/proc/{worker['pid']}/environ").read_bytes()
        assert API.encode() not in env and ADMIN.encode() not in env
        assert CLUSTER.encode() in env


def test_a_stream_through_it_is_whole(cluster: Served) -> None:
    body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True})
    sent = urllib.request.Request(
        f"{cluster.url}/v1/chat/completions", data=body.encode(), headers={"content-type": "application/json", **BEARER}
    )
    with urllib.request.urlopen(sent, timeout=30) as answer:
        assert answer.read().rstrip().endswith(b"data: [DONE]")


def test_the_secret_goes_with_the_run(tmp_path: Path) -> None:
    with served(tmp_path, "up", "--frontend.port", "0", "--set", "models.sim.pools.main.replicas=1") as made:
        kept = made.run / "cluster.secret"
        assert len(kept.read_text().strip()) > 40 and kept.stat().st_mode & 0o077 == 0
        run = made.run
    assert not (run / "cluster.secret").exists() and (run / "run.json").exists()
