"""Do constants fitted without a model, through the engine, predict the points that were measured of it?"""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest

from penstock_lab.engine.settings import Calibration

BENCH = Path(__file__).resolve().parents[3] / "bench" / "roofline"
POINTS = Path(os.environ.get("PENSTOCK_TRACES", "../shared/traces")) / "measured" / "measured_points.csv"
NAMES = ("points", "closed_loop", "table", "run")

pytestmark = pytest.mark.skipif(not POINTS.is_file(), reason="the measured points are not here: set PENSTOCK_TRACES")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The bench's own modules, which are named like others', so that they are taken out again."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name, None)


def test_every_model_of_the_file_is_known_and_the_shipped_constants_come_near(bench: dict[str, ModuleType]) -> None:
    points, left_out = bench["points"].points_of(POINTS.read_text().splitlines())
    assert len(points) > 1400 and sum(left_out.values()) < 500
    assert not [why for why in left_out if "no shape" in why or "no such GPU" in why]
    some = [point for point in points if point.group[0] in bench["run"].MIXING][::20]
    looped = [bench["closed_loop"].closed_loop(point, Calibration()) for point in some]
    tpot = [abs(one.tpot / point.measured.tpot - 1.0) for point, one in zip(some, looped, strict=True)]
    ttft = [abs(one.ttft / point.measured.ttft - 1.0) for point, one in zip(some, looped, strict=True)]
    assert median(tpot) < 0.15 and median(ttft) < 0.40


def test_a_file_with_unknown_models_is_read_as_far_as_it_goes(bench: dict[str, ModuleType]) -> None:
    head, row, *_ = POINTS.read_text().splitlines()
    strange = row.replace(row.split(",")[4], "someone/Strange-9B")
    found, left_out = bench["points"].points_of([head, row, strange])
    assert len(found) == 1 and left_out == {"someone/Strange-9B: no shape is known": 1}
