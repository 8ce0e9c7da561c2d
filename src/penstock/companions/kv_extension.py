"""What the KV companion adds: what doctor says of an engine's tiers."""

from penstock.extension import Extension

EXTENSION = Extension(
    name="kv",
    entries={"engine check": {"tiers": "penstock.cli.doctor_checks.kv_tier_checks:check_tiers"}},
)
