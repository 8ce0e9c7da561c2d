"""Does stock vLLM take the config that `penstock plan` writes, for a tiny model of each kind?

vLLM makes its engine's config of the command line: what it would refuse at a start it refuses here, without weights.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from penstock.adapters.engines.launch import launch_of
from penstock.config.reading.load import load
from penstock.kernel.values import Slo
from penstock_lab.profiler.deployment_plan.deployment_config import config_yaml
from penstock_lab.profiler.deployment_plan.deployment_search import DeploymentSearch
from penstock_lab.profiler.deployment_plan.engine_candidates import EngineCatalog
from penstock_lab.profiler.deployment_plan.plan_request import PlanRequest, checked_request
from penstock_lab.profiler.deployment_plan.planned_traffic import traffic_of
from tests.vllm.server import CPU_ENV

SETUP = Path(__file__).parents[1] / "setup" / "accepts.py"
LIMIT = 300.0
COMMON = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 128,
}
MAMBA = {
    "hybrid_override_pattern": "M-M*",
    "ssm_state_size": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "conv_kernel": 4,
}
ENCODER = {"type_vocab_size": 2, "max_position_embeddings": 512, "num_key_value_heads": None, "head_dim": None}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 128},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, **EXPERTS},
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1, **EXPERTS, **DELTA},
    "nemotron_h": {"architectures": ["NemotronHForCausalLM"], **MAMBA},
    "qwen3": {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1},
    "bert": {"architectures": ["BertModel"], **ENCODER},
}


def words_of(folder: Path, kind: str, prompt: str) -> list[str]:
    """Plan for a model of a kind, and return what `vllm serve` is started with."""
    model = folder / f"{kind}-{prompt}"
    model.mkdir()
    fields = {"model_type": kind, **COMMON, **KINDS[kind]}
    (model / "config.json").write_text(json.dumps({name: each for name, each in fields.items() if each is not None}))
    slo = Slo(ttft=1.0, itl=0.05)
    traffic_asked: dict[str, Any] = {"rate": 2.0, "prompt": prompt, "answer": "100", "requests": 50}
    asked = PlanRequest(model=str(model), engine="vllm", gpus=("h100",), slo=slo, max_gpus=1, **traffic_asked)
    request = checked_request(asked)
    traffic = traffic_of(request)
    best = DeploymentSearch(request, traffic, EngineCatalog(request, traffic)).deployments()[0]
    config = folder / f"{kind}-{prompt}.yaml"
    config.write_text(config_yaml(request, best, planner=True))
    ((_, settings),) = load(config).settings.models.items()
    (pool,) = settings.pools.values()
    return list(launch_of("worker", kind, pool, port=8000, in_pod=True).argv[2:])


def refusals(venv: Path, lines: list[list[str]]) -> list[str | None]:
    done = subprocess.run(
        [str(venv / "bin" / "python"), str(SETUP)],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**os.environ, **CPU_ENV},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_vllm_takes_what_is_written_for_each_kind_of_model(venv: Path, tmp_path: Path) -> None:
    lines = [words_of(tmp_path, kind, "300") for kind in KINDS]
    answers = dict(zip(KINDS, refusals(venv, lines), strict=True))
    assert answers == dict.fromkeys(KINDS), "None is no refusal"


def test_the_longest_request_is_the_models_and_one_token_more_is_refused(venv: Path, tmp_path: Path) -> None:
    words = words_of(tmp_path, "llama", "3900")
    at = words.index("--max-model-len") + 1
    assert words[at] == "4096"
    longer = [*words[:at], "4097", *words[at + 1 :]]
    taken, refused = refusals(venv, [words, longer])
    assert taken is None and refused is not None and "4097" in refused
