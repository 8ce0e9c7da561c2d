"""How does a test start a stock SGLang server that knows nothing of Penstock, on a CPU, and end it?"""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.adapters.listen_address import free_port
from tests.live.cluster import alive, request, until
from tests.sglang.setup.install import SERVER_ENV

MODEL = "tiny"
PAGE = 16
"""Tokens per block."""
TOKENS = 4096
"""KV tokens per server: few, so that a minute of load evicts many times over."""
START_LIMIT = 400.0
"""Seconds: 25 on an idle machine."""
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--max-total-tokens", str(TOKENS), "--max-running-requests", "8", "--dtype", "float32"),
)
FLAGS = (*CPU_FLAGS, "--page-size", str(PAGE), "--enable-metrics", "--enable-cache-report")


def pair_flags(role: str, port: int = 0) -> tuple[str, ...]:
    """Return the flags of one side of a pair whose sides meet at a port of the prefill server."""
    flags = ("--disaggregation-mode", role, "--disaggregation-transfer-backend", "nixl")
    if role == "decode":  # what it has no room for goes to host memory, which it otherwise takes for a GPU's
        return (*flags, "--disaggregation-decode-retraction-backup", "cpu_tensor")
    return (*flags, "--disaggregation-bootstrap-port", str(port))


RANKED = ("--dp-size", "2", "--max-running-requests", "2")
"""Two data-parallel ranks, with two places each."""
CORES = sorted(os.sched_getaffinity(0))
RANK_ENV = {"SGLANG_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
"""Cores of each rank: SGLang wants a NUMA node for each otherwise."""


class Rank(NamedTuple):
    """One cache of a server; see `tests.vllm.truth.Replayed`."""

    block: int
    replay_endpoint: str


class SglangServer:
    """One ``sglang.launch_server`` in a session of its own, with events that can be replayed.

    Args:
        flags: further ones.
    """

    block = PAGE

    def __init__(self, venv: Path, model: Path, log: Path, *, flags: Sequence[str] = ()) -> None:
        port, events, replay = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.replay_endpoint = f"tcp://127.0.0.1:{replay}"
        self._env = {**os.environ, **SERVER_ENV, **(RANK_ENV if "--dp-size" in flags else {})}
        self.log = log
        # A star makes it bind.
        config = {"publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
        self._command = [str(venv / "bin" / "python"), "-m", "sglang.launch_server", "--model-path", str(model)]
        self._command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), *FLAGS, *flags]
        self._command += ["--kv-events-config", json.dumps(config)]
        self.start()

    def rank(self, number: int) -> "Rank":
        """Return one of its ranks, whose ports are the first one's and those behind it."""
        head, _, port = self.replay_endpoint.rpartition(":")
        return Rank(PAGE, f"{head}:{int(port) + number}")

    def start(self) -> None:
        """Start it, or start it again at the same ports."""
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self._command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until it serves; fail with the end of its log where it ends instead."""
        until(lambda: self._answers() or self.process.poll() is not None, START_LIMIT, self.tail)
        assert self.process.poll() is None, f"SGLang ended with {self.process.returncode}:\n{self.tail()}"

    def kill(self) -> None:
        """End it and its processes at once, as a machine that fails would: told to end, it takes ten seconds."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def get(self, path: str) -> Any:
        status, body = request(self.url + path)
        assert status == 200, f"{self.url}{path} answered {status}: {body}"
        return body

    def _answers(self) -> bool:
        if not alive(self.process.pid):
            return False
        try:
            return request(f"{self.url}/ready")[0] == 200
        except OSError:
            return False
