"""Measures the transfer library beside the raw limit of each way, beside NIXL and beside KVCR, and writes the table.

usage: python bench/transfer/run.py [--rounds 7] [--folder DIR] [--peer-python PATH] [--only memcpy,shm,tcp,peer,disk]
                                    [--out FILE.json] [--docs docs/bench/transfer.md]

--only gpu is for a machine with one, and with torch.

In each round every way is measured once, in an order that turns, so that a busy moment meets all of them; a ratio is
the median of the rounds' ratios to the raw limit of the same round, by wall time and by CPU time of all processes. The
peers' interpreter is --peer-python, else $PEERS/transfer/bin/python; where there is none, their columns stay empty.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import disk
import gpu
import memory
import network
from child import Child, cpu_seconds
from sizes import BLOCKS, TOTAL
from table import table

from penstock_lab.report.markdown import write_part

Way = Callable[[int], Awaitable[float]]
"""Moves `TOTAL` bytes in blocks of a size; returns seconds."""
SECTIONS = ("memcpy", "shm", "tcp", "peer", "disk")


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "rounds": options.rounds,
        "load": [os.getloadavg()[0]],
        "rows": [],
    }
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="transfer-bench-") as folder:
        asyncio.run(sections(results, options, Path(folder)))
        peer = options.peer_python or peer_of_environment()
        if peer is None:
            print("no peers: name their interpreter with --peer-python, or set PEERS", file=sys.stderr)
        else:
            results["rows"] += peers(str(peer), folder, options.rounds)
    results["load"].append(os.getloadavg()[0])
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1))
    text = table(results)
    print(text)
    if options.docs is not None:
        write_part(options.docs, text)
    return 0


async def sections(results: dict[str, Any], options: argparse.Namespace, folder: Path) -> None:
    """Measure ours beside the raw limits."""
    makers = {
        "memcpy": memory.memcpy,
        "shm": memory.shared,
        "tcp": network.tcp,
        "peer": network.peer,
        "disk": lambda: disk.disk(folder),
        "gpu": gpu.gpu,
    }
    for name in options.only.split(","):
        async with makers[name]() as ways:
            for block in BLOCKS if name != "peer" else [network.PEER_BLOCK]:
                for direction, each in ways.items():
                    results["rows"] += await rounds(name, direction, each, block, options.rounds)


async def rounds(section: str, direction: str, ways: dict[str, Way], block: int, count: int) -> list[dict[str, Any]]:
    """Measure some ways in turn; the first is the raw limit."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for name in names:
        await ways[name](block)  # warm: pages, connections, files
    for number in range(count):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            before = cpu_seconds()
            rates[name].append(TOTAL / await ways[name](block) / 1e9)
            costs[name].append(cpu_seconds() - before)
    raw, least = rates[names[0]], costs[names[0]]
    rows = [
        {
            "section": section,
            "direction": direction,
            "block": block,
            "way": name,
            "rate": median(rates[name]),
            "ratio": median(mine / limit for mine, limit in zip(rates[name], raw)),
            "cpu_ratio": median(limit / mine for mine, limit in zip(costs[name], least)),
            "rates": rates[name],
            "cpu_seconds": costs[name],
        }
        for name in names
    ]
    for row in rows:
        ratios = f"{row['ratio']:.2f}, CPU {row['cpu_ratio']:.2f}"
        print(
            f"{section} {direction} {block >> 10} KiB {row['way']}: {row['rate']:.2f} GB/s, {ratios}", file=sys.stderr
        )
    return rows


def peers(python: str, folder: str, count: int) -> list[dict[str, Any]]:
    """Measure NIXL and KVCR, each alone: their threads poll, and would slow down what runs beside them."""
    rows = []

    def row(section: str, direction: str, block: int, way: str, seconds: list[float]) -> None:
        rates = [TOTAL / each / 1e9 for each in seconds]
        rows.append(
            {
                "section": section,
                "direction": direction,
                "block": block,
                "way": way,
                "rate": median(rates),
                "rates": rates,
            }
        )
        print(f"{section} {direction} {block >> 10} KiB {way}: {median(rates):.2f} GB/s", file=sys.stderr)

    nixl = Child(python, "nixl_peer.py", folder)
    for section, what, way in (("tcp", "dram", "NIXL, UCX"), ("disk", "file", "NIXL, POSIX")):
        for block in BLOCKS:
            for direction in ("read", "write"):
                ask = {"what": what, "direction": direction, "block": block}
                nixl.ask(**ask)
                row(section, direction, block, way, [nixl.ask(**ask)["seconds"] for _ in range(count)])
    nixl.close()
    for block in BLOCKS:
        kvcr = Child(python, "kvcr_peer.py")
        kvcr.ask(block=block)
        answers = [kvcr.ask(block=block)["seconds"] for _ in range(count)]
        kvcr.close()
        for direction, name in (("write", "deposit"), ("read", "deliver")):
            row("memcpy", direction, block, f"KVCR, {name}", [each[name] for each in answers])
    return rows


def peer_of_environment() -> str | None:
    folder = os.environ.get("PEERS")
    path = Path(folder, "transfer", "bin", "python") if folder else None
    return str(path) if path is not None and path.exists() else None


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split()[:2])
    return platform.machine()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: the system's folder for such files"
    )
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
