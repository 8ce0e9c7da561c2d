"""Launch of a simulated engine: a process of this environment, which reports its port."""

import json
import sys

import msgspec

from penstock.adapters.engines.dialects.kv_transfer_protocol import TIERS
from penstock.adapters.engines.launch import Launch
from penstock.adapters.engines.pool_overrides import overrides_of, template_flag
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.kernel.values import JsonObject
from penstock_lab.config.tier_plans import tier_plan

MODULE = "penstock_lab.sim.sim_process"


def sim_launch(model: str, pool: PoolSettings, port: int, host: str) -> Launch:
    """Return how to start one; with port 0 it takes any free one."""
    settings = json.dumps(msgspec.to_builtins(pool.sim))
    cache = tier_plan(pool.cache)
    card: JsonObject = {
        **overrides_of(pool),
        "engine": "sim",
        "max_num_seqs": pool.sim.max_num_seqs,
        "max_num_batched_tokens": pool.sim.max_num_batched_tokens,
    }
    if cache.host:
        card["labels"] = {**card.get("labels", {}), TIERS: cache.order}
    return Launch(
        argv=(
            *(sys.executable, "-m", MODULE, "--model", model, "--host", host, "--port", str(port)),
            *("--settings", settings),
            *(() if pool.max_cpu_loras is None else ("--max-cpu-loras", str(pool.max_cpu_loras))),
            *(("--cache", msgspec.json.encode(cache).decode()) if cache.host else ()),
            *(() if pool.role == "aggregated" else ("--role", pool.role)),
            *(() if pool.embeddings is None else ("--embeddings", pool.embeddings)),
            *(word for pair in template_flag(pool).items() for word in pair if word is not None),
            *pool.args,
        ),
        card=card,
    )
