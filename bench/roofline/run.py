"""How far is the roofline from measured engines? Fits its constants on half of the points and reports the other half.

usage: python bench/roofline/run.py [--points measured_points.csv] [--docs docs/timing.md]

The points are looked for in PENSTOCK_TRACES, else in ../shared/traces; without them the command says so and ends with
status 77. It takes about two minutes, of which most is fitting once more without each group.
"""

import argparse
import os
import sys
from pathlib import Path

from points import GPUS_MAX, Point, points_of
from table import constants, errors, page_with

from penstock.engine.calibrate import fit
from penstock.engine.settings import Calibration

ROOT = Path(__file__).resolve().parents[2]
FEWEST = 20
"""Points of an (engine, GPU) pair that eight constants of its own are fitted on, at least."""
ABSENT = 77


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not options.points.is_file():
        print(f"no measured points at {options.points}: set PENSTOCK_TRACES or --points", file=sys.stderr)
        return ABSENT
    points, left_out = points_of(options.points.read_text().splitlines())
    text = report(points, left_out)
    print(text)
    if options.docs is not None:
        options.docs.write_text(page_with(options.docs.read_text(), text))
    return 0


def report(points: list[Point], left_out: int) -> str:
    """Return what the page says."""
    seen = [point for point in points if point.fitted]
    held = [point for point in points if not point.fitted]
    everywhere = fit([point.measured for point in seen])
    without = {
        group: fit([point.measured for point in seen if point.group != group])
        for group in sorted({point.group for point in held})
    }
    pairs = {}
    for pair in sorted({point.group[:2] for point in seen}):
        own = [point.measured for point in seen if point.group[:2] == pair]
        if len(own) >= FEWEST:
            pairs[pair] = fit(own)
    named = [("all points", everywhere), *((f"{engine}, {gpu}", found) for (engine, gpu), found in pairs.items())]
    return "\n".join(
        [
            f"{len(points):,} aggregated points on up to {GPUS_MAX} GPUs: {len(seen)} fitted on, {len(held)} held out; "
            f"{left_out} rows of the file are not used.",
            "",
            *constants(named),
            "",
            *errors(held, Calibration(), everywhere, without, pairs),
        ]
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traces = Path(os.environ.get("PENSTOCK_TRACES") or ROOT.parent / "shared" / "traces")
    parser.add_argument("--points", type=Path, default=traces / "measured" / "measured_points.csv")
    parser.add_argument("--docs", type=Path, help="replace the table in this page")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
