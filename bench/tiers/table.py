"""Tables of the tiers' bench: what each size of cache gains, and the bandwidth from which loading beats computing."""

from typing import NamedTuple

from penstock.kernel.machine import SECOND
from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.kv_capacity import kv_bytes_per_token
from penstock_lab.engine.settings import SimSettings, TierLinks, TimingSettings
from penstock_lab.engine.timing.timing_model import timing_of

ENGINES = {
    "Llama-3.2-1B": 1,
    "Llama-3.1-8B": 1,
    "Qwen3-32B": 2,
    "Llama-3.1-70B": 4,
    "Qwen3-30B-A3B": 1,
    "Mixtral-8x7B": 2,
}
"""Model -> H100 of one engine."""
DEPTHS = (2_000, 16_000, 64_000)
"""Tokens before the ones that are computed: attention makes later ones dearer."""
CHUNK = 2_048


class Cell(NamedTuple):
    """One simulated run; shares of prompt tokens, seconds."""

    traffic: str
    model: str
    gpus: int
    label: str
    requests: int
    hit_rate: float
    tiers: dict[str, float]
    ttft_mean: float
    ttft_p90: float
    full_hours: float = 0.0
    """GPU-hours for all requests, where they come so fast that no engine is ever idle."""
    wall: float = 0.0


def cells(found: list[Cell]) -> str:
    """Return a table per traffic and model."""
    parts: list[str] = []
    for traffic, model in dict.fromkeys((cell.traffic, cell.model) for cell in found):
        mine = [cell for cell in found if (cell.traffic, cell.model) == (traffic, model)]
        plain = mine[0]
        rows = [
            f"**{traffic}, {model} on {plain.gpus} H100 per engine, {plain.requests:,} requests**",
            "",
            "| tiers | hit rate | of it host, disk, peers | TTFT mean | TTFT p90 | GPU-hours at full load |",
            "|---|---:|---|---:|---:|---:|",
        ]
        for cell in mine:
            shares = ", ".join(f"{cell.tiers.get(tier, 0.0):.1%}" for tier in ("host", "disk", "peer"))
            gain = "" if cell is plain else f" ({cell.full_hours / plain.full_hours - 1:+.0%})"
            hours = f"{cell.full_hours:.2f}{gain}" if cell.full_hours else "-"
            rows.append(
                f"| {cell.label} | {cell.hit_rate:.1%} | {shares} | {cell.ttft_mean * 1e3:,.0f} ms | "
                f"{cell.ttft_p90 * 1e3:,.0f} ms | {hours} |"
            )
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def break_even() -> str:
    """Return, per model, the GB/s from which loading a block beats computing it, and whether each link reaches it."""
    links = TierLinks()
    rows = [
        "**Break-even bandwidth on H100**: KV bytes of a token by the seconds that computing it takes, behind so many "
        "tokens of the same prompt.",
        "",
        f"| model | GPUs | KV per token | {' | '.join(f'behind {depth:,}' for depth in DEPTHS)} | pays from |",
        f"|---|---:|---:|{'---:|' * len(DEPTHS)}---|",
    ]
    for model, gpus in ENGINES.items():
        timing = TimingSettings(kind="roofline", model=model, gpu="h100", tensor_parallel_size=gpus)
        table = load_timing(timing)
        engine = timing_of(timing, 1 << 20, table)
        size = kv_bytes_per_token(SimSettings(timing=timing), table)
        needs = [size / (engine.mixed(CHUNK, [(depth, CHUNK)], 0, 0) / CHUNK / SECOND) for depth in DEPTHS]
        worst = max(needs)
        ways = {
            "host": links.host_bandwidth * gpus,
            "peers at 100 Gb/s": links.peer_bandwidth,
            "one NVMe drive": links.disk_read,
            "S3": links.object_bandwidth,
        }
        pays = ", ".join(
            name if rate > worst else f"{name} (long prompts)" for name, rate in ways.items() if rate > min(needs)
        )
        figures = " | ".join(f"{need / 1e9:.1f} GB/s" for need in needs)
        rows.append(f"| {model} | {gpus} | {size / 1024:.0f} KiB | {figures} | {pays or 'nothing'} |")
    return "\n".join(rows)
