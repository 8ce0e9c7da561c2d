"""Does a simulated hand-off say what a peer's says? Four prefill and four decode engines beside Dynamo's replay."""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from penstock_lab.traffic.formats.mooncake import MooncakeTrace
from penstock_lab.traffic.trace_slices import spread_ties

ROOT = Path(__file__).resolve().parents[2]
TRACES = {
    "synthetic": "mooncake_synthetic_trace.jsonl",
    "conversation": "mooncake_conversation_first6000.jsonl",
}
MODES = ("round_robin", "kv")
WORKERS = 4
REPEATS = 3
"""Of the peer with KV routing, which draws differently each time; everything else is the same each time."""
KV_BYTES, GB_PER_S = 131_072, 64.0
"""Of one token, and of a link: the peer's default rate."""
APART = 0.25
"""Arrivals so much slower, those of one timestamp spread up to the next: prompts seldom meet on a prefill worker."""
EQUAL = 1e-4
"""Seconds within which two prefills took equally long."""
Row = dict[str, Any]


def run(peer: Path, traces: Path, scratch: Path) -> list[Row]:
    """Measure every cell on both sides.

    Returns: rows with ``who``, ``trace``, ``mode``, ``speed`` of arrivals, ``moved`` (whether KV takes time), and
    means in seconds.
    """
    rows: list[Row] = []
    cells = [(trace, 1.0, moved) for trace in TRACES for moved in (False, True)]
    cells += [(trace, APART, False) for trace in TRACES]
    for trace, speed, moved in cells:
        path = traces / TRACES[trace]
        if not path.exists():
            continue
        if speed == APART:
            path = spread(path, scratch)
        for mode in MODES:
            key = {"part": "parity", "trace": trace, "mode": mode, "speed": speed, "moved": moved}
            mine, requests = ours(path, scratch, mode, speed, moved)
            runs = [theirs(peer, path, scratch, mode, speed, moved) for _ in range(REPEATS if mode == "kv" else 1)]
            figures = {name: median(found[name] for found, _ in runs) for name in runs[0][0]}
            rows.append({**key, "who": "ours", **mine, **traced(requests, runs[-1][1])["ours"]})
            rows.append({**key, "who": "peer", **figures, **traced(requests, runs[-1][1])["peer"]})
            print(
                f"parity: {trace} {mode} at {speed:g}: TTFT {mine['ttft']:.4f} and {figures['ttft']:.4f} s", flush=True
            )
    return [*rows, two_prompts(peer, scratch)]


def two_prompts(peer: Path, scratch: Path) -> Row:
    """Give one prefill worker two prompts of a pass each, the second while the first is computed: when are they done?

    Returns: ``ours`` and ``peer``: seconds from the start until either's KV is there.
    """
    trace = scratch / "two.jsonl"
    prompts = [(at, list(range(first, first + 16))) for at, first in ((0, 0), (100, 16))]
    rows = ({"timestamp": at, "input_length": 8192, "output_length": 6, "hash_ids": ids} for at, ids in prompts)
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mine = ours(trace, scratch, "round_robin", 1.0, False, workers=1)[1]
    other = theirs(peer, trace, scratch, "round_robin", 1.0, False, workers=1)[1]
    return {
        "part": "two prompts",
        "ours": sorted(one["legs"][0]["last"] for one in mine),
        "peer": sorted(row["source_held_ms"] / 1e3 for row in other),
    }


def spread(trace: Path, scratch: Path) -> Path:
    """Write a trace whose requests of one timestamp are spread up to the next; return the new file."""
    with trace.open("rb") as lines:
        found = list(spread_ties(MooncakeTrace(lines)))
    path = scratch / f"spread-{trace.name}"
    rows = (
        {"timestamp": round(one.at * 1e3), "input_length": one.isl, "output_length": one.osl, "hash_ids": one.hash_ids}
        for one in found
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ours(
    trace: Path, scratch: Path, mode: str, speed: float, moved: bool, *, workers: int = WORKERS
) -> tuple[Row, list[Row]]:
    """Simulate; return the figures and the records of all requests."""
    sim = "models.sim.pools.main.sim"
    knobs = {
        "router.mode": mode,
        "router.handoff.conditional": "off",
        "router.request_timeout": 100_000,
        "runs.journal": "false",
        f"{sim}.max_model_len": 1_000_000,
        # One byte: a hand-off takes no time, as with a peer that was told no size.
        f"{sim}.transfer.kv_bytes_per_token": KV_BYTES if moved else 1,
        f"{sim}.transfer.bandwidth": GB_PER_S * 1e9,
    }
    command = [
        *(sys.executable, "-m", "penstock", "simulate", "--trace", str(trace), "--speed-up", f"{speed:g}"),
        *("--prefill", str(workers), "--decode", str(workers), "--no-html", "--no-decisions", "--json"),
        *("--out", str(scratch), *(word for name, value in knobs.items() for word in ("--set", f"{name}={value}"))),
    ]
    found = json.loads(_printed(command))["variants"][0]
    with (Path(found["wall_run"]) / "requests.jsonl").open() as lines:
        requests = [json.loads(line) for line in lines]
    return {
        "requests": found["requests"]["ok"],
        "ttft": found["ttft_mean_s"],
        "ttft_p99": found["ttft_p99_s"],
        "itl": found["itl_mean_s"],
        "e2e": found["e2e_mean_s"],
        "reuse": found["hit_rate"],
        "wall": found["wall_s"],
    }, requests


def theirs(
    peer: Path, trace: Path, scratch: Path, mode: str, speed: float, moved: bool, *, workers: int = WORKERS
) -> tuple[Row, list[Row]]:
    """Replay with the peer; return the figures and its line of each request."""
    engine: Row = {"block_size": 64}
    if moved:
        engine |= {"kv_bytes_per_token": KV_BYTES, "kv_transfer_bandwidth": GB_PER_S}
    report, lines = scratch / "peer.json", scratch / "peer.jsonl"
    command = [
        *(str(peer), "-m", "dynamo.replay", str(trace), "--replay-mode", "offline", "--trace-block-size", "512"),
        *("--router-mode", "kv_router" if mode == "kv" else mode, "--arrival-speedup-ratio", f"{speed:g}"),
        *("--num-prefill-workers", str(workers), "--num-decode-workers", str(workers)),
        *("--prefill-engine-args", json.dumps({**engine, "worker_type": "prefill"})),
        *("--decode-engine-args", json.dumps({**engine, "worker_type": "decode"})),
        *("--report-json", str(report), "--report-jsonl", str(lines)),
    ]
    _printed(command)
    found = json.loads(report.read_text())
    return {
        "requests": found["completed_requests"],
        "ttft": found["mean_ttft_ms"] / 1e3,
        "ttft_p99": found["p99_ttft_ms"] / 1e3,
        "itl": found["mean_itl_ms"] / 1e3,
        "e2e": found["mean_e2e_latency_ms"] / 1e3,
        "reuse": found["prefix_cache_reused_ratio"],
        "wall": found["wall_time_ms"] / 1e3,
    }, [json.loads(line) for line in lines.read_text().splitlines()]


def traced(ours: Sequence[Row], theirs: Sequence[Row]) -> Mapping[str, Row]:
    """Take both sides' TTFT apart, request by request: until the prompt's KV is there, and from then on.

    Returns: for ``ours`` and ``peer`` the means of ``prefill`` and ``after`` in seconds; ``equal``: share of prefills
    that took equally long on both.
    """
    waiting: dict[tuple[int, int, int], list[Row]] = defaultdict(list)
    for row in theirs:
        waiting[round(row["arrival_time_ms"]), row["input_length"], row["output_length"]].append(row)
    pairs = []
    for one in ours:
        same = waiting.get((round(one["arrival"] * 1e3), one["isl"], one["osl"]))
        if same:
            pairs.append((one, same.pop(0)))
    mine = [(one["legs"][0]["last"] - one["arrival"], one["ttft"]) for one, _ in pairs]
    other = [((row["source_held_ms"] - row["arrival_time_ms"]) / 1e3, row["ttft_ms"] / 1e3) for _, row in pairs]
    equal = mean(abs(a - b) < EQUAL for (a, _), (b, _) in zip(mine, other, strict=True))
    return {
        who: {
            "prefill": mean(prefill for prefill, _ in found),
            "after": mean(ttft - prefill for prefill, ttft in found),
            "equal": equal,
        }
        for who, found in (("ours", mine), ("peer", other))
    }


def _printed(command: Sequence[str]) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)[:200]} failed:\n{ended.stderr[-2000:]}")
    return ended.stdout
