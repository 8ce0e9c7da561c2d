"""Is an engine told of the tier process and of the weight process beside it?"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.connectors.state_file import StateFile
from penstock.adapters.engines.launch import Launch, launch_of
from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.config.settings.cluster_settings import PoolSettings, SuperviseSettings
from penstock.kernel.errors import ConfigError
from penstock.runtime.supervision.engine_fleet import EngineFleet
from penstock_kv.cache_settings import CacheSettings
from penstock_kv.inside.weights.weight_protocol import WEIGHTS_ENV
from penstock_kv.tiers import tier_children
from penstock_kv.tiers.tier_children import TierChildren, has_tier_process
from penstock_kv.weights import weight_children
from penstock_kv.weights.weight_children import WeightChildren
from penstock_lab.sim.sim_launch import sim_launch
from tests.adapters.test_launch import flag, vllm
from tests.kv.tiers.engine_site import site


def started(tmp_path: Path, worker: str, pool: PoolSettings) -> Launch:
    addition = TierChildren(site(tmp_path)).addition(worker, pool)
    return launch_of(worker, "tiny", pool, port=1, additions=[] if addition is None else [addition])


def test_vllm_with_a_tier_process_gets_its_connector_and_hashes_that_can_name_stored_blocks(tmp_path: Path) -> None:
    pool = vllm(cache=CacheSettings(host=1 << 30))
    assert has_tier_process(pool) and not has_tier_process(vllm())
    assert not has_tier_process(PoolSettings(engine="sim", cache=CacheSettings(host=1 << 30)))
    launch = started(tmp_path, "main-0", pool)
    assert launch.card["labels"]["kv_tiers"] == "priority"
    assert "kv_tiers" not in started(tmp_path, "main-0", vllm()).card["labels"]
    assert "main-0.sock" in flag(launch, "--kv-transfer-config")
    assert flag(launch, "--prefix-caching-hash-algo") == "sha256_cbor"
    assert launch.env["PYTHONHASHSEED"] == "0"
    both = started(tmp_path, "p-0", vllm(role="prefill", cache=pool.cache))
    config = json.loads(flag(both, "--kv-transfer-config"))
    assert config["kv_connector"] == "MultiConnector"
    assert len(config["kv_connector_extra_config"]["connectors"]) == 2
    assert "--kv-transfer-config" not in started(tmp_path, "main-0", vllm()).argv


def test_a_simulated_engine_with_tiers_says_so_on_its_card() -> None:
    with_tiers = PoolSettings(cache=CacheSettings(host=1 << 30))
    assert sim_launch("m", with_tiers, 0, "127.0.0.1").card["labels"]["kv_tiers"] == "priority"
    assert "kv_tiers" not in sim_launch("m", PoolSettings(), 0, "127.0.0.1").card.get("labels", {})


async def test_all_processes_beside_engines_follow_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, Callable[[], SuperviseSettings]] = {}

    class Kept:
        def __init__(self, name: str, without: str, settings: Callable[[], SuperviseSettings], *_: Any, **more: Any):
            kept[name] = settings

        def begin(self) -> None: ...
        async def stop(self) -> None: ...

    monkeypatch.setattr(tier_children, "RestartedChild", Kept)
    monkeypatch.setattr(weight_children, "RestartedChild", Kept)
    state = StateFile.open(tmp_path, "test")
    fleet = EngineFleet(MemoryStore(MemorySpace()), SuperviseSettings(), state, logs=tmp_path, ttl=10.0, env={})
    pool = vllm(cache=CacheSettings(host=1 << 30), share_weights=True, model_path=str(tmp_path))
    for children in fleet._children:
        children.add("main", "m", pool)
        children.begin()
        children.spawned("main-0", "main", 0)
    fleet.use(SuperviseSettings(stop_grace=7.5))
    assert {name: settings().stop_grace for name, settings in kept.items()} == {
        "the tier process of main-0": 7.5,
        "the weight process of main": 7.5,
    }
    await fleet.stop()
    state.close()


def test_weights_of_a_sibling_need_the_loader_in_the_engines_environment(tmp_path: Path) -> None:
    children = WeightChildren(site(tmp_path))
    shared = {"command": "nowhere", "share_weights": True}
    with pytest.raises(ConfigError, match="is not a folder"):
        children.add("main", "m", vllm(**shared, model_path=str(tmp_path / "nowhere")))
    without = vllm(**shared, model_path=str(tmp_path))
    children.add("main", "m", without)
    with pytest.raises(ConfigError, match="has no weight loader"):
        children.addition("main-0", without)
    installed = tmp_path / "penstock-0.1.0.dist-info"
    installed.mkdir()
    (installed / "entry_points.txt").write_text("[vllm.general_plugins]\npenstock = a:b\n")
    addition = children.addition("main-0", vllm(**shared, env={"PYTHONPATH": str(tmp_path)}))
    assert addition is not None and addition.flags == {"--load-format": "penstock"}
    assert addition.env[WEIGHTS_ENV].endswith("main.sock")
    assert children.addition("other-0", without) is None
