"""Tier assembly: makes the simulated tiers of an engine from its settings and a `TierPlan`."""

from collections.abc import Mapping
from typing import Any

from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import SECOND
from penstock_kv.blocks.tiers.tier_settings import TierSettings
from penstock_lab.engine.kv_capacity import kv_bytes_per_token
from penstock_lab.engine.settings import SimSettings
from penstock_lab.engine.timing.timing_model import TimingModel
from penstock_lab.simulate.tiers.simulated_tiers import SimulatedTiers
from penstock_lab.simulate.tiers.tier_plan import TierPlan

STORE_BLOCKS = 1 << 20
"""Blocks of an engine in an object store, which has no limit of its own: more than an engine computes in a day."""
PROBE = 2048
"""Tokens of the prompt by which an engine's speed is judged: where attention does not weigh yet."""


def tiers_of(
    plan: TierPlan,
    sim: SimSettings,
    timing: TimingModel,
    *,
    table: Mapping[str, Any] | None = None,
    name: str = "",
    peers: dict[str, SimulatedTiers] | None = None,
) -> SimulatedTiers | None:
    """Return an engine's tiers, empty; None where the plan has no host memory.

    Args:
        sim: with its number of KV blocks.
        timing: the engine's own.
        name, peers: of the engine, and those that it may fetch from.
    Raises:
        ConfigError: a tier has no room for one block, or there are lower tiers without host memory.
    """
    if not plan.host:
        if plan.disk or plan.store or plan.peers:
            raise ConfigError(
                "cache.disk, cache.object_url or cache.peers is set, but cache.host is 0: all bytes go through it",
                hint="give cache.host some gigabytes, such as --host-cache 64GiB",
            )
        return None
    size = kv_bytes_per_token(sim, table) * sim.block_size
    for tier, room in (("host", plan.host), ("disk", plan.disk)):
        if 0 < room < size:
            raise ConfigError(
                f"cache.{tier} is {room:,} bytes, below one KV block of {size:,} bytes",
                hint="give it more, or 0",
            )
    settings = TierSettings(
        block_bytes=size,
        block_tokens=sim.block_size,
        host_blocks=plan.host // size,
        disk_blocks=plan.disk // size,
        object_blocks=STORE_BLOCKS if plan.store else 0,
        order=plan.order,
        offload=plan.offload,
        write=plan.write,
    )
    return SimulatedTiers(
        settings,
        sim.tier_links,
        gpus=sim.timing.tensor_parallel_size,
        seconds_per_token=prefill_seconds_per_token(sim, timing),
        name=name,
        peers=peers if plan.peers else None,
    )


def prefill_seconds_per_token(sim: SimSettings, timing: TimingModel) -> float:
    """Return how long the engine computes for one more token of a prompt, at batches that fill a pass."""
    most = min(PROBE, sim.max_num_batched_tokens)
    half = max(1, most // 2)
    if half == most:
        return timing.mixed(most, [(0, most)], 0, 0) / most / SECOND
    more = timing.mixed(most, [(0, most)], 0, 0) - timing.mixed(half, [(0, half)], 0, 0)
    return max(0.0, more) / (most - half) / SECOND
