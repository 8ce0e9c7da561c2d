"""A served cluster as its user starts it: the `penstock` command in a process of its own, on a free port."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

START_LIMIT = 60.0
STOP_LIMIT = 40.0


class Served:
    """A running `penstock up` (or serve, attach): its endpoint, run folder and process."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        env: dict[str, str] | None = None,
        before: Sequence[str] = (),
        program: Sequence[str] = (sys.executable, "-m", "penstock"),
    ) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*before, *program, *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PENSTOCK_STATE_DIR": str(folder / "state"), **(env or {})},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_up(self, limit: float = START_LIMIT) -> "Served":
        until(lambda: "Ctrl-C" in self.text or self.process.poll() is not None, limit, lambda: self.text)
        assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.text}"
        return self

    def find(self, word: str) -> str:
        found = re.search(rf"^\s*{word}\s+(\S+)", self.text, re.MULTILINE)
        assert found, f"no {word} in:\n{self.text}"
        return found.group(1)

    @property
    def url(self) -> str:
        return self.find("Endpoint").removesuffix("/v1")

    @property
    def run(self) -> Path:
        return Path(self.find("Run"))

    def keys(self, prefix: str) -> list[str]:
        """Return the keys under a prefix in its store, also those whose owner is gone."""
        with closing(sqlite3.connect(self.run / "discovery" / "store.db")) as database:
            return [key for (key,) in database.execute("SELECT key FROM entries") if key.startswith(prefix)]

    def children(self) -> set[int]:
        """Return the pids of all its descendants that are alive."""
        found: set[int] = set()
        parents = {self.process.pid}
        while parents:
            parents = {pid for parent in parents for pid in _children(parent)} - found
            found |= parents
        return found

    def children_named(self, *words: bytes) -> list[int]:
        """Return those, rising, whose command line has these words; one may end while we look."""
        lines: dict[int, bytes] = {}
        for pid in sorted(self.children()):
            with suppress(OSError):
                lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
        return [pid for pid, line in lines.items() if all(word in line for word in words)]

    def stop(self, sign: int = signal.SIGINT) -> int:
        """Stop it as Ctrl-C does; return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(sign)
        try:
            status = self.process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join(5)
        return status

    # --- HTTP -------------------------------------------------------------------------------------------------------

    def get(self, path: str) -> tuple[int, Any]:
        return request(f"{self.url}{path}")

    def chat(self, text: str = "Hello", **fields: Any) -> tuple[int, Any, dict[str, str]]:
        body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
        return post(f"{self.url}/v1/chat/completions", body)


def holders(cluster: Served, prompt: str) -> set[str]:
    """Ask; return the workers in whose caches the router that took it expects part of the prompt."""
    status, body, headers = cluster.chat(prompt)
    assert status == 200, body
    decision = cluster.get(f"/admin/explain/{headers['x-request-id']}")[1]["decisions"][-1]
    return {candidate["target"][0] for candidate in decision["candidates"] if candidate["overlap_tokens"] > 0}


def _children(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def alive(pid: int) -> bool:
    """Tell whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(met: Callable[[], bool], limit: float, story: Callable[[], str] = lambda: "") -> None:
    """Wait for a condition; fail with ``story()`` when it is not met within ``limit`` seconds."""
    end = time.monotonic() + limit
    while not met():
        assert time.monotonic() < end, f"not within {limit:g} s:\n{story()}"
        time.sleep(0.02)


def request(url: str, data: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    status, body, _ = _send(url, data, headers)
    return status, body


def post(
    url: str, body: Any, headers: dict[str, str] | None = None, timeout: float = 30.0
) -> tuple[int, Any, dict[str, str]]:
    return _send(url, json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})}, timeout)


def _send(
    url: str, data: bytes | None, headers: dict[str, str] | None, timeout: float = 30.0
) -> tuple[int, Any, dict[str, str]]:
    sent = urllib.request.Request(url, data=data, headers=headers or {})
    try:
        with urllib.request.urlopen(sent, timeout=timeout) as answer:
            raw, status, got = answer.read(), answer.status, answer.headers
    except urllib.error.HTTPError as error:
        raw, status, got = error.read(), error.code, error.headers
    try:
        body = json.loads(raw)
    except ValueError:
        body = raw.decode(errors="replace")
    return status, body, {name.lower(): value for name, value in got.items()}


def stream(url: str, body: Any, timeout: float = 30.0) -> Iterator[str]:
    """Yield the data of each server-sent event of a streamed answer. ``timeout``: seconds between two of them."""
    sent = urllib.request.Request(
        url, data=json.dumps({**body, "stream": True}).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(sent, timeout=timeout) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield line[6:].decode().strip()


@contextmanager
def served(
    folder: Path,
    *arguments: str,
    env: dict[str, str] | None = None,
    before: Sequence[str] = (),
    start_limit: float = START_LIMIT,
) -> Iterator[Served]:
    """Start a command, wait until it is up, stop it afterwards and check that nothing is left behind.

    Args:
        before: words in front of it, such as those of another network namespace.
        start_limit: seconds until it must be up.
    """
    cluster = Served(list(arguments), folder, env, before)
    try:
        cluster.wait_up(start_limit)
        yield cluster
    finally:
        family = cluster.children()
        cluster.stop()
        left = {pid for pid in family if alive(pid)}
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes were left behind: {left}"
