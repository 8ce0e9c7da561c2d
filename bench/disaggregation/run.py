"""Does disaggregation pay? Aggregated engines, splits and mixes of equally many, on virtual time; parity; a live check.

usage: python bench/disaggregation/run.py [--part parity sweep live] [--resume FOLDER] [--quick] [--docs FILE]

Each part leaves its lines in results.jsonl of a folder under --out; what has its lines in --resume is not run again, so
that a run that was broken off goes on, and with no part only the tables are made. The peer of the parity is
$PEERS/replay/bin/python; the traces are in --traces, PENSTOCK_TRACES or ../shared/traces. What is not there is left
out, and that is said.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

import live
import parity
import sweep
import table
from plan import AGGREGATED, HELD, LAYOUTS, MIXES, SEEDS, SPLITS, WORKS, Work
from sweep import Climb, Row

from penstock_lab.report.markdown import write_part

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PARTS = ("parity", "sweep", "live")
KINDS = ("parity", "two prompts", "sweep", "rules", "live")
"""Of the lines of results.jsonl."""
Keep = Callable[[Row], None]
"""Writes a line down, and adds it to those that there are."""


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    folder = options.resume or new_folder(options.out)
    rows = read(folder)
    with (folder / "results.jsonl").open("a") as file:

        def keep(row: Row) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()
            rows.append(row)

        for part in options.part:
            started = time.monotonic()
            MAKERS[part](options, rows, keep)
            print(f"{part}: {time.monotonic() - started:.0f} s, in {folder}", flush=True)
    text = tables(rows)
    print(text)
    if options.docs is not None:
        write_part(options.docs, text)
    return 0


# --- the parts ------------------------------------------------------------------------------------------------------


def made_parity(options: argparse.Namespace, rows: Sequence[Row], keep: Keep) -> None:
    peers = os.environ.get("PEERS")
    peer = Path(peers, "replay", "bin", "python") if peers else None
    if any(row["part"] == "parity" for row in rows):
        return
    if peer is None or not peer.exists():
        print("no parity: PEERS names no folder with replay/bin/python", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as scratch:
        for row in parity.run(peer, options.traces, Path(scratch)):
            keep(row)


def made_sweep(options: argparse.Namespace, rows: Sequence[Row], keep: Keep) -> None:
    """Run every layout, then other settings of each family's best layout at the third load."""
    seeds, count = SEEDS[: options.seeds], None
    if options.quick:
        seeds, count = SEEDS[:1], 60
    asked = [work for work in WORKS if work.name in options.work]
    works = [work for work in asked if work.trace is None or (options.traces / work.trace).exists()]
    if len(works) < len(asked):
        print(f"no traces in {options.traces}: only our own workloads are run", file=sys.stderr)
    traces = options.traces

    def run(climbs: Sequence[Climb]) -> None:
        done = {sweep.key_of(row) for row in rows}
        left = [climb for climb in climbs if climb.key not in done]
        for number, found in enumerate(sweep.run(left, options.processes), 1):
            for row in found:
                keep(row)
            print(f"{number}/{len(left)} {found[0]['work']} {found[0]['layout']} seed {found[0]['seed']}", flush=True)

    run(
        [
            Climb("sweep", work, layout, seed, work.rates, traces, count)
            for seed in seeds
            for work in works
            for layout in LAYOUTS
        ]
    )
    chosen = []
    for work in works:
        for family in (AGGREGATED, SPLITS, MIXES):
            best = max((mean_share(rows, work, layout.name, work.rates[2]), layout.name) for layout in family)[1]
            layout = next(layout for layout in family if layout.name == best)
            chosen += [(work, one) for one in (layout, *sweep.variants(layout, work))]
    run([Climb("rules", work, one, seed, work.rates[2:3], traces, count) for work, one in chosen for seed in seeds])


def made_live(options: argparse.Namespace, rows: Sequence[Row], keep: Keep) -> None:
    if any(row["part"] == "live" for row in rows):
        return
    with tempfile.TemporaryDirectory() as scratch:
        for row in live.run(Path(scratch)):
            keep(row)


MAKERS = {"parity": made_parity, "sweep": made_sweep, "live": made_live}


def mean_share(rows: Sequence[Row], work: Work, layout: str, rate: float) -> float:
    """Return how much a layout keeps in SLO at a load, over all pairs."""
    mine = [row for row in rows if row["part"] == "sweep" and row["work"] == work.name]
    return mean(table.share_of(mine, layout, number, rate) for number in range(len(work.pairs)))


# --- the page -------------------------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> str:
    """Return the page's tables, of the parts that there are."""
    by_part = {part: [row for row in rows if row["part"] == part] for part in KINDS}
    parts = [about(sorted({row["seed"] for row in by_part["sweep"]}))]
    if by_part["parity"]:
        parts += ["### Four prefill and four decode engines, beside Dynamo's", table.parity(by_part["parity"])]
        parts += [table.two_prompts(row) for row in by_part["two prompts"]]
    works = [work for work in WORKS if any(row["work"] == work.name for row in by_part["sweep"])]
    if works:
        parts += [
            "### Who is ahead, and how often",
            "Pairs by which a family holds the most load (several: within 5 %); and cells of a pair and a load in which"
            " one family alone is ahead, by 2 % of all requests or more:",
            table.score(by_part["sweep"], works),
        ]
        parts += [
            "### Sweep",
            f"By the best layout of each family: the requests per second that are held with {HELD:.0%} in SLO, and the "
            "share in SLO at each load (aggregated / split / mix). Llama-3.1-8B on 8 GPUs, 70B on 32.",
        ]
    for work in works:
        mine = [row for row in by_part["sweep"] if row["work"] == work.name]
        name = work.name.capitalize()
        parts += [f"**{name}, load held**", table.held(mine, work), f"**{name}, shares**", table.shares(mine, work)]
    if by_part["rules"]:
        parts += ["### Other settings of the best layouts, at the third load", table.rules(by_part["rules"], works)]
    if by_part["live"]:
        parts += ["### Live", table.live(by_part["live"])]
    return "\n\n".join(parts)


def about(seeds: Sequence[int]) -> str:
    machine = f"{os.cpu_count()} cores, {platform.python_implementation()} {platform.python_version()}"
    medians = f"; medians over seeds {', '.join(map(str, seeds))}" if seeds else ""
    return f"{time.strftime('%Y-%m-%d')}, {machine}{medians}."


def read(folder: Path) -> list[Row]:
    """Return the lines of results.jsonl, none where there is no such file yet."""
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def new_folder(out: Path) -> Path:
    """Make the folder of this bench."""
    path = out.resolve() / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-disaggregation-{os.getpid():x}"
    path.mkdir(parents=True)
    return path


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS), help="which parts; none: only tables")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on in the folder of another run")
    traces = Path(os.environ.get("PENSTOCK_TRACES") or ROOT.parent / "shared" / "traces")
    parser.add_argument("--traces", type=Path, default=traces)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the bench makes its folder")
    names = [work.name for work in WORKS]
    parser.add_argument("--work", nargs="+", choices=names, default=names, help="traffic of the sweep")
    parser.add_argument("--processes", type=int, default=2, help="of the sweep")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="of the sweep, the first so many")
    parser.add_argument("--quick", action="store_true", help="one seed, 60 requests in each run: does it work at all?")
    parser.add_argument("--docs", type=Path, help="page to put the tables into, between its markers")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
