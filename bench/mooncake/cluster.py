"""How is the cluster of one run started and ended? Through the command line, from a config that this file writes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from plan import BLOCK, ENGINES, MAX_LEN, SPEED_UP, STREAM_INTERVAL

START_TIMEOUT = 60.0
STOP_TIMEOUT = 30.0
_ENDPOINT = re.compile(r"Endpoint\s+(https?://\S+?)/v1")


class ClusterFailed(RuntimeError):
    """The cluster did not start; the message holds what it printed."""


def config(mode: str, kv_blocks: int, seed: int, runs: Path) -> str:
    """Return the YAML of one run: four simulated engines behind one frontend."""
    sim = {
        "block_size": BLOCK,
        "kv_blocks": kv_blocks,
        "max_model_len": MAX_LEN,
        "stream_interval": STREAM_INTERVAL,
        "seed": seed,
        "timing": {"kind": "polynomial", "speed_up": SPEED_UP},
    }
    return yaml.safe_dump(
        {
            "name": f"mooncake-{mode}",
            "models": {
                "sim": {
                    "tokenizer": "builtin:sim",
                    "pools": {"main": {"engine": "sim", "replicas": ENGINES, "sim": sim}},
                }
            },
            "frontend": {"port": 0},
            "router": {"mode": mode},
            "runs": {"dir": str(runs)},
            "logs": {"level": "warning"},
        },
        sort_keys=False,
    )


@contextmanager
def cluster(path: Path, text: str) -> Iterator[str]:
    """Run ``penstock up`` while the block runs; yields the endpoint without /v1."""
    path.write_text(text)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "up", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    printed: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if _ENDPOINT.search(line):
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        ready.wait(START_TIMEOUT)
        found = _ENDPOINT.search("".join(printed))
        if found is None:
            raise ClusterFailed(f"penstock up did not start:\n{''.join(printed)[-2000:]}")
        time.sleep(1.0)  # start-up work of five processes must not be measured
        yield found.group(1)
    finally:
        _stop(process)
        reader.join(5.0)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
