"""What the KV companion adds: the metrics of tiers, and what doctor says of them."""

from penstock.extension import Extension

EXTENSION = Extension(
    name="kv",
    entries={
        "command": {name: f"penstock.cli.{name}:command" for name in ("cache", "weights")},
        "child": {
            "tiers": "penstock.runtime.kv_tiers.tier_children:TierChildren",
            "weights": "penstock.runtime.weights.weight_children:WeightChildren",
        },
        "check": {"cache": "penstock.config.cache_checks:cache_complaints"},
        "settings": {"cache": "penstock.config.settings.cache_settings:CacheSettings"},
        "telemetry": {"tiers": "penstock.runtime.kv_tiers.tier_admin_client:tier_text"},
        "engine check": {"tiers": "penstock.cli.doctor_checks.kv_tier_checks:check_tiers"},
    },
)
