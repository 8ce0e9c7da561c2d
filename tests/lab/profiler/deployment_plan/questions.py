"""Questions to the planner of deployments that several tests ask, and a folder of a small model."""

import json
from pathlib import Path
from typing import Any

from penstock.kernel.values import Slo
from penstock_lab.profiler.deployment_plan.plan_request import PlanRequest, checked_request
from tests.lab.engine.models import LLAMA_8B


def question(*, ttft: float = 0.5, itl: float = 0.02, **fields: Any) -> PlanRequest:
    """Return a checked request: Qwen3-8B on h200 for 300 requests at 20 a second, unless something else is given."""
    lengths = {} if "trace" in fields else {"rate": 20.0, "prompt": "3000", "answer": "300", "requests": 300}
    usual: dict[str, Any] = {"model": "Qwen3-8B", "gpus": ("h200",), **lengths}
    return checked_request(PlanRequest(slo=Slo(ttft=ttft, itl=itl), **{**usual, **fields}))


def model_folder(folder: Path) -> Path:
    """Write a model's folder, as it is downloaded without its weights."""
    model = folder / "my-model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    return model
