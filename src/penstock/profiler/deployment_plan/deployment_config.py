"""Deployment config: a deployment as the YAML that ``penstock up`` and ``penstock simulate`` take."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from penstock.config.settings.cluster_settings import BUILTIN_TOKENIZER
from penstock.engine.settings import SimSettings, TimingSettings
from penstock.profiler.deployment_plan.deployment_search import Deployment, EnginePool
from penstock.profiler.deployment_plan.plan_request import PlanRequest

POOL_NAMES = {"aggregated": "main", "prefill": "prefill", "decode": "decode"}
SGLANG_PORT = 30000
BOOTSTRAP = "bootstrap"
"""SGLang's hand-off."""


def config_yaml(request: PlanRequest, deployment: Deployment, lines: tuple[str, ...] = ()) -> str:
    """Return the config of a deployment.

    Args:
        lines: sentences for its head.
    """
    models = {
        request.name: {**_tokenizer(request), "pools": {_name(pool): _pool(request, pool) for pool in deployment.pools}}
    }
    slo = {name: getattr(request.slo, name) for name in ("ttft", "itl")}
    head = "".join(f"# {line}\n" for line in (deployment.label, *lines))
    return head + yaml.safe_dump({"models": models, "slo": slo}, sort_keys=False, width=120, allow_unicode=True)


def _tokenizer(request: PlanRequest) -> Mapping[str, str]:
    if request.engine == "sim":
        return {"tokenizer": BUILTIN_TOKENIZER}
    folder = Path(request.path)
    return {"tokenizer": str(folder)} if (folder / "tokenizer.json").is_file() else {}


def _name(pool: EnginePool) -> str:
    return POOL_NAMES[pool.role]


def _pool(request: PlanRequest, pool: EnginePool) -> Mapping[str, Any]:
    entry: dict[str, object] = {"engine": request.engine, "replicas": pool.replicas}
    if pool.role != "aggregated":
        entry["role"] = pool.role
    if request.engine != "sim":
        # What engines are started with; `sim` below is what `penstock simulate` takes in their place.
        entry |= {"gpus": pool.gpus, "model_path": request.path, "block_size": pool.sim.block_size}
        entry["max_num_batched_tokens"] = pool.sim.max_num_batched_tokens
        entry["args"] = engine_args(request, pool)
    if request.engine == "sglang":
        del entry["replicas"]
        entry["urls"] = [f"http://{_name(pool)}-{n}:{SGLANG_PORT}" for n in range(pool.replicas)]
        if pool.role != "aggregated":
            entry["handoff"] = BOOTSTRAP
    return {**entry, "sim": _sim(pool.sim)}


def _sim(sim: SimSettings) -> Mapping[str, Any]:
    """Return what differs from the defaults; the KV blocks are those that fit, worked out anew."""
    plain = SimSettings()
    changed = {
        name: getattr(sim, name)
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "async_scheduling")
        if getattr(sim, name) != getattr(plain, name)
    }
    transfer = {"bandwidth": sim.transfer.bandwidth, "latency": sim.transfer.latency}
    return {
        **changed,
        "timing": _changed(sim.timing),
        "transfer": {**transfer, "kv_bytes_per_token": sim.transfer.kv_bytes_per_token},
    }


def _changed(timing: TimingSettings) -> Mapping[str, Any]:
    plain, given = msgspec.to_builtins(TimingSettings()), msgspec.to_builtins(timing)
    return {name: value for name, value in given.items() if value != plain[name]}


def engine_args(request: PlanRequest, pool: EnginePool) -> list[str]:
    """Return the flags that give vLLM or SGLang this engine's parallelism, batch and chunk."""
    timing, sim = pool.sim.timing, pool.sim
    tensor, expert = timing.tensor_parallel_size, timing.expert_parallel_size
    data, stages = max(1, expert // tensor), timing.pipeline_parallel_size
    words: list[str] = []
    if request.engine == "vllm":
        words += ["--max-num-seqs", str(sim.max_num_seqs), "--tensor-parallel-size", str(tensor)]
        if data > 1:
            words += ["--data-parallel-size", str(data)]
        if stages > 1:
            words += ["--pipeline-parallel-size", str(stages)]
        return [*words, "--enable-expert-parallel"] if expert > 1 else words
    # SGLang counts data-parallel attention within its tensor-parallel size.
    words += ["--tp-size", str(max(tensor, expert)), "--max-running-requests", str(sim.max_num_seqs)]
    words += ["--chunked-prefill-size", str(sim.max_num_batched_tokens)]
    if expert > 1:
        words += ["--ep-size", str(expert)]
    if data > 1:
        words += ["--enable-dp-attention", "--dp-size", str(data)]
    if stages > 1:
        words += ["--pp-size", str(stages)]
    return words
