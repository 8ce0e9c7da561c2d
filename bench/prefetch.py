"""Whether bringing a session's blocks up before its next request pays, in simulation: TTFT with and without.

usage: python bench/prefetch.py [--docs docs/bench/agents.md]

Coding agents over eight engines with 64 GiB of host memory and 1 TiB of disk each; pauses between turns as they are in
the workload, and pauses that are alike. Some minutes.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from penstock_lab.report.markdown import write_part
from penstock_lab.traffic.formats.mooncake import mooncake_lines
from penstock_lab.traffic.lengths import Lognormal
from penstock_lab.traffic.workloads import Coding, coding

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "examples/agents/cluster.yaml"
PAUSES = {
    "as in the workload: median 3 s, long tail": (Coding(), 1.6, 1000),
    "about 60 s each": (Coding(tool_time=Lognormal(60, 0.15, 1, 300)), 2.4, 1000),
}
WAYS = {"off": "router.prefetch=false", "learnt": "router.prefetch=true"}


def simulated(trace: Path, override: str, folder: str) -> dict[str, float]:
    """Return the figures of one simulated run."""
    command = [sys.executable, "-m", "penstock", "simulate", str(CLUSTER), "--trace", str(trace), "--closed-loop"]
    command += ["--host-cache", "64GiB", "--disk-cache", "1TiB", "--no-html", "--json", "--jobs", "1", "--out", folder]
    command += ["--set", "router.preset=agentic", "--set", override]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)["variants"][0]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path)
    given = parser.parse_args()
    lines = [
        "| pauses | prefetch | hit rate | of it host, disk | TTFT mean | TTFT p50 | TTFT p95 | brought up | used "
        "| wasted |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (shape, rate, count) in PAUSES.items():
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.jsonl"
            requests = itertools.islice(coding(rate, random.Random(21), shape=shape), count)
            trace.write_bytes(b"".join(mooncake_lines(requests)))
            for way, override in WAYS.items():
                found = simulated(trace, override, folder)
                tiers: dict[str, int] = found["tokens"]["cached_by_tier"]  # type: ignore[index, assignment]
                prompt: int = found["tokens"]["prompt"]  # type: ignore[index, assignment]
                shares = ", ".join(f"{tiers.get(tier, 0) / prompt:.1%}" for tier in ("host", "disk"))
                ahead: dict[str, int] = found["prefetched"]  # type: ignore[assignment]
                lines.append(
                    f"| {name} | {way} | {found['hit_rate']:.1%} | {shares} | {found['ttft_mean_s'] * 1e3:,.0f} ms "
                    f"| {found['ttft_p50_s'] * 1e3:,.0f} ms | {found['ttft_p95_s'] * 1e3:,.0f} ms "
                    f"| {ahead['brought']:,} | {ahead['used']:,} | {ahead['wasted']:,} |"
                )
                print(lines[-1], flush=True)
    if given.docs is not None:
        write_part(given.docs, "\n".join(lines), "prefetch")


if __name__ == "__main__":
    main()
