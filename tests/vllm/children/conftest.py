"""Two vLLM servers that `penstock serve --engine vllm` starts, supervises and ends. The files run in order of name."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, served, until
from tests.vllm.server import BLOCK, BLOCKS, CPU_ENV, CPU_FLAGS, MODEL, START_LIMIT

WORKERS = ("main-0", "main-1")


@pytest.fixture(scope="package")
def cluster(venv: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    pool = f"models.{MODEL}.pools.main"
    arguments = ["serve", str(checkpoint), "--engine", "vllm", "--replicas", "2", "--served-name", MODEL]
    arguments += ["--frontend.port", str(free_port()), f"--command={venv / 'bin' / 'vllm'}"]
    arguments += [f"--args={','.join(CPU_FLAGS)}", "--supervise.start_timeout", str(START_LIMIT)]
    arguments += ["--canary.idle", "4", "--canary.timeout", "3"]
    for knob, value in (("block_size", BLOCK), ("kv_blocks", BLOCKS), ("max_model_len", 2048)):
        arguments += ["--set", f"{pool}.{knob}={value}"]
    env = {**CPU_ENV, "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    with served(folder, *arguments, env=env, start_limit=START_LIMIT) as cluster:
        until(lambda: len(cluster.get("/admin/status")[1]["workers"]) == len(WORKERS), 10.0)
        yield cluster
