"""How does our index compare with Dynamo's RadixTree? Runs both in alternation and writes the table.

usage: python bench/index/run.py [--peer-python PATH] [--workers 64,1024] [--pairs 1000000,10000000] [--repeats 3]
                                 [--out FILE.json] [--docs docs/bench/kv-index.md] [--tables FILE.json...]

Each measurement is a process of its own. The peer's interpreter is --peer-python, else $PEERS/router/bin/python; where
there is none, only ours is measured and the ratios stay empty.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from table import table

from penstock_lab.report.markdown import write_part

HERE = Path(__file__).resolve().parent
TIMEOUT = 1800
"""Seconds for one process."""


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.tables:
        return finish(joined([json.loads(path.read_text()) for path in options.tables]), options.docs)
    peer = options.peer_python or peer_of_environment()
    if peer is None:
        print("no peer: name its interpreter with --peer-python, or set PEERS; measuring ours alone", file=sys.stderr)
    results: dict[str, Any] = {"machine": machine(), "repeats": options.repeats, "runs": []}
    for pairs in options.pairs:
        for workers in options.workers:
            for repeat in range(options.repeats if pairs <= 2_000_000 else options.repeats_large):
                order = ["own", "peer", "translated"] if repeat % 2 == 0 else ["translated", "peer", "own"]
                for kind in order:
                    if kind != "peer" or peer is not None:
                        results["runs"].append(one(kind, workers, pairs, peer))
                        if options.out is not None:
                            options.out.write_text(json.dumps(results, indent=1))
    return finish(results, options.docs)


def finish(results: dict[str, Any], docs: Path | None) -> int:
    """Print the table, and put it into its page."""
    text = table(results)
    print(text)
    if docs is not None:
        write_part(docs, text)
    return 0


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the runs of several invocations together, in order of size."""
    runs = sorted((run for one in results for run in one["runs"]), key=lambda run: (run["pairs"], run["workers"]))
    return {**results[-1], "runs": runs}


def one(kind: str, workers: int, pairs: int, peer: str | None) -> dict[str, Any]:
    """Measure one index in a process of its own."""
    command = (
        [str(peer), str(HERE / "peer.py"), str(workers), str(pairs)]
        if kind == "peer"
        else [sys.executable, str(HERE / "ours.py"), str(workers), str(pairs), kind]
    )
    load, start = os.getloadavg()[0], time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        raise SystemExit(f"{kind} with {workers} workers and {pairs} pairs failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{kind:10} {workers:5} workers {pairs:9} pairs: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return {"kind": kind, "workers": workers, "pairs": pairs, "load": load, "found": found}


def peer_of_environment() -> str | None:
    folder = os.environ.get("PEERS")
    path = Path(folder, "router", "bin", "python") if folder else None
    return str(path) if path is not None and path.exists() else None


def machine() -> dict[str, Any]:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--peer-python")
    parser.add_argument("--workers", type=numbers, default=[64, 1024])
    parser.add_argument("--pairs", type=numbers, default=[1_000_000, 10_000_000])
    parser.add_argument("--repeats", type=int, default=3, help="per case up to 2M pairs")
    parser.add_argument("--repeats-large", type=int, default=1, help="per case above 2M pairs")
    parser.add_argument("--out", type=Path, help="write every run's numbers here")
    parser.add_argument("--tables", type=Path, nargs="+", help="measure nothing: make the table of these files")
    parser.add_argument("--docs", type=Path, help="replace the table in this page")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
