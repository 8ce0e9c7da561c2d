"""Do arrivals follow their shapes, with exactly the mean rate that is asked for, and the same ones for a seed?"""

import itertools
import math
import random
import re
import statistics
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.reading.units import parse_number
from penstock.kernel.errors import ConfigError
from penstock.kernel.settings import fields_of
from penstock_lab.traffic import workloads
from penstock_lab.traffic.arrival_patterns import PATTERNS, ShapedArrivals, parse_arrivals
from penstock_lab.traffic.formats.trace_format import Format
from penstock_lab.traffic.lengths import Fixed, Lognormal, parse_lengths
from penstock_lab.traffic.rate_profiles import (
    DAY,
    WEEK,
    DelayedProfile,
    PiecewiseProfile,
    RateProfile,
    SineProfile,
    SlopeProfile,
    TimeWarp,
    WeeklyProfile,
    follow,
)
from penstock_lab.traffic.workloads import Name, workload

SHAPES: dict[str, RateProfile] = {
    "sine": SineProfile(1.0, 60.0),
    "half sine": SineProfile(0.5, 7.0),
    "sine from its trough": SineProfile(0.9, 30.0, 0.75),
    "ramp up": SlopeProfile(0.0, 2.0, 40.0),
    "ramp down": SlopeProfile(3.0, 0.5, 40.0),
    "step": PiecewiseProfile([0.0, 30.0], [1.0, 4.0]),
    "spike": PiecewiseProfile([0.0, 30.0, 35.0], [1.0, 10.0, 1.0]),
    "silence": PiecewiseProfile([0.0, 30.0, 50.0], [1.0, 0.0, 2.0]),
    "again": PiecewiseProfile([0.0, 5.0, 6.0], [0.0, 8.0, 0.5], 10.0),
    "later": DelayedProfile(SlopeProfile(0.5, 2.0, 20.0), 25.0),
    "days": WeeklyProfile(15 * 3600.0, 0.4, 0.6, 0.0),
    "days from Friday night": WeeklyProfile(0.0, 0.0, 0.0, 5 * DAY - 40.0),
}
shapes = st.sampled_from(list(SHAPES.values()))


@given(shape=shapes, start=st.floats(0, 3 * WEEK), width=st.floats(0.001, 200.0))
def test_what_is_expected_is_the_integral_of_the_rate(shape: RateProfile, start: float, width: float) -> None:
    steps = 16_000  # with few, the errors at the edges of a rate that begins anew have one sign and add up
    middles = (start + width * (step + 0.5) / steps for step in range(steps))
    naive = sum(shape.factor(at) for at in middles) * width / steps
    assert shape.expected(start + width) - shape.expected(start) == pytest.approx(naive, abs=0.02 * width + 0.01)
    assert shape.factor(start) >= -1e-12


@given(
    shape=shapes,
    rate=st.floats(0.01, 1000.0),
    start=st.floats(0, WEEK),
    gaps=st.lists(st.floats(1e-6, 50.0), min_size=1, max_size=20),
)
def test_warped_time_is_where_that_much_was_expected(
    shape: RateProfile, rate: float, start: float, gaps: list[float]
) -> None:
    warp = TimeWarp(shape, rate, start)
    total, before = shape.expected(start) * rate, start
    for gap in gaps:
        at = warp.after(gap)
        total += gap
        assert before <= at
        if at == math.inf:
            assert total > shape.expected(1e11) * rate
            return
        assert shape.expected(at) * rate == pytest.approx(total, rel=1e-9, abs=1e-6 + 4e-8 * rate)
        before = at


@pytest.mark.parametrize("cv", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("name", ["half sine", "ramp up", "step", "spike", "silence", "again"])
def test_arrivals_until_any_time_are_on_average_what_is_expected(name: str, cv: float) -> None:
    """Over 300 seeds, within 4 standard errors; a stream that began with a whole gap would miss at cv 3."""
    shape, rate, ends = SHAPES[name], 1.0, (7.0, 33.0, 60.0)
    counts: dict[float, list[int]] = {end: [] for end in ends}
    for seed in range(300):
        times = list(itertools.takewhile(lambda at: at < ends[-1], follow(shape, rate, random.Random(seed), cv=cv)))
        for end in ends:
            counts[end].append(sum(at < end for at in times))
    for end in ends:
        error = statistics.pstdev(counts[end]) / math.sqrt(300)
        assert statistics.fmean(counts[end]) == pytest.approx(rate * shape.expected(end), abs=4 * error + 0.01)


@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "constant"])
def test_the_same_seed_gives_the_same_ascending_arrivals(name: str) -> None:
    def take(seed: int) -> list[float]:
        return list(itertools.islice(PATTERNS[name]().stream(3.0, random.Random(seed)), 2000))

    found = take(1)
    assert found == sorted(found) == take(1)
    assert found != take(2)
    assert found[0] >= 0.0


def test_a_rate_that_falls_to_nothing_ends_the_stream() -> None:
    found = list(follow(SlopeProfile(1.0, 0.0, 100.0), 10.0, random.Random(1)))
    assert found[-1] < 100.0
    assert len(found) == pytest.approx(500, abs=100)
    assert TimeWarp(PiecewiseProfile([0.0], [0.0])).after(1.0) == math.inf
    stopped = TimeWarp(PiecewiseProfile([0.0, 5.0], [1.0, 0.0]))
    assert (stopped.after(2.0), stopped.after(9.0), stopped.after(1.0)) == (pytest.approx(2.0), math.inf, math.inf)


def test_a_week_has_the_mean_rate_and_quiet_nights_and_weekends() -> None:
    week = WeeklyProfile(15 * 3600.0, 0.4, 0.6, 0.0)
    assert week.expected(WEEK) == pytest.approx(WEEK)
    assert week.expected(3 * WEEK) == pytest.approx(3 * WEEK)
    assert week.factor(3 * 3600.0) / week.factor(15 * 3600.0) == pytest.approx(0.4)
    assert week.factor(5 * DAY + 50.0) / week.factor(50.0) == pytest.approx(0.6)
    from_saturday = WeeklyProfile(15 * 3600.0, 0.4, 0.6, 5 * DAY)
    assert from_saturday.factor(50.0) == pytest.approx(week.factor(5 * DAY + 50.0))
    assert from_saturday.expected(0.0) == 0.0


def test_pieces_that_make_no_sense_are_refused() -> None:
    for starts, levels, period in (
        ([], [], None),
        ([1.0], [1.0], None),
        ([0.0, 0.0], [1.0, 2.0], None),
        ([0.0], [1.0, 2.0], None),
        ([0.0], [-1.0], None),
        ([0.0, 5.0], [1.0, 2.0], 5.0),
    ):
        with pytest.raises(ValueError, match=r"starts|levels"):
            PiecewiseProfile(starts, levels, period)
    with pytest.raises(ValueError, match="rate"):
        next(follow(SineProfile(0.5, 1.0), 0.0, random.Random(0)))


@pytest.mark.parametrize(
    ("text", "shape", "at", "factor"),
    [
        ("sinusoid:amplitude=50%,period=1h", True, 900.0, 1.5),
        ("sinusoid:amplitude=50%,period=1h,start=75%", True, 0.0, 0.5),
        ("ramp:first=0,last=2,over=10m", True, 300.0, 1.0),
        ("ramp:first=0,last=2,over=10m", True, 6000.0, 2.0),
        ("step:at=5m,to=3", True, 299.0, 1.0),
        (" step: at = 5m , to=3 ", True, 300.0, 3.0),
        ("spike:at=1m,width=10s,height=7", True, 65.0, 7.0),
        ("spike:at=1m,width=10s,height=7", True, 165.0, 1.0),
        ("spike:at=1m,width=10s,height=7,every=100s", True, 165.0, 7.0),
        ("weekly:peak=0,trough=1,weekend=1", True, 12345.0, 1.0),
        ("poisson", False, 0.0, 0.0),
        ("constant", False, 0.0, 0.0),
    ],
)
def test_a_pattern_is_read_with_its_units(text: str, shape: bool, at: float, factor: float) -> None:
    pattern = parse_arrivals(text, parse_number)
    assert isinstance(pattern, ShapedArrivals) == shape
    if isinstance(pattern, ShapedArrivals):
        assert pattern.shape().factor(at) == pytest.approx(factor)


@pytest.mark.parametrize("name", ["chat", "agent"])
def test_a_shape_keeps_its_time_where_a_workload_leaves_its_start_out(name: Name) -> None:
    pattern, own = parse_arrivals("spike:at=100s,width=10s,height=50", parse_number), random.Random(2)
    stream = workload(
        name, 20.0, random.Random(1), starts=lambda rate: pattern.stream(rate, own, lead=workloads.SETTLE[name])
    )
    begun = [each.at for each in itertools.takewhile(lambda each: each.at < 200.0, stream) if each.turn == 0]
    spike = sum(100.0 <= at < 110.0 for at in begun) / 10.0
    quiet = sum(at < 100.0 for at in begun) / 100.0
    assert spike == pytest.approx(50.0 * quiet, rel=0.25)
    assert len([at for at in begun if at >= 110.0]) / 90.0 == pytest.approx(quiet, rel=0.3)


def test_a_pattern_passes_its_settings_on() -> None:
    def gaps(text: str) -> list[float]:
        stream = parse_arrivals(text, parse_number).stream(10.0, random.Random(1))
        times = list(itertools.islice(stream, 20_000))
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    for text in ("gamma:cv=3", "step:to=1,cv=3"):
        found = gaps(text)
        assert statistics.pstdev(found) / statistics.fmean(found) == pytest.approx(3.0, rel=0.15)
    assert statistics.pstdev(gaps("step:to=1,cv=0")) < 1e-6
    quiet = gaps("bursts:on=1s,off=1s,quiet=0")
    assert max(quiet) > 1.0
    assert statistics.fmean(quiet) == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sinusiod", "--arrivals 'sinusiod': there is no kind 'sinusiod' (did you mean sinusoid?)"),
        ("", "there is no kind '' (one of poisson, gamma, constant, "),
        ("poisson:rate=3", "poisson has no setting 'rate' (it has none)"),
        ("spike:hight=3", "spike has no setting 'hight' (did you mean height?)"),
        ("gamma:vc=3", "gamma has no setting 'vc' (one of cv)"),
        ("gamma:", "gamma has no setting ''"),
        ("gamma:cv", "cv has no value (write cv=VALUE)"),
        ("gamma:cv=", "cv has no value"),
        ("gamma:cv=2,cv=3", "cv stands there twice"),
        ("gamma:cv=0", "cv=0 is out of range (above 0; Deviation"),
        ("step:at=soon", "at=soon is not a number, such as 200ms"),
        ("step:at=5kg", "at=5kg has the unknown unit 'kg'"),
        ("sinusoid:amplitude=1.5", "amplitude=1.5 is out of range (at least 0 and at most 1; How far"),
        ("weekly:peak=25h", "peak=25h is out of range (at least 0 and below 86400"),
        ("spike:every=5m", "every=300 ends before the spike does (above 330 s"),
    ],
)
def test_a_pattern_that_can_not_be_is_named_with_what_would_be_right(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arrivals(text, parse_number)
    assert said in str(caught.value)


def test_lengths_are_read_as_well() -> None:
    assert parse_lengths("512", parse_number, what="--isl") == Fixed(512)
    assert parse_lengths("8k", parse_number, what="--isl") == Fixed(8000)
    assert parse_lengths("fixed:tokens=3", parse_number, what="--isl") == Fixed(3)
    found = parse_lengths("lognormal:median=800,sigma=0.5,most=4k", parse_number, what="--isl")
    assert found == Lognormal(800, 0.5, 1, 4000)
    for text, said in (
        ("0", "tokens=0 is out of range"),
        ("1.5", "tokens=1.5 is not a whole number"),
        ("lognormal:median=800", "lognormal needs sigma (write lognormal:sigma=VALUE)"),
        ("lognormal:median=8,sigma=1,least=9,most=8", "least=9 is above most=8"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_lengths(text, parse_number, what="--isl")
        assert str(caught.value).startswith("--isl ")
        assert said in str(caught.value)


def test_the_page_has_every_kind_with_its_settings_and_defaults() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "concepts" / "traffic.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert set(PATTERNS) | set(get_args(Format)) | set(get_args(Name)) <= set(rows)
    for name, kind in PATTERNS.items():
        shown = dict(re.findall(r"`(\w+)=([^`]+)`", rows[name]))
        text = f"{name}:{','.join(f'{key}={value}' for key, value in shown.items())}" if shown else name
        assert parse_arrivals(text, parse_number) == kind()
        assert set(shown) == {field.name for field in fields_of(kind)} - (
            {"cv"} if issubclass(kind, ShapedArrivals) else set()
        )
