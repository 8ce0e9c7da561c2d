"""One vLLM server that prefills and one that decodes, started by `penstock up`. The files run in order of name."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, served, until
from tests.vllm.server import BLOCK, BLOCKS, CPU_ENV, CPU_FLAGS, MODEL, START_LIMIT

# KV goes through the memory of the host: there is no other here.
KV = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
WIRE = {"UCX_TLS": "tcp,shm,self,cma,posix,sysv", "UCX_NET_DEVICES": "lo"}


def config(venv: Path, checkpoint: Path) -> str:
    def pool(role: str) -> dict[str, object]:
        return {
            "engine": "vllm",
            "role": role,
            "replicas": 1,
            "block_size": BLOCK,
            "kv_blocks": BLOCKS,
            "max_model_len": 2048,
            "command": str(venv / "bin" / "vllm"),
            "model_path": str(checkpoint),
            "args": [*CPU_FLAGS, "--enable-prompt-tokens-details", f"--kv-transfer-config={json.dumps(KV)}"],
            "env": WIRE,
        }

    model = {"tokenizer": str(checkpoint), "pools": {"prefill": pool("prefill"), "decode": pool("decode")}}
    return json.dumps(
        {
            "models": {MODEL: model},
            "router": {"handoff": {"conditional": "off"}},
            "supervise": {"start_timeout": START_LIMIT},
        }
    )


@pytest.fixture(scope="package")
def cluster(venv: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("handoff")
    (folder / "pd.yaml").write_text(config(venv, checkpoint))
    env = {**CPU_ENV, "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    with served(
        folder, "up", "pd.yaml", "--frontend.port", str(free_port()), env=env, start_limit=START_LIMIT
    ) as cluster:
        until(lambda: len(cluster.get("/admin/status")[1]["workers"]) == 2, 10.0)
        yield cluster
