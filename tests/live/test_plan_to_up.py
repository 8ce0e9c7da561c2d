"""From a config.json and a trace to a running deployment: the three commands of the README, pasted into a shell."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config.files.profile_manifest import read_measured
from penstock.kernel.errors import ConfigError
from penstock_lab.profiler.deployment_plan import plan_run
from penstock_lab.profiler.deployment_plan.intent_file import read_intent
from penstock_lab.profiler.deployment_plan.plan_run import plan
from tests.lab.engine.models import LLAMA_8B
from tests.live.cluster import Served, post, served

pytestmark = pytest.mark.live

README = Path(__file__).resolve().parents[2] / "README.md"


def commands() -> list[str]:
    block = re.search(r"```\n(penstock trace info trace\.jsonl.*?)```", README.read_text(), re.DOTALL)
    assert block is not None, "the README has three commands that begin with penstock trace info"
    return [re.sub(r"\s+#.*$", "", line) for line in block[1].replace("\\\n", " ").splitlines()]


def own_trace(path: Path) -> None:
    """Write a trace by our own generator: the requests of a simulated run are one."""
    folder = path.parent / "made"
    arguments = ["--workload", "chat", "--rate", "3", "--duration", "40", "--no-html", "--out", str(folder), "--json"]
    made = subprocess.run(
        [sys.executable, "-m", "penstock", "simulate", *arguments], capture_output=True, text=True, check=True
    )
    run = Path(json.loads(made.stdout)["variants"][0]["wall_run"])
    convert = [sys.executable, "-m", "penstock", "trace", "convert", str(run / "requests.jsonl"), str(path)]
    subprocess.run(convert, check=True, capture_output=True)


@pytest.mark.slow
def test_three_commands_lead_from_a_model_and_a_trace_to_a_running_deployment(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    own_trace(tmp_path / "trace.jsonl")
    info, plan, up = commands()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "penstock").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
    (tmp_path / "bin" / "penstock").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    for line in (info, plan):
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "Written: plan/penstock.yaml" in done.stdout
    word, *arguments = up.split()
    assert word == "penstock"
    with served(tmp_path, *arguments, "--frontend.port", "0") as cluster:
        assert answered(cluster) == 4


def answered(cluster: Served) -> int:
    """Return the output tokens of an answer of at most four."""
    (model,) = cluster.get("/admin/status")[1]["models"]
    body = {"model": model["name"], "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    status, answer, _ = post(f"{cluster.url}/v1/chat/completions", body)
    assert status == 200
    return int(answer["usage"]["completion_tokens"])


INTENT = """
model: config.json
engine: sim
hardware: {gpu: h100, max_gpus: 1}
slo: {ttft: 2s, itl: 50ms, attainment: 90%}
workload: {rate: 1/s, isl: 500, osl: 20, requests: 60}
profile: measure
output: plan
auto_apply: true
"""


@pytest.mark.slow
def test_an_intent_is_measured_planned_from_that_profile_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "intent.yaml").write_text(INTENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_run, "PROFILE_SECONDS", 40.0)
    intent = read_intent(tmp_path / "intent.yaml")
    assert intent.apply
    with pytest.raises(ConfigError, match="--output"):
        plan(intent.request)
    outcome = plan(intent.request, output=intent.output, jobs=1)
    manifest, points = read_measured(intent.output / "profile-h100")
    assert manifest.engine == "sim" and {point.tp for point in points} == {1}
    assert outcome.feasible and "profile-h100" in outcome.best[0].sources[0]
    assert outcome.config is not None
    with served(tmp_path, "up", outcome.config, "--frontend.port", "0") as cluster:
        assert answered(cluster) == 4
