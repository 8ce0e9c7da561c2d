"""The preset agentic beside other routing, in simulation, on traffic that it was not tuned on.

usage: python bench/agentic.py [--docs docs/bench/agents.md] [--trace mooncake.jsonl]

Runs `penstock simulate examples/agents/cluster.yaml` for each traffic and each way to route, some five minutes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from penstock_lab.report.markdown import write_part

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "examples/agents/cluster.yaml"
WAYS = {
    "round robin": ("router.mode=round_robin",),
    "`kv`, the default": (),
    "`affinity.mode: soft` alone": ("router.affinity.mode=soft",),
    "`preset: agentic`": ("router.preset=agentic",),
}
TRAFFIC = {
    "coding, 1.6/s, closed loop": "--workload coding --rate 1.6 --duration 20m --seed 11 --closed-loop",
    "coding, 2.4/s, closed loop": "--workload coding --rate 2.4 --duration 15m --seed 12 --closed-loop",
    "coding in bursts, open loop": "--workload coding --rate 1.4 --duration 15m --seed 13 --arrivals gamma:cv=3",
    "agent, 40/s, closed loop": "--workload agent --rate 40 --duration 3m --seed 14 --closed-loop",
    "chat, 60/s, closed loop": "--workload chat --rate 60 --duration 3m --seed 15 --closed-loop",
}
FROM_TRACE = "conversation trace, no sessions"


def simulated(words: list[str], overrides: tuple[str, ...]) -> dict[str, float]:
    """Return the figures of one simulated run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "penstock", "simulate", str(CLUSTER), *words]
        command += ["--no-html", "--json", "--jobs", "1", "--out", folder]
        for override in overrides:
            command += ["--set", override]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)["variants"][0]
    return result


def rows(name: str, words: list[str]) -> list[str]:
    """Return the table's rows of one traffic."""
    lines = []
    for way, overrides in WAYS.items():
        found = simulated(words, overrides)
        lines.append(
            f"| {name} | {way} | {found['hit_rate']:.1%} | {found['ttft_mean_s'] * 1e3:,.0f} ms "
            f"| {found['ttft_p95_s'] * 1e3:,.0f} ms | {found['tpot_mean_s'] * 1e3:.1f} ms "
            f"| {found['e2e_mean_s']:.1f} s | {found['slo_attainment']:.1%} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation trace.")
    given = parser.parse_args()
    traffic = {name: text.split() for name, text in TRAFFIC.items()}
    if given.trace is not None:
        traffic[FROM_TRACE] = ["--trace", str(given.trace), "--requests", "1500"]
    lines = [
        "| traffic | routing | hit rate | TTFT mean | TTFT p95 | TPOT mean | end to end | in SLO |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, words in traffic.items():
        lines += rows(name, words)
    if given.docs is not None:
        write_part(given.docs, "\n".join(lines), "agentic")


if __name__ == "__main__":
    main()
