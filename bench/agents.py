"""A coding agent's sessions over Penstock's routing and over round robin: TTFT after the first turn, and hit rate.

usage: python bench/agents.py [--docs docs/guides/agents.md]

Starts `penstock serve sim` once for each way to route, and plays examples/agents/coding_session.py against it: real
processes and real time, simulated engines.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from penstock_lab.report.markdown import write_part

ROOT = Path(__file__).resolve().parents[1]
SESSION = ROOT / "examples/agents/coding_session.py"
WAYS = {
    "round robin": ("--router.mode", "round_robin"),
    "Penstock (`kv`, the default)": ("--router.mode", "kv"),
    "Penstock, `affinity.mode: soft`": ("--router.mode", "kv", "--router.affinity.mode", "soft"),
}
REPLICAS = 4
KV_BLOCKS = 8192
START_TIMEOUT = 60.0


def measured(flags: tuple[str, ...], agents: int, turns: int, port: int) -> dict[str, float]:
    """Return what the session measured over one cluster."""
    command = [sys.executable, "-m", "penstock", "serve", "sim", "--replicas", str(REPLICAS)]
    command += ["--sim.kv_blocks", str(KV_BLOCKS), "--frontend.port", str(port), *flags]
    cluster = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT / "build")
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_TIMEOUT
        while True:
            try:
                with urllib.request.urlopen(f"{url}/v1/models/sim/ready", timeout=2) as answer:
                    if json.load(answer).get("workers", REPLICAS) >= REPLICAS:
                        break
            except OSError:
                pass
            if time.monotonic() > until or cluster.poll() is not None:
                raise SystemExit(f"the cluster did not start: {' '.join(command)}")
            time.sleep(0.3)
        words = [sys.executable, str(SESSION), url, "sim", "--agents", str(agents), "--turns", str(turns)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
        result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return result
    finally:
        cluster.send_signal(signal.SIGINT)
        cluster.wait(timeout=60)


def table(results: dict[str, dict[str, float]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| routing | requests | hit rate, turn 2+ | TTFT p50, turn 2+ | TTFT p95, turn 2+ |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, each in results.items():
        lines.append(
            f"| {name} | {each['requests']:.0f} | {each['hit_rate_later']:.1%} | {each['ttft_later_p50_ms']:.0f} ms "
            f"| {each['ttft_later_p95_ms']:.0f} ms |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--agents", type=int, default=6)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--port", type=int, default=18_431)
    given = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    results = {name: measured(flags, given.agents, given.turns, given.port) for name, flags in WAYS.items()}
    text = table(results)
    print(text)
    if given.docs is not None:
        write_part(given.docs, text, "agents")


if __name__ == "__main__":
    main()
