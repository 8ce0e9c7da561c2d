"""Does the planner take vLLM children from one to two under a ramp and back, with no profile made by hand?

Its speeds are learnt from the passes that stock vLLM tells (the plug-in in its process). The model is made larger, with
whatever weights, and an engine takes two sequences at a time: so a few requests per second are too many for one, and
neither clients nor frontend need much of the machine.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import served
from tests.live.ramp import follow_a_ramp
from tests.vllm.server import BLOCK, CPU_ENV, MODEL, START_LIMIT, TIMED_PASSES

SEQS = 2
LARGER = {"num_hidden_layers": 12, "intermediate_size": 4096}
PROMPT, ANSWER = 64, 64
"""Tokens of a request."""
POLICIES = {
    "slo": {"policy": "slo", "slo": {"hold": "5s"}},
    "throughput-fpm": {"policy": "throughput-fpm"},
}

LEARNS_FOR = {"slo": 0.0, "throughput-fpm": 60.0}
"""Seconds: the latter needs eight intervals."""


def config(venv: Path, checkpoint: Path, policy: dict[str, Any], seqs: int = SEQS) -> dict[str, Any]:
    flags = ["--dtype", "float32", "--max-num-seqs", str(seqs), "--enforce-eager", "--load-format", "dummy"]
    flags.append(f"--hf-overrides={json.dumps(LARGER)}")
    pool = {
        "engine": "vllm",
        "replicas": 1,
        "block_size": BLOCK,
        "kv_blocks": 256,
        "max_model_len": 2048,
        "command": str(venv / "bin" / "vllm"),
        "model_path": str(checkpoint),
        "args": flags,
    }
    planner = {
        **policy,
        "load_interval": "1s",
        "throughput_interval": "10s",
        "start": {"assumed": "30s", "deadline": f"{START_LIMIT:g}s"},
        "budget": {"max_gpus": 2},
    }
    model = {"tokenizer": str(checkpoint), "pools": {"main": pool}}
    return {
        "models": {MODEL: model},
        "supervise": {"start_timeout": START_LIMIT},
        "slo": {"ttft": "2s", "itl": "1s"},
        "planner": planner,
        "canary": {"idle": 0},
    }


def body(number: int, turn: int) -> dict[str, Any]:
    prompt = [(7 * number + 13 * turn + place) % 1000 + 10 for place in range(PROMPT)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True}


@pytest.mark.parametrize("name", ["slo", pytest.param("throughput-fpm", marks=pytest.mark.soak)])
def test_replicas_follow_a_ramp_and_no_request_fails(name: str, venv: Path, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "planned.yaml").write_text(json.dumps(config(venv, checkpoint, POLICIES[name])))
    env = {**CPU_ENV, **TIMED_PASSES, "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    arguments = ["up", "planned.yaml", "--frontend.port", str(free_port())]
    with served(tmp_path, *arguments, env=env, start_limit=START_LIMIT) as cluster:
        follow_a_ramp(cluster, body, START_LIMIT, LEARNS_FOR[name])
        found = cluster.get("/admin/status")[1]
        assert "plug-in" in json.dumps(found["workers"]), "what was learnt came from the engines' own passes"
