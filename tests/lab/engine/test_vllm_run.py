"""Is a real vLLM run what the engine makes of it? Llama-3.1-8B on one RTX PRO 6000, 300 requests at 10 per second."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import pytest

from penstock.kernel.machine import SECOND
from penstock.kernel.simulation import Simulation
from penstock.kernel.values import Prompt
from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import EngineFinished, SubmitRequest
from penstock_lab.engine.kv_capacity import kv_blocks_of
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.engine.timing.gpus import named
from penstock_lab.engine.timing.model_shape import shape_of
from tests.lab.engine.models import LLAMA_8B

RUN = Path(os.environ.get("PENSTOCK_TRACES", "../shared/traces")) / "vllm_real"
PROFILE = RUN / "profile_RTXPRO6000_Llama-3.1-8B" / "bf16" / "tp1"

pytestmark = pytest.mark.skipif(not PROFILE.is_dir(), reason="the real run is not here: set PENSTOCK_TRACES")


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return str(path)


def requests() -> list[dict]:
    lines = (RUN / "RTXPRO6000_Llama-3.1-8B__requests.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def means(answers: Iterable[tuple[float, float, float, int]]) -> tuple[float, float, float]:
    """Return mean TTFT, TPOT and time from end to end, in seconds, of (arrival, first token, last token, tokens)."""
    found = list(answers)
    return (
        mean(first - at for at, first, _, _ in found),
        mean((last - first) / (tokens - 1) for _, first, last, tokens in found if tokens > 1),
        mean(last - at for at, _, last, _ in found),
    )


def errors(timing: TimingSettings) -> tuple[float, float, float]:
    """Return by what share the engine is off in mean TTFT, TPOT and end-to-end time, on the settings of the run."""
    rows = requests()
    settings = SimSettings(
        block_size=16,
        kv_blocks=kv_blocks_of(shape_of(LLAMA_8B), named("rtxpro6000"), block_size=16),
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        timing=timing,
        async_scheduling=True,
    )
    done: list[EngineFinished] = []

    def world(now: int, sender: str, effect: object) -> tuple[()]:
        if isinstance(effect, EngineFinished):
            done.append(effect)
        return ()

    simulation = Simulation({"engine": Engine(settings, table=load_timing(timing))}, world)
    began = min(row["arrival_time"] for row in rows)
    for row in rows:
        submit = SubmitRequest(
            id=row["request_id"], prompt=Prompt(row["input_toks"]), max_tokens=row["output_toks"], ignore_eos=True
        )
        simulation.post(round((row["arrival_time"] - began) * SECOND), "engine", submit)
    simulation.run()
    assert len(done) == len(rows)
    ours = means((d.arrived / SECOND, (d.first or 0) / SECOND, d.at / SECOND, d.tokens) for d in done)
    real = means((r["queued_ts"], r["first_token_ts"], r["last_token_ts"], r["output_toks"]) for r in rows)
    ttft, tpot, whole = (mine / theirs - 1.0 for mine, theirs in zip(ours, real, strict=True))
    return ttft, tpot, whole


def test_a_profile_of_the_gpu_s_operators_gives_the_run_back(model: str) -> None:
    ttft, tpot, whole = errors(TimingSettings(kind="operators", model=model, profile=str(PROFILE)))
    assert abs(ttft) < 0.04 and abs(tpot) < 0.01 and abs(whole) < 0.02


def test_the_data_sheet_alone_comes_near(model: str) -> None:
    ttft, tpot, whole = errors(TimingSettings(kind="roofline", model=model, gpu="rtxpro6000"))
    assert abs(ttft) < 0.15 and abs(tpot) < 0.1 and abs(whole) < 0.1
