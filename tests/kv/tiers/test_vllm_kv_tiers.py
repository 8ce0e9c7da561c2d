"""Does a vLLM server get the configuration that its tier process needs?"""

import json

import pytest

from penstock.adapters.engines.launch import EngineAddition, launch_of
from penstock.config.settings.cluster_settings import PoolSettings
from penstock_kv.cache_settings import CacheSettings
from penstock_kv.vllm_kv_tiers import (
    STAGING_MAX,
    STAGING_MIN,
    host_memories,
    kv_transfer_config,
)


def memory_of_the_engine(cache: CacheSettings) -> int:
    config = json.loads(json.dumps(kv_transfer_config("/run/tier.sock", cache, "main-0")))
    (tier,) = config["kv_connector_extra_config"]["secondary_tiers"]
    assert (tier["socket"], tier["worker"]) == ("/run/tier.sock", "main-0")
    assert tier["hash_algorithm"] == "sha256_cbor"
    return int(config["kv_connector_extra_config"]["cpu_bytes_to_use"])


@pytest.mark.parametrize(
    ("host", "staging"),
    [(1 << 20, 1 << 19), (1 << 30, STAGING_MIN), (16 << 30, 2 << 30), (1 << 40, STAGING_MAX)],
)
def test_the_host_tier_is_the_engines_unless_others_are_to_read_it(host: int, staging: int) -> None:
    alone, shared = CacheSettings(host=host), CacheSettings(host=host, peers=True)
    assert host_memories(alone) == (host, staging) and memory_of_the_engine(alone) == host
    assert host_memories(shared) == (staging, host) and memory_of_the_engine(shared) == staging


def test_a_hand_off_is_asked_before_the_tiers() -> None:
    tiers = kv_transfer_config("/run/tier.sock", CacheSettings(host=1 << 30), "main-0")
    pool = PoolSettings(engine="vllm", role="prefill")
    launch = launch_of("main-0", "m", pool, port=1, additions=[EngineAddition(transfer=tiers)])
    both = json.loads(launch.argv[launch.argv.index("--kv-transfer-config") + 1])
    assert both["kv_connector"] == "MultiConnector"
    handoff, beside = both["kv_connector_extra_config"]["connectors"]
    assert handoff["kv_connector"] == "NixlConnector" and beside == tiers
