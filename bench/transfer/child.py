"""A child process of the bench: reads one request per line, answers with one line, as JSON."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).resolve().parent


class Child:
    """Runs a script of this folder and asks it; the script's first line says that it is ready, and where."""

    pids: ClassVar[set[int]] = set()
    """Of those that run."""

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, str(HERE / script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pids.add(self._process.pid)
        self.hello = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return its answer; one that failed ends the bench."""
        self.tell(**request)
        return self._answer()

    def tell(self, **request: Any) -> None:
        """Send a request whose answer comes later, or never."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it by the end of its input."""
        self.pids.discard(self._process.pid)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # NIXL writes its log there, too
                return dict(json.loads(line))
        raise SystemExit(f"{self._process.args} ended before it answered")


def cpu_seconds() -> float:
    """Return what this process and its children have used so far, in all of their threads."""
    total = 0
    for process in ("self", *map(str, Child.pids)):
        for task in Path(f"/proc/{process}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def serve(hello: dict[str, Any], answer: Callable[..., dict[str, Any]]) -> None:
    """Answer requests of a `Child` until its input ends."""
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)
