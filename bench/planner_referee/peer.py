"""What does one run come to in Dynamo's simulator? usage: peer.py PROFILE.npz (run by the peer's Python)

Reads jobs as JSON lines and answers each with a line. Its own planner is attached as its own replay driver attaches it
(`dynamo.replay.planner.planner_replay_adapter`), ours as any object can be. That driver also lets its planner begin
with a benchmark of the simulated engine, on a grid of its own; here both planners are given the same points of it.
"""

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dynamo.planner
import numpy as np
from dynamo._core import run_mocker_trace_replay
from dynamo.common.forward_pass_metrics import ForwardPassMetrics, ScheduledRequestMetrics
from dynamo.mocker.config import normalize_mocker_config
from dynamo.mocker.utils.planner_profiler_perf_data_converter import convert_profile_results_to_npz
from dynamo.replay.planner import planner_replay_adapter
from policy import Policy, Watched, planner_of

from penstock.kernel.values import EngineLimits
from penstock.planner.performance.speed_sources import KnownSpeeds

SWEEP = Path(dynamo.planner.__file__).parent / "tests" / "data" / "profiling_results" / "H200_TP1P_TP1D"
"""The profile that the peer ships: Llama-3.1-8B FP8 on one H200."""
CONTEXTS, STEPS = (500.0, 2000.0, 4000.0, 8000.0), 8
"""Of the benchmark, as the peer's replay driver has them: tokens of a decode, and steps of prompts and of batches."""
QUIET = {
    "environment": "virtual",
    "backend": "mocker",
    "report_interval_hours": None,
    "live_dashboard_port": 0,
    "control_api_port": 0,
    "metric_reporting_prometheus_port": 0,
}


def main() -> None:
    table = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what it logs to stdout must not come between the answers
    if not table.exists():
        convert_profile_results_to_npz(SWEEP, table)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            found = run(job, table)
        except Exception as error:  # noqa: BLE001 - told to whoever asked, who goes on with the next
            found = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps({"key": job["key"], **found}) + "\n")
        answers.flush()


def run(job: dict[str, Any], table: Path) -> dict[str, Any]:
    """Replay a trace with a fleet that is static, or scaled by one of both planners."""
    points = benchmark(table, job["engine"])
    args = {
        role: normalize_mocker_config(
            {
                "engine": {
                    **job["engine"],
                    "worker_type": role,
                    "timing_model": {
                        "type": "external",
                        "provider": "dynamo_profile",
                        "config": {"path": str(table)},
                    },
                },
                "startup_time": job["start_up"] or None,
            }
        )
        for role in (["aggregated"] if job["layout"] == "aggregated" else ["prefill", "decode"])
    }
    workers = job["workers"]
    fleet = (
        {"extra_engine_args": args["aggregated"], "num_workers": workers["decode"]}
        if job["layout"] == "aggregated"
        else {
            "prefill_engine_args": args["prefill"],
            "decode_engine_args": args["decode"],
            "num_prefill_workers": workers["prefill"],
            "num_decode_workers": workers["decode"],
        }
    )
    started = time.perf_counter()
    with ExitStack() as stack:
        policy = None
        if job["kind"] == "ours":
            policy = Watched(ours(job, points))
        elif job["kind"] == "peer":
            policy = Watched(theirs(job, args, points, stack))
        native = run_mocker_trace_replay(
            [job["trace"]],
            **fleet,
            trace_block_size=job["trace_block"],
            sla_ttft_ms=job["ttft"] * 1e3,
            sla_itl_ms=job["itl"] * 1e3,
            scaling_policy=policy,
            capture_planner_details=False,
        )
    told = native.summary
    hours = told["duration_ms"] / 3.6e6
    found = {
        "requests": told["num_requests"],
        "attainment": told["goodput_completed_requests"] / told["num_requests"],
        "gpu_hours": told["gpu_hours"],
        "ttft_p99": told["p99_ttft_ms"] / 1e3,
        "wall": time.perf_counter() - started,
    }
    if policy is not None:
        found |= {
            "changes": policy.changes / hours,
            "turns": policy.turns / hours,
            "tick_ms": 1e3 * policy.seconds / max(1, policy.ticks),
        }
    return found


def ours(job: dict[str, Any], points: dict[str, Any]) -> Policy:
    known = KnownSpeeds(metrics={"self-benchmark": points})
    engine = job["engine"]
    limits = EngineLimits(
        kv_tokens=engine["num_gpu_blocks"] * engine["block_size"],
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        max_model_len=engine["max_model_len"],
    )
    planner = planner_of(
        job["layout"], known, ttft=job["ttft"], itl=job["itl"], gpus=job["gpus"], **job.get("settings", {})
    )
    return Policy(planner, job["layout"], limits)


def theirs(job: dict[str, Any], args: dict[str, Any], points: dict[str, Any], stack: ExitStack) -> Any:
    """Return the peer's own planner in whatever mode the job says; the stack ends it."""
    settings = {
        **QUIET,
        "mode": "agg" if job["layout"] == "aggregated" else "disagg",
        "ttft_ms": job["ttft"] * 1e3,
        "itl_ms": job["itl"] * 1e3,
        "max_gpu_budget": job["gpus"],
        "decode_engine_num_gpu": 1,
        "prefill_engine_num_gpu": 1,
        **job["settings"],
    }
    tighter = settings.pop("service_level_times", 1.0)
    settings["ttft_ms"] *= tighter
    settings["itl_ms"] *= tighter
    adapter = stack.enter_context(
        planner_replay_adapter(
            extra_engine_args=args.get("aggregated"),
            prefill_engine_args=args.get("prefill"),
            decode_engine_args=args.get("decode"),
            planner_config_arg=json.dumps(settings),
            capture_details=False,
        )
    )
    if settings["optimization_target"] == "sla":
        prefill, decode = passes(points)
        if job["layout"] == "aggregated":
            adapter.install_benchmark_fpms(agg_fpms=prefill + decode)
        else:
            adapter.install_benchmark_fpms(prefill_fpms=prefill, decode_fpms=decode)
    return adapter


def benchmark(table: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """Return what the simulated engine takes for lone prompts and for decodes, read off the nodes of its table."""
    nodes = np.load(table)
    most = engine["max_num_batched_tokens"]
    prompts = range(100, most + 1, max(1, (most - 100) // STEPS))
    seconds = np.interp(prompts, nodes["prefill_isl"], nodes["prefill_ttft_ms"]) / 1e3
    decode = {}
    room = engine["num_gpu_blocks"] * engine["block_size"]
    for context in CONTEXTS:
        column = int(np.abs(nodes["decode_context_length"] - context).argmin())
        length = nodes["decode_context_length"][column]
        for batch in range(1, engine["max_num_seqs"] + 1, engine["max_num_seqs"] // STEPS):
            row = int(np.abs(nodes["decode_active_kv_tokens"] - batch * length).argmin())
            kv = nodes["decode_active_kv_tokens"][row]
            if 0 < kv <= room:
                decode[row, column] = {
                    "batch": max(1, round(kv / length)),
                    "kv_tokens": round(kv),
                    "seconds": float(nodes["decode_itl"][row, column] / 1e3),
                }
    return {
        "unit": "seconds",
        "prefill": [{"tokens": n, "seconds": float(s)} for n, s in zip(prompts, seconds, strict=True)],
        "decode": list(decode.values()),
    }


def passes(points: dict[str, Any]) -> tuple[list[ForwardPassMetrics], list[ForwardPassMetrics]]:
    """Return the points of prefill and of decode as the peer's planner takes them."""
    prefill = [
        ForwardPassMetrics(
            wall_time=each["seconds"],
            scheduled_requests=ScheduledRequestMetrics(num_prefill_requests=1, sum_prefill_tokens=each["tokens"]),
        )
        for each in points["prefill"]
    ]
    decode = [
        ForwardPassMetrics(
            wall_time=each["seconds"],
            scheduled_requests=ScheduledRequestMetrics(
                num_decode_requests=each["batch"], sum_decode_kv_tokens=each["kv_tokens"]
            ),
        )
        for each in points["decode"]
    ]
    return prefill, decode


if __name__ == "__main__":
    main()
