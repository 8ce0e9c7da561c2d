"""A setting of an earlier version is refused, and the hint says what is true now."""

import pytest

from penstock.config.former_names import FORMER
from penstock.config.reading.load import load, load_group
from penstock.config.reading.problems import ConfigProblems
from penstock.config.settings.cluster_settings import PoolSettings

POOL = "models.sim.pools.main"


@pytest.mark.parametrize(
    ("path", "former"),
    [
        (f"{POOL}.sim.timing.prefill_base", "models.*.pools.*.sim.timing.prefill_base"),
        (f"{POOL}.sim.timing.calibration.link_efficiency", "models.*.pools.*.sim.timing.calibration.*"),
        ("planner.classic.load.max_gpu_budget", "planner.classic.load.max_gpu_budget"),
        ("planner.tick_timeout", "planner.tick_timeout"),
        (f"{POOL}.vllm.args", "models.*.pools.*.vllm"),
        (f"{POOL}.vllm.model", "models.*.pools.*.vllm.model"),
        (f"{POOL}.sim.timing.constant_decode_ms", "models.*.pools.*.sim.timing.constant_decode_ms"),
        (f"{POOL}.sim.encoder.fetch_latency", "models.*.pools.*.sim.encoder.fetch_latency"),
        ("frontend.limits.deadline", "frontend.limits.deadline"),
        ("router.stale_after", "router.stale_after"),
        ("planner.plugins.modules", "planner.plugins.modules"),
        ("planner.plugins.modules.mine.module", "planner.plugins.modules"),
    ],
)
def test_a_former_name_is_refused_with_the_way_on(path, former, tmp_path):
    env = f"PENSTOCK_{path.upper().replace('.', '__')}"
    for overrides, environment in (([f"{path}=1"], {}), ((), {env: "1"})):
        with pytest.raises(ConfigProblems) as caught:
            load(None, overrides, environment)
        assert [problem.hint for problem in caught.value.problems] == [FORMER[former]]


def test_a_former_value_is_refused_with_the_way_on():
    with pytest.raises(ConfigProblems) as caught:
        load(None, ["discovery.store=file"])
    assert [problem.hint for problem in caught.value.problems] == ["is sqlite now: a database in the run folder"]


def test_a_former_name_in_a_file_and_in_a_pool_of_its_own_is_refused_alike(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("models: {m: {pools: {p: {sim: {timing: {decode_base: 1}}}}}}\n")
    for read in (lambda: load(file), lambda: load_group(PoolSettings, ["sim.timing.decode_base=1"])):
        with pytest.raises(ConfigProblems) as caught:
            read()
        assert [problem.hint for problem in caught.value.problems] == ["is the third number of sim.timing.decode now"]


def test_a_former_name_in_a_file_is_refused_alike(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("planner: {plugins: {external: {cap: {endpoint: 'unix:///p'}}}}\n")
    with pytest.raises(ConfigProblems) as caught:
        load(file)
    assert [problem.hint for problem in caught.value.problems] == [FORMER["planner.plugins.external"]]
