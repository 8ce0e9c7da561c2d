"""How fast is a simulation, and does it say what a peer's says? Ours beside Dynamo's offline replay, in one run.

usage: python bench/simulate/run.py [--peer-python PATH] [--traces FOLDER] [--repeats 3] [--million] [--docs FILE]

Each measurement is a process of its own: ours, ours compiled (.venv-fast, which `make fast` makes) and the peer's in
turn. The peer's interpreter is --peer-python, else $PEERS/replay/bin/python; what is not there is left out. The
trace is the Mooncake conversation trace of --traces, PENSTOCK_TRACES or ../shared/traces; without it only the tables of
our own workloads are made.
"""

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import Cells, Figures, against_peer, by_length, by_size

from penstock_lab.report.markdown import write_part

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRACE = "mooncake_conversation_first6000.jsonl"
SERVER = {"block_size": 64, "kv_blocks": 16_384}
"""Tokens per block, and blocks of each of the four engines, by the peer's defaults."""
SIZES = [(10_000, 4), (10_000, 16), (10_000, 64), (10_000, 512), (100_000, 64), (100_000, 512)]
MILLION = (1_000_000, 64)
"""Requests, and workers that serve them."""
LENGTHS = (100, 400, 1600)
"""Output tokens of each answer."""
FAST = ROOT / ".venv-fast" / "bin" / "python"
BUILDS = {"ours": Path(sys.executable)} | ({"ours, compiled": FAST} if FAST.exists() else {})
CELLS = [("round_robin", 64), ("round_robin", 512), ("kv", 64), ("kv", 512)]


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    parts = [about(options)]
    trace = options.traces / TRACE
    peer = options.peer_python or peer_of_environment()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if trace.exists():
            if peer is None:
                print("no peer: name its interpreter with --peer-python, or set PEERS", file=sys.stderr)
            cells: Cells = {}
            sides = [*BUILDS, *(["peer"] if peer is not None else [])]
            for repeat in range(options.repeats):
                for mode, size in CELLS:
                    found = cells.setdefault((mode, size), {who: [] for who in sides})
                    for who in sides if repeat % 2 == 0 else reversed(sides):
                        if who in BUILDS:
                            found[who].append(ours(BUILDS[who], scratch, *on_trace(trace, mode, size)))
                        elif peer is not None:
                            found[who].append(theirs(peer, scratch, trace, mode, size))
            parts.append(against_peer(cells))
        else:
            print(f"no trace {trace}: name its folder with --traces or PENSTOCK_TRACES", file=sys.stderr)
        parts.append(
            by_size(
                [
                    (
                        *(requests, workers, mode),
                        {
                            who: ours(python, scratch, *on_chat(mode, requests, workers))
                            for who, python in builds.items()
                        },
                    )
                    for requests, workers in [*SIZES, *([MILLION] if options.million else [])]
                    for builds in [BUILDS if requests < MILLION[0] else dict([list(BUILDS.items())[-1]])]
                    for mode in ("round_robin", "kv")
                ]
            )
        )
        parts.append(by_length([(length, ours(BUILDS["ours"], scratch, *on_fixed(length))) for length in LENGTHS]))
    text = "\n\n".join(parts)
    print(text)
    if options.docs is not None:
        write_part(options.docs, text)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path)
    traces = Path(os.environ.get("PENSTOCK_TRACES") or ROOT.parent / "shared" / "traces")
    parser.add_argument("--traces", type=Path, default=traces)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--million", action="store_true", help="also a million requests, on the fastest build")
    parser.add_argument("--docs", type=Path)
    return parser.parse_args(arguments)


def peer_of_environment() -> Path | None:
    folder = os.environ.get("PEERS")
    path = Path(folder, "replay", "bin", "python") if folder else None
    return path if path is not None and path.exists() else None


def about(options: argparse.Namespace) -> str:
    day = time.strftime("%Y-%m-%d")
    return (
        f"{day}, {os.cpu_count()} cores, {platform.python_implementation()} {platform.python_version()}; "
        f"medians of {options.repeats} runs in turn, load before them {os.getloadavg()[0]:.1f}."
    )


def on_trace(trace: Path, mode: str, size: int) -> tuple[str, ...]:
    return (
        *("--trace", str(trace), "--workers", "4"),
        *("--set", f"router.mode={mode}"),
        *("--set", "models.sim.pools.main.sim.max_model_len=1000000", "--set", "router.request_timeout=100000"),
        *("--set", f"models.sim.pools.main.sim.block_size={size}"),
        *("--set", f"models.sim.pools.main.sim.kv_blocks={SERVER['kv_blocks'] * SERVER['block_size'] // size}"),
    )


def on_chat(mode: str, requests: int, workers: int) -> tuple[str, ...]:
    return (
        *("--workload", "chat", "--rate", str(workers * 2), "--workers", str(workers), "--requests", str(requests)),
        *("--set", f"router.mode={mode}"),
    )


def on_fixed(answer: int) -> tuple[str, ...]:
    return (
        *("--workload", "fixed", "--prompt", "1000", "--answer", str(answer), "--rate", "4", "--requests", "10000"),
        *("--set", "router.mode=round_robin"),
    )


def ours(python: Path, scratch: Path, *arguments: str) -> Figures:
    """Simulate in a process of its own; what is written down is the records, not the decisions and no journal."""
    command = [
        *(str(python), "-m", "penstock", "simulate", *arguments),
        *("--no-html", "--no-decisions", "--set", "runs.journal=false", "--json", "--out", str(scratch)),
    ]
    text, peak = run(command, scratch)
    found = json.loads(text)["variants"][0]
    shutil.rmtree(found["wall_run"])
    return {
        "wall": found["wall_s"],
        "requests": found["requests"]["submitted"],
        "ttft": found["ttft_mean_s"],
        "itl": found["itl_mean_s"],
        "e2e": found["e2e_mean_s"],
        "reuse": found["hit_rate"],
        "peak": peak,
    }


def theirs(peer: Path, scratch: Path, trace: Path, mode: str, size: int) -> Figures:
    """Replay the trace with the peer, offline."""
    out = scratch / "peer.json"
    command = [
        *(str(peer), "-m", "dynamo.replay", str(trace), "--num-workers", "4", "--replay-mode", "offline"),
        *("--router-mode", "kv_router" if mode == "kv" else mode, "--trace-block-size", "512"),
        *("--extra-engine-args", json.dumps({"block_size": size, "num_gpu_blocks": SERVER["kv_blocks"] * 64 // size})),
        *("--report-json", str(out)),
    ]
    run(command, scratch)
    found = json.loads(out.read_text())
    return {
        "wall": found["wall_time_ms"] / 1e3,
        "requests": found["completed_requests"],
        "ttft": found["mean_ttft_ms"] / 1e3,
        "itl": found["mean_itl_ms"] / 1e3,
        "e2e": found["mean_e2e_latency_ms"] / 1e3,
        "reuse": found["prefix_cache_reused_ratio"],
        "peak": math.nan,
    }


def run(command: list[str], scratch: Path) -> tuple[str, float]:
    """Run a command; return what it printed, and its peak memory in MiB."""
    start = time.monotonic()
    out, err = scratch / "out", scratch / "err"
    with out.open("wb") as printed, err.open("wb") as complained:
        process = subprocess.Popen(command, stdout=printed, stderr=complained, cwd=ROOT)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{err.read_text()[-3000:]}")
    print(f"{time.monotonic() - start:6.1f} s  {' '.join(command[1:])[:150]}", file=sys.stderr)
    return out.read_text(), used.ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
