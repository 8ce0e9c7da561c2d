"""What does a request cost in front of 4 engines, and what in front of 2,000? Ours and the peers, in alternation.

usage: python bench/scale/request_cost.py [--sizes 4,500] [--gateways ours,sglang-router,smg] [--repeats 3]
                                          [--seconds 4] [--docs docs/bench/scale.md]

All engines of a fleet are one process, as in bench/gateway, whose gateways, generator and engines these are; PEERS
names the folder with the peers' environments.
"""

import argparse
import math
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
GATEWAY = HERE.parent / "gateway"
sys.path.insert(0, str(GATEWAY))

from hold import resident  # noqa: E402
from load import cpu_seconds  # noqa: E402
from run import machine, script  # noqa: E402
from servers import GATEWAYS, Missing, engines, running  # noqa: E402

from penstock_lab.report.markdown import write_part  # noqa: E402

CELLS: dict[str, dict[str, Any]] = {
    "unary": {"stream": False, "words": 100, "concurrency": 16, "warm": 2.0},
    "streamed": {"stream": True, "words": 100, "concurrency": 16, "warm": 2.0},
    "paced": {"stream": True, "words": 100, "concurrency": 64, "warm": 2.0, "tokens": 64, "gap_ms": 10},
}
TABLES = {
    "unary": "CPU per unary request, ms",
    "streamed": "CPU per streamed request, ms",
    "first": "first token of 64 paced streams, ms",
    "memory": "memory, MB",
}
LOOKED_AT = 0.01
"""Seconds for each engine in which a gateway looks at it first, on slow cores too: while it does so, it never rests."""
LOOK_SECONDS = 3.0
LOOKS_MAX = 10

Found = dict[tuple[str, int, str], list[float]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(one) for one in text.split(",")], default=[4, 500])
    parser.add_argument("--gateways", type=lambda text: text.split(","), default=["ours", "sglang-router", "smg"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--docs", type=Path, help="replace the tables in this page")
    options = parser.parse_args(arguments)
    if unknown := set(options.gateways) - set(GATEWAYS):
        parser.error(f"no such gateway: {', '.join(sorted(unknown))}; known: {', '.join(GATEWAYS)}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found: Found = {}
    skipped: dict[str, str] = {}
    for repeat in range(options.repeats):
        for size in options.sizes:
            measure(size, options, repeat, found, skipped)
    text = tables(found, skipped, options.sizes, options.gateways)
    print(text)
    if options.docs is not None:
        write_part(options.docs, text)
    return 0


def measure(size: int, options: argparse.Namespace, repeat: int, found: Found, skipped: dict[str, str]) -> None:
    """Measure each gateway before a fleet of a size once."""
    with (
        tempfile.TemporaryDirectory(prefix="scale-", ignore_cleanup_errors=True) as folder,
        engines(size, Path(folder)) as setting,
    ):
        for name in options.gateways if repeat % 2 == 0 else reversed(options.gateways):
            try:
                with running(name, setting) as gateway:
                    time.sleep(size * LOOKED_AT)
                    settle(gateway.pids)
                    for cell, asked in CELLS.items():
                        told = {**asked, "port": gateway.port, "pids": gateway.pids, "keys": gateway.keys}
                        result = script("load.py", {**told, "seed": repeat, "seconds": options.seconds})
                        if result["errors"]:
                            raise SystemExit(f"{name} over {size}: {result['first_error']}")
                        seen = {"first": result["ttft_p50_ms"]} if cell == "paced" else {cell: result["cpu_ms"]}
                        if cell == "paced":
                            seen["memory"] = resident(gateway.pids) / 1e6
                        for row, value in seen.items():
                            found.setdefault((name, size, row), []).append(value)
                            print(f"{name:14} {size:5} {row:9} {value:.3f}", file=sys.stderr)
            except Missing as missing:
                skipped[name] = str(missing)


def settle(pids: list[int]) -> None:
    """Wait until a gateway's own work has come to rest: its first looks at engines are no request's cost."""
    last = math.inf
    for _ in range(LOOKS_MAX):
        before = cpu_seconds(pids)
        time.sleep(LOOK_SECONDS)
        spent = cpu_seconds(pids) - before
        if spent > 0.8 * last:
            return
        last = spent


def tables(found: Found, skipped: dict[str, str], sizes: list[int], names: list[str]) -> str:
    """Return the medians, with ours beside the peers and each beside its own smallest fleet."""
    on = machine()
    lines = [
        f"{on['date']}, {on['cpu']}, {on['cores']} cores, Python {on['python']}; medians over runs, in brackets the "
        f"times of the same gateway before {sizes[0]} engines",
        "",
    ]
    for cell, title in TABLES.items():
        head = ["gateway", *(f"{size:,} engines" for size in sizes)]
        lines += [f"**{title}**", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for name in names:
            middles = [median(found[name, size, cell]) for size in sizes if (name, size, cell) in found]
            if middles:
                shown = (f"{middle:.2f} ({middle / middles[0]:.2f})" for middle in middles)
                lines.append(f"| {name} | {' | '.join(shown)} |")
        lines.append("")
    lines += [f"{name} is left out: {why}" for name, why in skipped.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
