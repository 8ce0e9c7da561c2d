"""Whether learning output lengths per program pays, in simulation: half of the programs answer briefly, half at length.

usage: python bench/expect_output.py [--requests 1200]
"""

import argparse
import heapq
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock_lab.traffic.formats.mooncake import mooncake_lines
from penstock_lab.traffic.lengths import Lognormal
from penstock_lab.traffic.traffic_request import TrafficRequest
from penstock_lab.traffic.workloads import Coding, coding

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "examples/agents/cluster.yaml"
KINDS = {"brief": Lognormal(60, 0.4, 8, 400), "long": Lognormal(2000, 0.4, 200, 8192)}
RATE = 0.8
APART = 1 << 40
"""Hash ids of the second kind begin here, so that the two share nothing."""


def programs(name: str, number: int) -> Iterator[TrafficRequest]:
    """Yield the requests of programs whose answers are of one kind."""
    for each in coding(RATE, random.Random(31 + number), shape=Coding(answer=KINDS[name])):
        ids = [id + number * APART for id in each.hash_ids]
        names = {"session": f"{name}-{each.session}", "program": f"{name}-{each.program}"}
        yield msgspec.structs.replace(each, hash_ids=ids, **names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1200)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        both = heapq.merge(*(programs(name, number) for number, name in enumerate(KINDS)), key=lambda each: each.at)
        trace.write_bytes(b"".join(mooncake_lines(itertools.islice(both, given.requests))))
        for learns in ("false", "true"):
            command = [sys.executable, "-m", "penstock", "simulate", str(CLUSTER), "--trace", str(trace)]
            command += ["--closed-loop", "--no-html", "--json", "--jobs", "1", "--out", folder]
            for setting in ("router.affinity.mode=soft", "router.cost.kind=latency", f"router.expect_output={learns}"):
                command += ["--set", setting]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout)["variants"][0]
            print(
                f"expect_output {learns}: hit rate {found['hit_rate']:.1%}, "
                f"TTFT mean {found['ttft_mean_s'] * 1e3:.0f} ms, p95 {found['ttft_p95_s'] * 1e3:.0f} ms, "
                f"TPOT {found['tpot_mean_s'] * 1e3:.1f} ms, end to end {found['e2e_mean_s']:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
