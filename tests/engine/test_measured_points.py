"""Do constants fitted on half of the measured operating points predict the TPOT of the other half?"""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from penstock.engine.calibrate import fit, predicted_tpot
from penstock.engine.settings import Calibration

BENCH = Path(__file__).resolve().parents[2] / "bench" / "roofline"
POINTS = Path(os.environ.get("PENSTOCK_TRACES", "../shared/traces")) / "measured" / "measured_points.csv"

pytestmark = pytest.mark.skipif(not POINTS.is_file(), reason="the measured points are not here: set PENSTOCK_TRACES")


@pytest.fixture(scope="module")
def points() -> Iterator[list[Any]]:
    """The bench's own reading of the file; its modules are named like others', so they are taken out again."""
    sys.path.insert(0, str(BENCH))
    try:
        found, left_out = importlib.import_module("points").points_of(POINTS.read_text().splitlines())
        assert len(found) > 1400 and left_out < 500
        yield found
    finally:
        sys.path.remove(str(BENCH))
        for name in ("points", "models"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def calibration(points: list[Any]) -> Calibration:
    return fit([point.measured for point in points if point.fitted])


def errors(points: list[Any], calibration: Calibration) -> list[float]:
    return [abs(predicted_tpot(point.measured, calibration) / point.measured.tpot - 1) for point in points]


def test_one_set_of_constants_is_within_15_per_cent_of_what_it_has_not_seen(
    points: list[Any], calibration: Calibration
) -> None:
    held = [point for point in points if not point.fitted]
    assert median(errors(held, calibration)) < 0.10
    assert median(errors(held, Calibration())) < 0.25  # the start values, fitted on nothing here
    groups: dict[Any, list[Any]] = {}
    for point in held:
        groups.setdefault(point.group, []).append(point)
    near = [group for group, some in groups.items() if median(errors(some, calibration)) < 0.15]
    assert len(near) >= 14 and sum(len(groups[group]) for group in near) >= 0.75 * len(held)


def test_the_fitted_constants_are_physical(calibration: Calibration) -> None:
    assert 0.7 < calibration.bandwidth_efficiency < 1.0
    assert 0.4 < calibration.compute_efficiency < 0.8
    assert 0.3 < calibration.widening_efficiency < 1.0
    assert 0.001 < calibration.link_latency_ms < 0.05
    assert 0.0 < calibration.layer_overhead_ms < 0.1
