"""Checks each engine's KV tiers by its own metrics: a cache that takes and never gives only costs."""

from collections.abc import Iterator

from penstock.adapters.engines.dialects.dialect import samples
from penstock.cli.doctor_checks.finding import Finding, Level

PLUGINS = ("guard", "tier")
"""`penstock_kv.inside.vllm_guard` and `penstock_kv.inside.vllm_tier`, as their metrics are called."""
STORED_LEAST = 1_000
"""Blocks: after fewer of them nothing may have been asked for again."""


def check_tiers(worker: str, metrics: str | None) -> Iterator[Finding]:
    """Return what an engine's metrics say of its tiers; nothing where it has none.

    Args:
        metrics: the text of its /metrics; None where it can't be read.
    """
    values = samples(metrics or "")
    for plugin in PLUGINS:
        stored = values.get(f"penstock_{plugin}_stored_blocks_total")
        if stored is None:
            continue
        served = values.get(f"penstock_{plugin}_served_blocks_total", 0.0)
        refused = values.get("penstock_guard_refused_blocks_total", 0.0) if plugin == "guard" else 0.0
        text = f"KV tiers of {worker}: {stored:,.0f} blocks stored, {served:,.0f} served"
        if values.get("penstock_guard_readback_ok") == 0.0 and plugin == "guard":
            yield _tier_finding(
                "error", f"{worker} does not use its KV tier: its read-back failed", "see the engine's log"
            )
        elif values.get("penstock_tier_connected") == 0.0 and plugin == "tier":
            yield _tier_finding("error", f"{worker} has no tier process", "start `penstock cache serve` at its socket")
        elif refused:
            yield _tier_finding(
                "error",
                f"{text}, {refused:,.0f} refused",
                "what its storage gives back is not what was stored: check the disk",
            )
        elif stored >= STORED_LEAST and not served:
            hint = "prompts have no common beginnings, or block hashes change: --prefix-caching-hash-algo sha256_cbor"
            yield _tier_finding("warning", text, hint)
        else:
            yield _tier_finding("ok", text)


def _tier_finding(level: Level, text: str, hint: str | None = None) -> Finding:
    return Finding(level, "kv tiers", text, hint)
