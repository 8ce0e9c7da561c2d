"""Is a profile all that the planner's policies need to take a real vLLM from one replica to two under a ramp and back?

The profile is measured on the first engine that `penstock up` starts; a planner beside the cluster reads it by the knob
``timing: {kind: table, profile: FOLDER}``. The engines tell nothing of their passes, and `sla-classic` does not correct
the profile by latencies: nothing else can be learnt.
`sla-classic` scales prefill and decode pools only: its engines are of a decode pool, which prefills as no other does.
The model is that of ``planned``, too slow for a few requests per second.

`make soak-vllm` runs it and prints a row of the table in docs/bench/accuracy.md per policy; `make test-vllm` does not
collect a file of this name, since the three take seven minutes, and more on a busy machine.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from penstock.adapters.listen_address import free_port
from penstock.kernel.pass_report import STATS_ENV
from penstock.kernel.request_record import RequestRecord, decode_records
from penstock.kernel.values import RequestShape, Role, Slo
from penstock.planner.tick_record import TickRecord
from penstock.runtime.planning.planner_report import PlannerDecisions, past_decisions
from penstock.runtime.records import segments
from penstock_dynamo.profile_folder import read_profile
from penstock_lab.profiler.measurement.profile_run import ProfileOptions, run
from penstock_lab.profiler.measurement.sweep import SweepOptions
from tests.live.cluster import Served, served, until
from tests.live.ramp import PATIENCE, follow_a_ramp
from tests.vllm.handoff.conftest import KV, WIRE
from tests.vllm.planned.test_1_ramp import ANSWER, PROMPT, body, config
from tests.vllm.server import CPU_ENV, MODEL, START_LIMIT

SECONDS = 90.0
"""Of measuring."""
SEQS = 4
"""Sequences at a time: with fewer, one client alone is half of what a replica answers, and `sla-classic` wants two."""
SLO = Slo(ttft=2.0, itl=1.0)
INTERVAL = "5s"
POLICIES: dict[str, tuple[Role, dict[str, Any]]] = {
    "throughput-fpm": ("aggregated", {}),
    "slo": ("aggregated", {"slo": {"hold": "5s"}}),
    "sla-classic": ("decode", {"classic": {"sla": {"adjustment_interval": INTERVAL, "no_correction": True}}}),
}
"""Policy -> its engines' role, its knobs."""


class Measured(NamedTuple):
    """A served cluster of one engine, and that engine's profile."""

    cluster: Served
    settings: dict[str, Any]
    folder: Path


@contextmanager
def measured(venv: Path, checkpoint: Path, role: Role, folder: Path, profile: Path) -> Iterator[Measured]:
    """Serve an engine of a role, and measure it unless there is a profile: it does not depend on the role."""
    settings = config(venv, checkpoint, {}, SEQS)
    pool = settings["models"][MODEL]["pools"]["main"]
    pool |= {"role": role, "env": {STATS_ENV: "", **WIRE}}
    pool["args"] += [f"--kv-transfer-config={json.dumps(KV)}"] if role == "decode" else []
    del settings["planner"]
    # While a second engine starts, a busy machine's backlog grows to minutes, and none of it may be cut.
    settings["supervise"]["drain_timeout"] = PATIENCE
    settings["frontend"] = {"upstream": {"first_byte_timeout": PATIENCE}}
    (folder / "up.yaml").write_text(json.dumps(settings))
    env = {**CPU_ENV, "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    up = ["up", "up.yaml", "--frontend.port", str(free_port())]
    with served(folder, *up, env=env, start_limit=START_LIMIT) as cluster:
        (worker,) = cluster.get("/admin/status")[1]["workers"]
        if not profile.exists():
            measure(worker["url"], profile)
        pool["sim"] = {"timing": {"kind": "table", "profile": str(profile)}}
        yield Measured(cluster, settings, profile)


def measure(url: str, out: Path) -> None:
    sweep = SweepOptions(
        shape=RequestShape(float(PROMPT), float(ANSWER)), prefill_granularity=4, decode_granularity=2, longest=320
    )
    asyncio.run(run(ProfileOptions(sweep=sweep, out=out, slo=SLO, url=url, seconds=SECONDS)))


@contextmanager
def planner(measured: Measured, policy: str, more: dict[str, Any], folder: Path) -> Iterator[Path]:
    """Plan beside the cluster; yield the planner's run folder."""
    folder.mkdir()
    planning = {
        "policy": policy,
        **more,
        "load_interval": "1s",
        "throughput_interval": INTERVAL,
        "start": {"assumed": "30s", "deadline": f"{START_LIMIT:g}s"},
        "budget": {"max_gpus": 2},
    }
    (folder / "planner.yaml").write_text(json.dumps({**measured.settings, "planner": planning}))
    words = ["planner", "planner.yaml", "--url", measured.cluster.url, "--set", f"runs.dir={folder / 'runs'}"]
    with (folder / "planner.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *words], cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        until(lambda: process.poll() is not None or any((folder / "runs").glob("*/planner.jsonl")), 60.0)
        assert process.poll() is None, (folder / "planner.log").read_text()
        (found,) = (folder / "runs").iterdir()
        yield found
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def ticks(run: Path) -> list[TickRecord]:
    raw = msgspec.json.encode(past_decisions(run, 1000, every=True))
    return msgspec.json.decode(raw, type=PlannerDecisions[TickRecord]).decisions


def answered(cluster: Served) -> list[RequestRecord]:
    return decode_records(line for file in segments.opened(cluster.run / "requests.jsonl") for line in file)


def sources(value: object) -> set[str]:
    """Return every source of speeds that a tick's evidence names."""
    if not isinstance(value, dict):
        return set()
    mine = {text for name in ("source", "speed") if name in value for text in texts(value[name])}
    return mine.union(*(sources(each) for name, each in value.items() if name not in ("source", "speed")))


def texts(value: object) -> set[str]:
    return {value} if isinstance(value, str) else set(value.values()) if isinstance(value, dict) else set()


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the profile is, once the first policy's engine is measured."""
    return tmp_path_factory.mktemp("ramped") / "profile"


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_follows_a_ramp_from_a_profile_alone(
    policy: str, venv: Path, checkpoint: Path, profile: Path, tmp_path: Path
) -> None:
    role, knobs = POLICIES[policy]
    with measured(venv, checkpoint, role, tmp_path, profile) as case:
        print(f"\n{follow(case, policy, knobs, tmp_path)}")


def follow(case: Measured, policy: str, knobs: dict[str, Any], folder: Path) -> str:
    """See a policy follow the ramp; return a row for the docs."""
    curves = read_profile(case.folder).decode()
    assert curves is not None
    itl = curves.itl_at(SEQS, PROMPT + ANSWER / 2)
    one = SEQS / itl / ANSWER
    with planner(case, policy, knobs, folder / "planned") as run:

        def explained() -> str:
            return "\n".join(tick.why for tick in ticks(run))

        before = len(answered(case.cluster))
        followed = follow_a_ramp(case.cluster, body, START_LIMIT, one=one, explained=explained)
        named = set[str]().union(*(sources(tick.evidence) for tick in ticks(run)))
    assert named == {"profile"}, named
    until(lambda: len(answered(case.cluster)) == before + followed.requests, 30.0)  # records are written in batches
    records = answered(case.cluster)[before:]
    within = sum(record.within(SLO) for record in records) / len(records)
    seconds = " | ".join(f"{each:.0f}" for each in followed[1:])
    return f"| {policy} | {one:.2f} | {followed.requests} | {seconds} | {within:.0%} |"
