"""Does `penstock profile` measure engines by URL and its own, in the words of Dynamo's command, too?"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.config.files.profile_manifest import read_measured
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.kernel.errors import ConfigError
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.profiler.measurement.measured_engines import FoundGpus, link_between, machine_gpus, sizes_of

SIM = ["--sim.timing.kind", "roofline", "--sim.timing.model", "Llama-3.1-8B", "--sim.timing.gpu", "h100"]
SMALL = ["--isl", "400", "--osl", "50", "--max-context", "900", "--sim.max_num_seqs", "2", "--no-mixed"]
GRID = ["--prefill-interpolation-granularity", "3", "--decode-interpolation-granularity", "1"]


def penstock(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *words], capture_output=True, text=True, timeout=240, check=False, **more
    )


@pytest.mark.slow
def test_own_engines_of_two_sizes_are_measured_and_a_second_call_measures_nothing(tmp_path: Path) -> None:
    words = ["profile", "Llama-3.1-8B", *SIM, *SMALL, *GRID, "--tp", "1,2", "--ttft", "500", "--itl", "20"]
    done = penstock(*words, "--output-dir", str(tmp_path / "p"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Suggested prefill TP:1 (TTFT ") and "tokens/s/GPU" in lines[0]
    assert lines[1].startswith("Suggested planner upper/lower bound for prefill queue size: ")
    assert lines[2].startswith("Suggested decode TP:1 (ITL ")
    assert lines[3].startswith("Suggested planner upper/lower bound for decode kv cache utilization: ")
    profile = read_measured(tmp_path / "p")
    manifest = profile.manifest
    assert (manifest.model, manifest.engine, manifest.gpu, manifest.sizes) == ("Llama-3.1-8B", "sim", "h100", (1, 2))
    assert (manifest.slo.ttft, manifest.slo.itl) == (0.5, 0.02), "plain numbers are milliseconds"
    kinds = {(point.kind, point.tp) for point in profile.points}
    assert {(kind, tp) for kind in ("prefill", "decode", "cold_start", "warm_start") for tp in (1, 2)} <= kinds
    assert manifest.seconds > 0 and manifest.gpu_seconds > manifest.seconds
    for name in ("report.html", "points.csv", "selected_prefill_interpolation/raw_data.npz", "decode_raw_data.json"):
        assert (tmp_path / "p" / name).is_file(), name
    again = penstock(*words, "--out", str(tmp_path / "p"), "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["seconds"] == pytest.approx(manifest.seconds)
    compared = CliRunner().invoke(cli, ["profile", "diff", str(tmp_path / "p"), str(tmp_path / "p")]).output
    assert compared.startswith(f"0 of {len(profile.points)} points changed"), compared
    simulated = penstock(
        *("simulate", "--workload", "fixed", "--prompt", "400", "--answer", "50", "--rate", "2", "--requests", "20"),
        *("--models.sim.pools.main.sim.timing.kind", "table", "--models.sim.pools.main.sim.timing.profile"),
        *(str(tmp_path / "p"), "--models.sim.pools.main.sim.timing.model", "Llama-3.1-8B"),
        cwd=tmp_path,
    )
    assert simulated.returncode == 0, simulated.stderr


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    runner = CliRunner()
    for words, sentence in (
        (["profile"], "neither a model nor a URL"),
        (["profile", "sim", "--tp", "two"], "not a number of GPUs"),
        (["profile", "sim", "--watch", "1m"], "needs the URL"),
        (["profile", "sim", "--ttft", "soon"], "soon"),
    ):
        done = runner.invoke(cli, [*words, "--out", str(tmp_path / "x")])
        assert done.exit_code != 0 and sentence in f"{done.output}{done.exception}", (words, done.output)
    shown = runner.invoke(cli, ["profile", "--help"]).output
    assert "--isl" in shown and "profile diff" in shown


def test_gpus_are_found_with_memory_and_links(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*uuid*) printf "0, GPU-a\\n1, GPU-b\\n";;\n'
        '*memory.total*) printf "0, NVIDIA H100 80GB HBM3, 81559\\n1, NVIDIA H100 80GB HBM3, 81559\\n";;\n'
        'topo*) printf "\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0\\t X \\tNV18\\t0-15\\nGPU1\\tNV18\\t X \\t0-15\\n";;\n'
        "esac\n"
    )
    smi.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/bin:/usr/bin"}
    assert machine_gpus(env) == FoundGpus((0, 1), "NVIDIA H100 80GB HBM3", 81_559, "NV18")
    assert machine_gpus({**env, "CUDA_VISIBLE_DEVICES": "1"}) == FoundGpus((1,), "NVIDIA H100 80GB HBM3", 81_559, None)
    assert machine_gpus({"PATH": str(tmp_path / "empty")}) == FoundGpus()
    assert link_between("nothing", (0, 1)) is None


def test_sizes_go_by_the_machine_and_the_engine() -> None:
    roofline = PoolSettings(sim=SimSettings(timing=TimingSettings(kind="roofline")))
    assert sizes_of(roofline, (), 0) == (1, 2, 4, 8)
    assert sizes_of(PoolSettings(), (), 0) == (1,)
    vllm = PoolSettings(engine="vllm")
    assert (
        sizes_of(vllm, (), 8) == (1, 2, 4, 8) and sizes_of(vllm, (), 6) == (1, 2, 4) and sizes_of(vllm, (), 0) == (1,)
    )
    with pytest.raises(ConfigError, match="needs as many GPUs"):
        sizes_of(vllm, (4,), 2)
    with pytest.raises(ConfigError, match="one size only"):
        sizes_of(PoolSettings(engine="llamacpp"), (2,), 8)
