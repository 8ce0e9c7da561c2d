"""vLLM's ``--kv-transfer-config`` for an engine with a tier process, and what else its tiers need."""

from collections.abc import Sequence

from penstock.config.settings.cache_settings import CacheSettings
from penstock.kernel.values import JsonObject

TIER_FLAGS: dict[str, str | None] = {"--prefix-caching-hash-algo": "sha256_cbor"}
"""Only a cryptographic hash can name stored KV, and only one without pickle is the same in every Python."""
TIER_HASH_SEED = {"PYTHONHASHSEED": "0"}
"""vLLM's first hash comes from it: with another value after a restart no stored block would be found."""


def kv_transfer_config(socket: str, cache: CacheSettings) -> JsonObject:
    """Return the connector to a tier process.

    Args:
        socket: path of the tier process's unix socket.
    """
    return {
        "kv_connector": "PenstockTierConnector",
        "kv_connector_module_path": "penstock.inside.vllm_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": socket},
    }


def both(connectors: Sequence[JsonObject]) -> JsonObject:
    """Return one config for one or more connectors: loads ask them in this order, stores go to all."""
    if len(connectors) == 1:
        return connectors[0]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }
