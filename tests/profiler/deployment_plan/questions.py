"""Questions to the planner of deployments that several tests ask, and a config.json of a small model."""

import json
from pathlib import Path
from typing import Any

from penstock.kernel.values import Slo
from penstock.profiler.deployment_plan.plan_request import PlanRequest, checked_request

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def question(*, ttft: float = 0.5, itl: float = 0.02, **fields: Any) -> PlanRequest:
    """Return a checked request: Qwen3-8B on h200 at 20 requests/s, unless something else is given."""
    lengths = {} if "trace" in fields else {"rate": 20.0, "prompt": "3000", "answer": "300"}
    usual: dict[str, Any] = {"model": "Qwen3-8B", "gpus": ("h200",), **lengths}
    return checked_request(PlanRequest(slo=Slo(ttft=ttft, itl=itl), **{**usual, **fields}))


def model_folder(folder: Path) -> Path:
    """Write a model's folder, as it is downloaded without its weights."""
    model = folder / "my-model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    return model
