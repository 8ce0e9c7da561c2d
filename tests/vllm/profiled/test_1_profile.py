"""Does a profile of a real vLLM predict a later load on it, and is it enough for the planner's policies?

The shared server on this CPU, measured by URL through its plug-in; a load that the profile has not seen follows. Then
the policies that interpolate, regress and size from a table start from that folder alone.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock.config.files.profile_manifest import read_measured
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.values import RequestShape, Slo
from penstock.planner.performance.speed_sources import pick
from penstock_lab.config.described_speeds import inputs_of
from penstock_lab.profiler.measurement.accuracy import measured_and_predicted
from penstock_lab.profiler.measurement.profile_run import ProfileOptions, run
from penstock_lab.profiler.measurement.sweep import SweepOptions
from tests.vllm.server import MODEL, VllmServer

SHAPE = RequestShape(400.0, 40.0)
SECONDS = 900.0
"""Of measuring at most: some 100 on an idle machine; beside a compiler 240 were too few for several streams."""
OFF = 0.5
"""Relative error of a mean that fails: the machine has two cores, and other processes."""


@pytest.fixture(scope="module")
def server(shared: VllmServer) -> VllmServer:
    shared.wait_ready()
    shared.clear()
    return shared


@pytest.fixture(scope="module")
def folder(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile."""
    out = tmp_path_factory.mktemp("profile") / "p"
    sweep = SweepOptions(shape=SHAPE, prefill_granularity=6, decode_granularity=2, longest=1_600)
    options = ProfileOptions(
        sweep=sweep, out=out, slo=Slo(ttft=2.0, itl=0.5), url=server.url, stats=server.stats, seconds=SECONDS
    )
    manifest = asyncio.run(run(options))
    assert manifest.engine == "vllm" and manifest.engine_version is not None
    assert manifest.prefill is not None and manifest.prefill.met
    return out


def test_vllm_is_measured_with_what_its_host_costs(folder: Path) -> None:
    manifest, points = read_measured(folder)
    assert {"prefill", "decode"} <= {point.kind for point in points}
    prefill = sorted((point.tokens, point.mean) for point in points if point.kind == "prefill")
    assert prefill[-1][1] > prefill[0][1], "a longer prompt takes longer"
    decode = [point for point in points if point.kind == "decode"]
    assert max(point.seqs for point in decode) > 1
    assert 0.0 <= manifest.host.pass_gap[1] < min(point.mean for point in decode), "as its passes say themselves"


def test_a_later_load_is_predicted_from_the_profile_alone(server: VllmServer, folder: Path, tmp_path: Path) -> None:
    accuracy = measured_and_predicted(folder, server.url, rate=0.5, requests=30, runs=tmp_path, prompt="300")
    print("\n".join(accuracy.lines()))
    for each in (accuracy.ttft, accuracy.tpot):
        assert abs(each.errors[0]) < OFF, list(accuracy.lines())


@pytest.mark.parametrize("policy", ["sla-classic", "throughput-fpm", "slo"])
def test_policies_start_from_that_folder_alone(policy: str, folder: Path) -> None:
    timing = {"kind": "table", "profile": str(folder)}
    pool = {"engine": "vllm", "sim": {"timing": timing}}
    settings = msgspec.convert(
        {"models": {MODEL: {"pools": {"main": pool}}}, "planner": {"policy": policy}}, ClusterSettings
    )
    known = inputs_of(settings).of(MODEL)["aggregated"]
    picked = pick(known, role="aggregated")
    assert picked is not None and picked.source == "profile"
    assert known.profile is not None and known.profile.prefill() is not None and known.profile.decode() is not None
    assert float(picked.model.prefill(400.0)) > 0.0
