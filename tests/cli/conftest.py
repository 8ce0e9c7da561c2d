"""A tiny server that answers /admin and /v1 as a cluster does, and a way to run commands in this process."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result

from penstock.cli.main import main

CANDIDATE = {
    "unit": "blocks",
    "prefill": 3.0,
    "decode": 1.0,
    "queue": 0.0,
    "transfer": 0.0,
    "overlap_tokens": 64,
    "active_requests": 1,
    "active_prefill_tokens": 12,
    "active_blocks": 1,
    "discount": 1.0,
    "index": "exact",
}
DECISION = {
    "request": "r-1",
    "attempt": 1,
    "at": 5_000_000_000,
    "model": "sim",
    "mode": "kv",
    "chosen": ["main-1", 0],
    "reason": "it holds 1 of 4 blocks",
    "isl": 256,
    "blocks": 4,
    "queued": 0.0,
    "candidates": [
        {**CANDIDATE, "target": ["main-0", 0], "total": 9.0, "overlap_blocks": 0},
        {**CANDIDATE, "target": ["main-1", 0], "total": 4.0, "overlap_blocks": 1},
    ],
    "excluded": [{"target": ["main-2", 0], "reason": "breaker is open"}],
    "expected_cached_tokens": 64,
    "temperature": 0.0,
}
CLOSED = {
    "way": "its prompt went to the engine as it was: it asks for several answers",
    "id": "r-1",
    "model": "sim",
    "outcome": "ok",
    "fault": "none",
    "status": 200,
    "reason": "",
    "arrived": 4_000_000_000,
    "closed": 6_000_000_000,
    "first": 4_250_000_000,
    "isl": 256,
    "osl": 16,
    "cached": 64,
    "expected_cached": 64,
    "queued": 0.001,
    "attempts": 1,
    "legs": [{"role": "aggregated", "target": ["main-1", 0], "dispatched": 4_001_000_000}],
}


def worker(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": name,
        "model": "sim",
        "role": "aggregated",
        "url": "http://127.0.0.1:1",
        "engine": "sim",
        "state": "ready",
        "why_not": None,
        "epoch": 1,
        "pid": 1,
        "since": 12.5,
        "index": "exact",
        "active_requests": 1,
        "active_prefill_tokens": 12,
        "active_blocks": 1,
        "resident_blocks": 70,
        "kv_blocks": 1000,
        "block_size": 64,
        "requests": 7,
        "failures": 0,
        "breaker": "closed",
        "kv_events": {"applied": 3, "gaps": 0, "lost": 0},
        **changes,
    }


def healthy_status() -> dict[str, Any]:
    return {
        "cluster": "test",
        "version": "0.1.0",
        "run": "runs/x",
        "endpoint": "http://127.0.0.1:8000",
        "uptime": 61.0,
        "draining": False,
        "mode": "kv",
        "models": [
            {"name": "sim", "tokenizer": "builtin:sim", "block_size": 64, "ready": True, "index": "exact", "workers": 2}
        ],
        "workers": [worker("main-0"), worker("main-1", kv_events=None, kv_blocks=None)],
        "queue": {"sim": {"length": 0}},
        "requests": {"inflight": 1, "total": 8, "ok": 7, "failed": 0, "rejected": 0, "cancelled": 0},
        "hit_rate": 0.5,
        "crashes": [],
        "findings": [],
        "frontends": ["frontend-0"],
        "planner": None,
        "tokenizers": {},
        "loop": {"longest": 0.01, "recent": 0.002},
        "router_faults": 0,
        "pools": [],
        "names": [
            {
                "name": "chat",
                "weights": {"sim": 19.0, "new": 1.0},
                "requests": {"sim": 1900, "new": 100},
                "shadows": [
                    {
                        "model": "new",
                        "share": 0.1,
                        "same": 3,
                        "different": 1,
                        "failed": 0,
                        "skipped": 2,
                        "seconds": 0.25,
                        "answered_seconds": 0.5,
                    }
                ],
            }
        ],
        "adapters": [
            {
                "name": "sql",
                "model": "tiny",
                "wanted": 2,
                "workers": ["main-0"],
                "loading": [],
                "why": "main-1 has no room for adapter sql: its 2 are in use",
            }
        ],
        "programs": [],
        "last_minute": {
            "ended": 7,
            **{f"ttft_{quantile}": 0.25 for quantile in ("p50", "p95", "p99")},
            **{f"itl_{quantile}": 0.0051 for quantile in ("p50", "p95", "p99")},
        },
    }


@dataclass
class Probed:
    """How every worker's engine answers completions: at the first time a prompt is seen, and after."""

    tokens: int = 256
    counted: int = 256
    predicted: int = 192
    cached: int | None = 192
    index: str = "exact"
    events: int = 3
    """Applied KV events, which grow with a new prompt by ``grows``."""
    grows: int = 1
    longest: int = 100_000
    """Characters of the longest prompt that is taken."""
    seen: set[str] = field(default_factory=set)
    pins: list[str] = field(default_factory=list)
    moves_to: str | None = None

    def answer(self, body: Any, pin: str) -> tuple[int, Any, dict[str, str]]:
        prompt = body["prompt"]
        self.pins.append(pin)
        if len(prompt) > self.longest:
            return 400, {"error": {"message": "the prompt is too long"}}, {}
        again = prompt in self.seen
        if not again:
            self.seen.add(prompt)
            self.events += self.grows
        details = None if self.cached is None else {"cached_tokens": self.cached if again else 0}
        usage = {"prompt_tokens": self.tokens, "completion_tokens": 1, "prompt_tokens_details": details}
        headers = {
            "x-penstock-worker": self.moves_to or pin,
            "x-penstock-request-id": f"probe-{pin}",
            "x-penstock-expected-cached-tokens": str(self.predicted if again else 0),
        }
        return 200, {"choices": [{"index": 0, "text": "a"}], "usage": usage}, headers

    def explained(self, worker: str) -> Any:
        chosen = {**CANDIDATE, "target": [worker, 0], "total": 4.0, "overlap_blocks": 1, "index": self.index}
        decision = {**DECISION, "isl": self.counted, "chosen": [worker, 0], "candidates": [chosen]}
        return {"request": None, "decisions": [decision]}


@dataclass
class FakeCluster:
    """What the server answers, for a test to change; and what it was asked."""

    url: str = ""
    status: dict[str, Any] = field(default_factory=healthy_status)
    key: str | None = None
    pieces: tuple[str, ...] = ("Hel", "lo")
    chat_error: tuple[int, Any] | None = None
    asked: list[tuple[str, Any]] = field(default_factory=list)
    models: tuple[str, ...] = ("sim",)
    roots: dict[str, str] = field(default_factory=dict)
    probed: "Probed" = field(default_factory=lambda: Probed())

    def answer(self, path: str) -> tuple[int, Any]:
        if path == "/admin/status":
            for row in self.status["workers"]:
                if row["kv_events"] is not None:
                    row["kv_events"]["applied"] = self.probed.events
            return 200, self.status
        if path.startswith("/admin/explain/probe-"):
            return 200, self.probed.explained(path.removeprefix("/admin/explain/probe-"))
        if path.startswith("/admin/requests"):
            return 200, {"requests": [CLOSED]}
        if path == "/admin/explain/r-1":
            return 200, {"request": CLOSED, "decisions": [DECISION]}
        if path.startswith("/admin/explain/"):
            return 404, {"error": {"message": "no request x is known", "hint": "the newest 4096 are kept"}}
        if path == "/v1/models":
            return 200, {"data": [{"id": name, "root": self.roots.get(name)} for name in self.models]}
        return 404, {"detail": "what?"}

    def events(self) -> Iterator[dict[str, Any]]:
        for piece in self.pieces:
            yield {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
        yield {"choices": [], "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    cluster: FakeCluster

    def do_GET(self) -> None:
        self.cluster.asked.append((self.path, None))
        key = self.cluster.key
        if key is not None and self.headers.get("authorization") != f"Bearer {key}":
            self._json(401, {"error": {"message": "no key"}})
        else:
            self._json(*self.cluster.answer(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.cluster.asked.append((self.path, body))
        if self.path == "/v1/completions" and not body.get("stream"):
            pin = self.headers.get("x-penstock-worker", "")
            self._json(*self.cluster.probed.answer(body, pin))
            return
        if self.cluster.chat_error is not None:
            self._json(*self.cluster.chat_error)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("x-penstock-worker", "main-1")
        self.send_header("x-penstock-request-id", "r-1")
        self.end_headers()
        self.wfile.write(b": heartbeat\n\n")
        for event in self.cluster.events():
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """A fake cluster on a port of the system's choice."""
    made = FakeCluster()
    handler = type("Handler", (_Handler,), {"cluster": made})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


class Penstock:
    """Runs `main`, as the console script does, with its output captured."""

    def __init__(self, runner: CliRunner) -> None:
        self.runner = runner

    def __call__(self, *arguments: str, input: str | None = None, env: dict[str, str] | None = None) -> Result:
        import click

        @click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
        @click.argument("words", nargs=-1, type=click.UNPROCESSED)
        def run(words: tuple[str, ...]) -> None:
            raise SystemExit(main(list(words)))

        result = self.runner.invoke(run, ["--", *arguments], input=input, env=env)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
        return result


@pytest.fixture
def penstock(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Penstock:
    """Run a command in an empty folder and with none of the caller's PENSTOCK_* names."""
    import os

    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return Penstock(CliRunner())
