"""How does a test start a vLLM server that knows nothing of Penstock, as a team would run it, and end it?"""

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.kernel.pass_report import STATS_ENV
from tests.live.cluster import alive, request, until

MODEL = "tiny"
BLOCK = 32
"""Tokens per block: attention on CPU takes multiples of 32."""
BLOCKS = 256
"""KV blocks per server, one of which vLLM keeps for itself: few, so that a minute of load evicts many times over."""
ADAPTER, RANK = "poet", 8
"""LoRA adapter that lies below the checkpoint (setup/checkpoint.py), and its rank."""
START_LIMIT = 400.0
"""Seconds: 25 on an idle machine, 170 were seen on a busy one."""
STOP_LIMIT = 60.0
REPLAY_STEPS = 100_000
"""Batches that a server keeps for replay: all of a run, so that the truth can be asked for from the beginning."""

CPU_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # shows /reset_prefix_cache
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # see MAY_FORK in setup/install.py
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # as two processes, one polls for the other's answer: most of a core
}
"""What a server needs to run on two cores without a network."""
SPAWNED = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""For servers that start as everybody's do: those of ``adapters``, and those whose start is measured."""
TIMED_PASSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""For a server whose passes are judged by their times. In one process the plug-in told passes of less than a
millisecond, and a policy believed that one replica answers everything. We take it that vLLM's CPU executor has run a
pass there before vLLM looks at its clock, but have not looked into vLLM for it."""
CPU_FLAGS = ("--dtype", "float32", "--max-num-seqs", "16", "--enforce-eager")
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
"""Of a render process too: without them it refuses chats with tools."""
MORE_FLAGS = shlex.split(os.environ.get("PENSTOCK_VLLM_FLAGS", ""))
"""For a machine with a GPU, such as ``--attention-backend TRITON_ATTN --gpu-memory-utilization 0.2``."""


def events_config(topic: str, endpoint: str = "tcp://*:0", replay: str = "tcp://*:0") -> str:
    """Return --kv-events-config: a star makes it bind, and port 0 takes a free one, told at /kv_event_sources."""
    return json.dumps(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": replay,
            "topic": topic,
            "buffer_steps": REPLAY_STEPS,
        }
    )


class VllmServer:
    """One ``vllm serve`` in a session of its own."""

    block = BLOCK

    def __init__(
        self,
        venv: Path,
        model: Path,
        port: int,
        log: Path,
        *,
        flags: Sequence[str] = (),
        stats: str | None = None,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.stats = stats
        """Endpoint of our plug-in in it; None leaves the plug-in inert."""
        command = [str(venv / "bin" / "vllm"), "serve", str(model), "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", *CPU_FLAGS]
        command += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS)]
        command += ["--enable-prompt-tokens-details", "--enable-request-id-headers", *flags, *MORE_FLAGS]
        path = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **CPU_ENV, "PATH": path, **({STATS_ENV: stats, **TIMED_PASSES} if stats else {})},
                start_new_session=True,
            )

    @property
    def replay_endpoint(self) -> str:
        return str(self.get("/kv_event_sources")["0"]["replay_endpoint"])

    def wait_ready(self) -> None:
        """Wait until it serves; fail with the end of its log where it ends instead."""
        until(lambda: self._answers() or self.process.poll() is not None, START_LIMIT, self.tail)
        assert self.process.poll() is None, f"vLLM ended with {self.process.returncode}:\n{self.tail()}"

    def terminate(self) -> None:
        """Tell it to end, as a service manager does."""
        if self.process.poll() is None:
            self.process.terminate()

    def stop(self) -> None:
        """End it, and whatever of its session is left."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_LIMIT)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def get(self, path: str) -> Any:
        status, body = request(self.url + path)
        assert status == 200, f"{self.url}{path} answered {status}: {body}"
        return body

    def counter(self, name: str) -> float:
        return counter(self.url, name)

    def settled(self) -> None:
        """Wait until nothing runs or waits."""
        until(lambda: self.counter("vllm:num_requests_running") + self.counter("vllm:num_requests_waiting") == 0, 60.0)

    def clear(self) -> None:
        """Empty its prefix cache; it says so in its events only with the next step of its scheduler."""
        self.settled()
        end = time.monotonic() + 10.0
        while request(f"{self.url}/reset_prefix_cache", b"")[0] != 200:
            assert time.monotonic() < end, "the prefix cache can't be cleared"
            time.sleep(0.1)

    def _answers(self) -> bool:
        if not alive(self.process.pid):
            return False
        try:
            return request(f"{self.url}/health")[0] == 200 and request(f"{self.url}/v1/models")[0] == 200
        except OSError:
            return False


def counter(url: str, name: str) -> float:
    """Return a metric of an engine, summed over its labels; it fails where there is none of that name."""
    status, text = request(f"{url}/metrics")
    assert status == 200, f"{url}/metrics answered {status}"
    found = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    assert found, f"{url}/metrics has no {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)
