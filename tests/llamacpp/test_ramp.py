"""Does the planner take llama.cpp's own servers from one to two under a ramp and back?

They tell nothing of their passes: their speeds are learnt from their answers alone. One serves one request at a time.
"""

import json
from pathlib import Path
from typing import Any

from penstock.adapters.listen_address import free_port
from tests.live.cluster import served
from tests.live.ramp import follow_a_ramp
from tests.live.test_operate import penstock

MODEL = "tiny"
ANSWER = 64
"""Tokens of an answer."""
START_LIMIT = 60.0


def config(python: Path, gguf: Path) -> dict[str, Any]:
    pool = {
        "engine": "llamacpp",
        "replicas": 1,
        "max_model_len": 2048,
        "command": str(python),
        "model_path": str(gguf),
    }
    planner = {
        "policy": "slo",
        "slo": {"hold": "5s"},
        "load_interval": "1s",
        "start": {"assumed": "10s", "deadline": f"{START_LIMIT:g}s"},
        "budget": {"max_gpus": 2},
    }
    return {
        "models": {MODEL: {"tokenizer": "builtin:sim", "pools": {"main": pool}}},
        "slo": {"ttft": "300ms", "itl": "1s"},
        "planner": planner,
        "canary": {"idle": 0},
    }


def body(number: int, turn: int) -> dict[str, Any]:
    words = " ".join(f"word{(7 * number + 13 * turn + place) % 1000}" for place in range(40))
    return {"model": MODEL, "prompt": words, "max_tokens": ANSWER}


def test_replicas_follow_a_ramp_and_no_request_fails(python: Path, gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "planned.yaml").write_text(json.dumps(config(python, gguf)))
    arguments = ["up", "planned.yaml", "--frontend.port", str(free_port())]
    with served(tmp_path, *arguments, start_limit=START_LIMIT) as cluster:
        follow_a_ramp(cluster, body, START_LIMIT)
        ticks = penstock(cluster, "explain", "scale", "--limit", "200", "--json")
        assert "answers (" in ticks, "where the speeds came from"
        assert "live passes" not in ticks
