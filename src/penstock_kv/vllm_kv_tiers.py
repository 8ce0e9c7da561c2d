"""What vLLM has to be started with for KV tiers of ours: its transfer configuration, flags and environment."""

from penstock_kv.cache_settings import CacheSettings

KV_TIER_FLAGS = {"--prefix-caching-hash-algo": "sha256_cbor"}
"""vLLM's block hashes name stored KV, so they must be cryptographic and the same after a restart."""
KV_TIER_ENV = {"PYTHONHASHSEED": "0"}
"""Before 0.32 the first of vLLM's chained hashes was drawn at random unless this is set."""

STAGING_SHARE, STAGING_MAX = 8, 4 << 30
"""The smaller of the two host memories, through which blocks move: a part of the host tier, at most 4 GiB. What it
keeps is kept twice, and what it can't hold while it moves is skipped."""
STAGING_MIN = 256 << 20
"""At least that, or half of a host tier so small."""


def host_memories(cache: CacheSettings) -> tuple[int, int]:
    """Return the bytes of host memory of vLLM itself and of its tier process.

    The host tier is vLLM's: from there a prompt comes back three times as fast as it is computed, through the tier
    process slower than that (docs/bench/tiers.md). Other engines can read the tier process's alone.
    """
    staging = min(STAGING_MAX, max(cache.host // STAGING_SHARE, min(STAGING_MIN, cache.host // 2)))
    return (staging, cache.host) if cache.peers else (cache.host, staging)


def kv_transfer_config(socket: str, cache: CacheSettings, worker: str) -> dict[str, object]:
    """Return ``--kv-transfer-config`` of the vLLM server of a worker whose tier process listens at a unix socket."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "PenstockOffloadingSpec",
            "spec_module_path": "penstock_kv.inside.vllm_offload_spec",
            "cpu_bytes_to_use": host_memories(cache)[0],
            "self_describing_kv_events": True,
            "secondary_tiers": [
                {
                    "type": "PenstockTier",
                    "module_path": "penstock_kv.inside.vllm_tier",
                    "socket": socket,
                    "worker": worker,
                    "hash_algorithm": KV_TIER_FLAGS["--prefix-caching-hash-algo"],
                }
            ],
        },
    }
