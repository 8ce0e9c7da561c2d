"""How far is the roofline from measured engines? Fits it through the engine, and reports models that it has not seen.

usage: python bench/roofline/run.py [--points FILE ...] [--fit FILE] [--docs docs/concepts/timing.md]

Points are in the layout of aiconfigurator's measured_points.csv, looked for in PENSTOCK_TRACES, else in
../shared/traces; without them the command says so and ends with status 77. With --points, files are only reported on:
what is fitted is fitted on --fit. It takes about five minutes.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from closed_loop import Looped, closed_loop
from points import Point, points_of
from roofline_fit import START, PredictedPoint, fit, predicted
from table import Row, as_setting, beside_of, constants, errors

from penstock_lab.engine.settings import Calibration
from penstock_lab.report.markdown import write_part

ROOT = Path(__file__).resolve().parents[2]
ABSENT = 77
ROUNDS = 3
"""Of simulating the points and fitting to what the simulation makes of them; the last changes nothing any more."""
FITTED = 150
"""Points that a fit simulates, at most: every so many of the file, which is in the order of engines and models."""
PRIOR = 0.7
"""What a constant's distance from its usual value weighs: 150 points come from 25 series, and points of a series say
much the same. Of 0, 0.4, 0.7, 1 and 2 those from 0.4 to 1 hardly differ on models that were left out."""
FEW = 4
"""Clients whose requests hardly wait for each other."""
MIXING = ("vllm", "trtllm")
"""Engines that are fitted on: they compute prompts beside decoding, as the simulated engine does. SGLang does not."""


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    files = [options.fit, *options.points]
    absent = [str(path) for path in files if not path.is_file()]
    if absent:
        print(f"no measured points at {', '.join(absent)}: set PENSTOCK_TRACES or --points", file=sys.stderr)
        return ABSENT
    text = report(options.fit, options.points)
    print(text)
    if options.docs is not None:
        write_part(options.docs, text)
    return 0


def report(fitted_on: Path, others: Sequence[Path]) -> str:
    """Return what the page says."""
    points, left_out = points_of(fitted_on.read_text().splitlines())
    lines = [f"{len(points):,} points; not used are " + ", ".join(f"{n} ({why})" for why, n in left_out.items()) + "."]
    everywhere = fitted(points)
    unseen = {
        model: fitted([point for point in points if point.model != model])
        for model in sorted({point.model for point in points})
    }
    named = [("all points", everywhere), *((f"all but {model}", one) for model, one in unseen.items())]
    lines += ["", *constants([(name, one.calibration) for name, one in named])]
    lines += ["", f"All points, for `sim.timing`: {as_setting(everywhere.calibration)}"]
    lines += ["", f"Milliseconds of a request beside its passes: {beside_of(everywhere.beside)}."]
    shipped = Calibration()
    rows = [
        Row(point, unseen[point.model].looped(point), everywhere.looped(point), closed_loop(point, shipped))
        for point in points
    ]
    lines += ["", *errors(rows, ("model unseen", "fitted", "shipped"))]
    for path in others:
        more, left_out = points_of(path.read_text().splitlines())
        lines += ["", f"{path.name}: {len(more):,} points; not used are {dict(left_out)}.", ""]
        lines += errors([Row(point, closed_loop(point, shipped)) for point in more], ("shipped",))
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a fit found: the roofline's constants, and seconds of a request beside its passes, by engine."""

    calibration: Calibration
    beside: Mapping[str, float]

    def looped(self, point: Point) -> Looped:
        return closed_loop(point.with_beside(self.beside), self.calibration)


def fitted(points: Sequence[Point]) -> Fitted:
    """Return the constants under which the engine, simulated, is nearest to the points."""
    mixing = [point for point in points if point.group[0] in MIXING]
    some = mixing[:: max(1, -(-len(mixing) // FITTED))]
    found = fit([point.measured for point in some], prior=PRIOR)
    for _ in range(ROUNDS):
        beside = _beside(mixing, found)
        taken = [point.with_beside(beside) for point in some]
        scale = [_scale(point, closed_loop(point, found), found) for point in taken]
        found = fit([point.measured for point in taken], START, scale, PRIOR)
    return Fitted(found, _beside(mixing, found))


def _beside(points: Sequence[Point], calibration: Calibration) -> dict[str, float]:
    """Return by how much the TTFT of few clients exceeds what is simulated of it, by engine."""
    nothing = dict.fromkeys(MIXING, 0.0)
    late: dict[str, list[float]] = {engine: [] for engine in MIXING}
    for point in points:
        if point.measured.concurrency <= FEW:
            looped = closed_loop(point.with_beside(nothing), calibration)
            late[point.group[0]].append((point.measured.ttft or 0.0) - looped.ttft)
    return {engine: max(0.0, median(found)) for engine, found in late.items() if found}


def _scale(point: Point, looped: Looped, calibration: Calibration) -> PredictedPoint:
    closed = predicted(point.measured, calibration)
    return PredictedPoint(looped.tpot / closed.tpot, (looped.ttft - point.measured.beside) / closed.prompt)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traces = Path(os.environ.get("PENSTOCK_TRACES") or ROOT.parent / "shared" / "traces")
    parser.add_argument("--points", type=Path, nargs="*", default=[], help="files that are only reported on")
    parser.add_argument("--fit", type=Path, default=traces / "measured" / "measured_points.csv")
    parser.add_argument("--docs", type=Path, help="replace the table in this page")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
