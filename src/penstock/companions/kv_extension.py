"""What the KV companion adds: the metrics of tiers, and what doctor says of them."""

from penstock.extension import Extension

EXTENSION = Extension(
    name="kv",
    entries={
        "telemetry": {"tiers": "penstock.runtime.kv_tiers.tier_admin_client:tier_text"},
        "engine check": {"tiers": "penstock.cli.doctor_checks.kv_tier_checks:check_tiers"},
    },
)
