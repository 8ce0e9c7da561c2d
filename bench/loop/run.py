"""For how long does the frontend hold its event loop under load? Budget: 5 ms.

usage: python bench/loop/run.py [--docs docs/bench/loop.md] [--repeats 3]

A cluster is started for every run, `penstock bench` drives it, and the frontend's own monitor is read afterwards: it
looks at the clock every 5 ms and takes as a *block* the part of a delay that this process can have caused (its CPU
time), since engines, generator and frontend share the machine's cores.
"""

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from penstock_lab.report.markdown import write_part

LOADS: dict[str, list[str]] = {
    "chat, 4 requests/s": ["--workload", "chat", "--rate", "4", "--requests", "60"],
    "chat, 10 requests/s": ["--workload", "chat", "--rate", "10", "--requests", "150"],
    "rag, 4 requests/s": ["--workload", "rag", "--rate", "4", "--requests", "60"],
    "agent, 10 requests/s": ["--workload", "agent", "--rate", "10", "--requests", "150"],
}


def one(load: list[str], seed: int) -> dict[str, float]:
    """Start a cluster, drive it, and return what the monitor saw."""
    with tempfile.TemporaryDirectory() as folder:
        knobs = ["--frontend.port", "0", "--runs.dir", folder, "--set", "models.sim.pools.main.sim.stream_interval=4"]
        process = subprocess.Popen([sys.executable, "-m", "penstock", "up", *knobs], stdout=subprocess.PIPE, text=True)
        try:
            url = endpoint(process)
            driven = subprocess.run(
                [sys.executable, "-m", "penstock", "bench", url, *load, "--seed", str(seed), "--out", folder, "--json"],
                capture_output=True,
                text=True,
                check=False,
            )
            bench: dict[str, Any] = json.loads(driven.stdout)
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                metrics = answer.read().decode()
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    return {
        "requests": float(bench["requests"]["ok"]),
        "block": 1e3 * number(metrics, "penstock_loop_block_longest_seconds"),
        "stalls": number(metrics, "dynamo_frontend_event_loop_stall_total"),
        "looks": number(metrics, "dynamo_frontend_event_loop_delay_seconds_count"),
    }


def endpoint(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"Endpoint\s+(\S+)/v1", line)
        if found:
            time.sleep(1.0)  # start-up is no load
            return found.group(1)
    raise SystemExit("penstock up did not start")


def number(metrics: str, name: str) -> float:
    found = re.search(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE)
    if found is None:
        raise SystemExit(f"the frontend has no metric {name}")
    return float(found.group(1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    rows = [
        "| load | requests answered | longest block ms (each repeat) | blocks over 5 ms | of looks |",
        "|---|---|---|---|---|",
    ]
    for name, load in LOADS.items():
        runs = [one(load, seed) for seed in range(options.repeats)]
        blocks = ", ".join(f"{run['block']:.1f}" for run in runs)
        stalls, looks = (statistics.median(run[key] for run in runs) for key in ("stalls", "looks"))
        rows.append(f"| {name} | {min(r['requests'] for r in runs):.0f} | {blocks} | {stalls:.0f} | {looks:,.0f} |")
        print(rows[-1], flush=True)
    if options.docs is not None:
        write_part(options.docs, "\n".join([time.strftime("%Y-%m-%d", time.gmtime()), "", *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
