"""Is a later load predicted from the profile alone, and is it said when an engine is no longer what was measured?"""

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock.config.files.profile_manifest import ProfileManifest, read_manifest, read_measured
from penstock.kernel.machine import SECOND
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.values import RequestId, RequestShape, Slo
from penstock_lab.engine.events import EngineFinished
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.profiler.measurement.accuracy import HEAD, compared, measured_and_predicted, note, predict
from penstock_lab.profiler.measurement.profile_run import ProfileOptions, run
from penstock_lab.profiler.measurement.profile_writer import write_profile
from penstock_lab.profiler.measurement.sweep import SweepOptions
from penstock_lab.testing import simulated_servers
from tests.lab.profiler.measurement.swept import swept

LIVE = SimSettings(
    kv_blocks=256,
    max_num_seqs=4,
    max_num_batched_tokens=2_048,
    max_model_len=2_000,
    timing=TimingSettings(prefill=(0.0, 0.05, 25.0), decode=(0.0, 40.0, 15.0)),
)


@pytest.mark.slow
@pytest.mark.quiet
async def test_a_live_engine_is_measured_by_url_and_then_predicted(tmp_path: Path) -> None:
    """The way of an operator: profile URL, check URL. The engine differs only in that it is no table."""
    sweep = SweepOptions(
        shape=RequestShape(800.0, 40.0), prefill_granularity=3, decode_granularity=1, longest=1_000, mixed=False
    )
    async with simulated_servers(1, LIVE) as (server,):
        options = ProfileOptions(sweep=sweep, out=tmp_path / "p", slo=Slo(ttft=0.1, itl=0.05), url=server.url)
        manifest = await run(options)
        assert manifest.engine == "sim" and manifest.sizes == (1,) and manifest.host.pass_gap[1] < 0.01
        assert manifest.prefill is not None and manifest.prefill.seconds == pytest.approx(0.065, rel=0.2)
        accuracy = await asyncio.to_thread(
            measured_and_predicted, tmp_path / "p", server.url, rate=4.0, requests=16, runs=tmp_path / "runs"
        )
    assert accuracy.requests == 16
    # Others use this machine: live requests may come late, never early.
    assert -0.35 < accuracy.ttft.errors[0] < 0.25 and -0.3 < accuracy.tpot.errors[0] < 0.2, list(accuracy.lines())


def record(at: float, ttft: float, tpot: float, isl: int = 1_000, osl: int = 11) -> RequestRecord:
    last = ttft + tpot * (osl - 1)
    return RequestRecord(
        id="r", arrival=at, model="m", outcome="ok", isl=isl, osl=osl, ttft=ttft, e2e=last, legs=[], status=200
    )


async def test_what_the_profile_says_is_what_is_predicted(tmp_path: Path) -> None:
    manifest = await swept(tmp_path / "p", 1)
    own = read_measured(tmp_path / "p").points
    lone = next(p.mean for p in own if p.kind == "prefill" and p.tokens == 3_000)
    ends = predict(tmp_path / "p", manifest, [record(0.0, lone, 0.0075, 3_000), record(100.0, lone, 0.0075, 3_000)])
    for end in ends:
        assert end.first is not None and (end.first - end.arrived) / SECOND == pytest.approx(lone, rel=0.01)


def end(number: int, at: float, ttft: float, tpot: float) -> EngineFinished:
    first = round((at + ttft) * SECOND)
    return EngineFinished(
        id=RequestId(str(number)),
        arrived=round(at * SECOND),
        first=first,
        at=first + round(10 * tpot * SECOND),
        tokens=11,
        reason="length",
        prompt=1_000,
        started=first,
        cached=0,
    )


def test_errors_are_of_the_prediction_and_no_longer_predictable_is_a_failure(tmp_path: Path) -> None:
    manifest = ProfileManifest(model="org/m", engine="vllm", engine_version="0.32", gpu="H100")
    records = [record(0.0, 0.1, 0.01), record(1.0, 0.3, 0.01)]
    good = compared(manifest, records, [end(0, 0.0, 0.1, 0.011), end(1, 1.0, 0.28, 0.011)])
    assert good.ttft.errors[0] == pytest.approx(-0.05) and good.tpot.errors[0] == pytest.approx(0.1)
    assert good.predictable
    bad = compared(manifest, records, [end(0, 0.0, 0.1, 0.012), end(1, 1.0, 0.3, 0.012)])
    assert not bad.predictable and list(bad.lines())[-1].startswith("No longer predictable")
    ledger = tmp_path / "ledger.md"
    ledger.write_text(f"# Accuracy\n\nWords.\n\n{HEAD}| old |\n\nMore words.\n")
    note(ledger, good)
    note(ledger, bad)
    lines = ledger.read_text().splitlines()
    assert lines[6] == "| old |" and lines[-1] == "More words."
    assert "| org/m | H100 | vllm 0.32 | 2 | 200.0 | -5.0% |" in lines[7] and lines[8].endswith(
        "no longer predictable |"
    )
    note(tmp_path / "new.md", good)
    assert (tmp_path / "new.md").read_text().startswith("# Accuracy ledger\n\n| date ")


async def test_a_profile_of_several_sizes_without_a_pick_predicts_nothing(tmp_path: Path) -> None:
    from penstock.kernel.errors import ConfigError

    manifest = msgspec.structs.replace(await swept(tmp_path / "p", 1, 2), decode=None)
    write_profile(tmp_path / "p", manifest, read_measured(tmp_path / "p").points)
    with pytest.raises(ConfigError, match="none picked"):
        predict(tmp_path / "p", read_manifest(tmp_path / "p"), [])
