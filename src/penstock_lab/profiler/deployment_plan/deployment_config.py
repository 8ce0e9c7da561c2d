"""Deployment config: a deployment as the YAML that ``penstock up`` and ``penstock simulate`` take."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from penstock.config.settings.cluster_settings import BUILTIN_TOKENIZER
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.profiler.deployment_plan.deployment_search import Deployment, EnginePool
from penstock_lab.profiler.deployment_plan.plan_request import PlanRequest

POOL_NAMES = {"aggregated": "main", "prefill": "prefill", "decode": "decode"}
SGLANG_PORT = 30000
BOOTSTRAP = "bootstrap"
"""SGLang's hand-off."""
SIMULATED = (
    "block_size",
    "kv_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enable_chunked_prefill",
    "async_scheduling",
)
"""Settings of a simulated engine that a plan chooses, beside its timing and links."""
RERANKER = (
    '{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"], '
    '"is_original_qwen3_reranker": true}'
)
"""What makes vLLM rank with Qwen's rerankers, whose config is that of a model with answers."""


def config_yaml(
    request: PlanRequest, deployment: Deployment, lines: tuple[str, ...] = (), *, planner: bool = False
) -> str:
    """Return the config of a deployment.

    Args:
        lines: sentences for its head.
        planner: whether it has a planner that keeps the SLO, within what the deployment was allowed.
    """
    models = {
        request.name: {
            **_tokenizer_settings(request),
            "pools": {_pool_name(pool): _pool_settings(request, pool) for pool in deployment.pools},
        }
    }
    slo = {name: target for name in ("ttft", "itl") if (target := getattr(request.slo, name)) is not None}
    config: dict[str, object] = {"models": models, "slo": slo}
    if planner and request.answers:  # without streamed answers it would see no latency
        config["planner"] = _planner_settings(request, deployment)
    head = "".join(f"# {line}\n" for line in (deployment.label, *lines))
    return head + yaml.safe_dump(config, sort_keys=False, width=120, allow_unicode=True)


def _planner_settings(request: PlanRequest, deployment: Deployment) -> Mapping[str, Any]:
    """Return the planner's section: as many GPUs as were allowed, else as many as were planned."""
    most = deployment.gpus if request.max_gpus is None else max(request.max_gpus, deployment.gpus)
    # SGLang's servers are started elsewhere: it says what it would do with them.
    return {"budget": {"max_gpus": most}, **({"advisory": True} if request.engine == "sglang" else {})}


def _tokenizer_settings(request: PlanRequest) -> Mapping[str, str]:
    if request.engine == "sim":
        return {"tokenizer": BUILTIN_TOKENIZER}
    folder = Path(request.path)
    return {"tokenizer": str(folder)} if (folder / "tokenizer.json").is_file() else {}


def _pool_name(pool: EnginePool) -> str:
    return POOL_NAMES[pool.role]


def _pool_settings(request: PlanRequest, pool: EnginePool) -> Mapping[str, Any]:
    entry: dict[str, object] = {"engine": request.engine, "replicas": pool.replicas}
    if pool.role != "aggregated":
        entry["role"] = pool.role
    if request.engine != "sim":
        # What engines are started with; `sim` below is what `penstock simulate` takes in their place.
        entry |= {"gpus": pool.gpus, "model_path": request.repository}
        if not request.shape().state_layers:  # a hybrid model's block is what the engine makes of it
            entry["block_size"] = pool.sim.block_size
        entry["max_model_len"] = pool.sim.max_model_len
        entry["max_num_batched_tokens"] = pool.sim.max_num_batched_tokens // _data_parallel_ranks(request, pool)
        entry["args"] = engine_args(request, pool)
    if request.engine == "sglang":
        del entry["replicas"]
        entry["urls"] = [f"http://{_pool_name(pool)}-{n}:{SGLANG_PORT}" for n in range(pool.replicas)]
        if pool.role != "aggregated":
            entry["handoff"] = BOOTSTRAP
    return {**entry, "sim": _sim_settings(pool.sim)}


def _data_parallel_ranks(request: PlanRequest, pool: EnginePool) -> int:
    """Return the data-parallel ranks that share the limits of a simulated engine, each of which vLLM limits alone."""
    timing = pool.sim.timing
    return max(1, timing.expert_parallel_size // timing.tensor_parallel_size) if request.engine == "vllm" else 1


def _sim_settings(sim: SimSettings) -> Mapping[str, Any]:
    """Return what differs from the defaults; the KV blocks are those of the traffic's lengths."""
    plain = SimSettings()
    changed = {name: getattr(sim, name) for name in SIMULATED if getattr(sim, name) != getattr(plain, name)}
    transfer = {"bandwidth": sim.transfer.bandwidth, "latency": sim.transfer.latency}
    return {
        **changed,
        "timing": _changed_timing(sim.timing),
        "transfer": {**transfer, "kv_bytes_per_token": sim.transfer.kv_bytes_per_token},
    }


def _changed_timing(timing: TimingSettings) -> Mapping[str, Any]:
    plain, given = msgspec.to_builtins(TimingSettings()), msgspec.to_builtins(timing)
    return {name: value for name, value in given.items() if value != plain[name]}


def engine_args(request: PlanRequest, pool: EnginePool) -> list[str]:
    """Return the flags that give vLLM or SGLang this engine's parallelism, batch and chunk."""
    timing, sim = pool.sim.timing, pool.sim
    tensor, expert = timing.tensor_parallel_size, timing.expert_parallel_size
    data, stages = max(1, expert // tensor), timing.pipeline_parallel_size
    words: list[str] = []
    if request.engine == "vllm":
        seqs = max(1, sim.max_num_seqs // _data_parallel_ranks(request, pool))
        words += ["--max-num-seqs", str(seqs), "--tensor-parallel-size", str(tensor)]
        if not request.answers:
            words += ["--runner", "pooling"]
            words += ["--hf-overrides", RERANKER] if "qwen3-reranker" in request.model.lower() else []
        if data > 1:
            words += ["--data-parallel-size", str(data)]
        if stages > 1:
            words += ["--pipeline-parallel-size", str(stages)]
        return [*words, "--enable-expert-parallel"] if expert > 1 else words
    # SGLang counts data-parallel attention within its tensor-parallel size.
    words += ["--tp-size", str(max(tensor, expert)), "--max-running-requests", str(sim.max_num_seqs)]
    words += ["--chunked-prefill-size", str(sim.max_num_batched_tokens), "--context-length", str(sim.max_model_len)]
    words += [] if request.shape().state_layers else ["--page-size", str(sim.block_size)]
    words += [] if request.answers else ["--is-embedding"]
    if expert > 1:
        words += ["--ep-size", str(expert)]
    if data > 1:
        words += ["--enable-dp-attention", "--dp-size", str(data)]
    if stages > 1:
        words += ["--pp-size", str(stages)]
    return words
