"""What the KV companion adds: processes beside engines, their settings, commands and metrics."""

from penstock.extension import Extension

EXTENSION = Extension(
    name="kv",
    entries={
        "command": {name: f"penstock_kv.cli.{name}:command" for name in ("cache", "weights")},
        "child": {
            "tiers": "penstock_kv.tiers.tier_children:TierChildren",
            "weights": "penstock_kv.weights.weight_children:WeightChildren",
        },
        "check": {"cache": "penstock_kv.cache_checks:cache_complaints"},
        "settings": {"cache": "penstock_kv.cache_settings:CacheSettings"},
        "telemetry": {"tiers": "penstock_kv.tiers.tier_admin_client:tier_text"},
        "engine check": {"tiers": "penstock_kv.cli.kv_tier_checks:check_tiers"},
    },
)
