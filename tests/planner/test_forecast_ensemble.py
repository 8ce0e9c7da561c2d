"""Are the quantiles what they say, and does a forecast stay within reason whatever it is given?"""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.forecast.ensemble import RANKS, RateForecast
from penstock.planner.forecast.experts import CurveExpert, Expert, LevelExpert, SeasonalExpert, TrendExpert, usual
from tests.depth import deep

WIDTH = 15.0
HORIZONS = (0.0, 15.0, 60.0, 120.0, 300.0, 600.0)
Curved = Callable[[float], float]


def wave(at: float) -> float:
    return 5.0 - 3.5 * math.cos(2.0 * math.pi * at / 1800.0)


def wandering(seed: int) -> Curved:
    """Return a rate that goes up and down by chance, without a period."""
    dice = random.Random(seed)
    levels = [4.0]
    for _ in range(1000):
        levels.append(min(20.0, max(0.5, levels[-1] * dice.lognormvariate(0.0, 0.06))))
    return lambda at: levels[int(at / 15.0)]


def arrivals(rate: Curved, bins: int, seed: int) -> list[float]:
    """Return what arrives in each bin when requests come by chance at a rate."""
    rng = np.random.default_rng(seed)
    return [float(rng.poisson(rate(number * WIDTH) * WIDTH)) for number in range(bins)]


def fed(counts: list[float]) -> RateForecast:
    found = RateForecast(WIDTH)
    for count in counts:
        found.add(count, WIDTH)
    return found


@pytest.mark.parametrize(
    "shape", [lambda seed: lambda at: 4.0, lambda seed: wave, wandering], ids=["steady", "wave", "wandering"]
)
def test_as_many_rates_lie_below_a_quantile_as_it_says(shape):
    horizons, ranks = (60.0, 120.0), (0.05, 0.2, 0.5, 0.8, 0.95)
    below: dict[tuple[float, float], list[bool]] = {(rank, horizon): [] for rank in ranks for horizon in horizons}
    for seed in range(4):
        rate = shape(seed)
        forecast = RateForecast(WIDTH)
        for number, count in enumerate(arrivals(rate, 350, seed)):
            forecast.add(count, WIDTH)
            if number > 120:
                rows = forecast.quantiles(horizons, ranks)
                for (rank, horizon), found in below.items():
                    then = rate((number + 1) * WIDTH + horizon)
                    found.append(then <= rows[ranks.index(rank), horizons.index(horizon)] + 1e-9)
    shares = {place: sum(found) / len(found) for place, found in below.items()}
    off = {place: share for place, share in shares.items() if abs(share - place[0]) > 0.1}
    assert not off, f"(rank, horizon) -> share below it: {off}"


def test_the_middle_is_better_than_staying_at_the_last_rate_where_there_is_a_wave():
    ours = theirs = 0.0
    for seed in range(3):
        counts = arrivals(wave, 500, seed)
        forecast = RateForecast(WIDTH)
        for number, count in enumerate(counts):
            forecast.add(count, WIDTH)
            if number > 250:
                then = wave((number + 1) * WIDTH + 120.0)
                ours += abs(float(forecast.quantiles((120.0,), (0.5,))[0, 0]) - then)
                theirs += abs(count / WIDTH - then)
    assert ours < 0.6 * theirs


@pytest.mark.parametrize("rate", [0.0, 0.2, 4.0, 300.0])
def test_a_constant_rate_is_forecast_as_that_rate(rate):
    found = fed([rate * WIDTH] * 200).quantiles(HORIZONS)
    assert found == pytest.approx(np.full_like(found, rate), rel=0.1, abs=1e-3)


def test_before_a_bin_is_full_it_is_what_came_so_far():
    forecast = RateForecast(WIDTH)
    assert (forecast.quantiles(HORIZONS) == 0.0).all() and forecast.bins == 0
    forecast.add(10.0, 5.0)
    assert (forecast.quantiles(HORIZONS) == 2.0).all()


def test_windows_of_any_length_add_up_to_the_same_bins():
    whole, parts = RateForecast(WIDTH), RateForecast(WIDTH)
    whole.add(900.0, 90.0)
    for _ in range(18):
        parts.add(50.0, 5.0)
    assert whole.bins == parts.bins == 6
    assert whole.quantiles(HORIZONS) == pytest.approx(parts.quantiles(HORIZONS))
    whole.add(5.0, 0.0)
    assert whole.bins == 6, "a window of no time says nothing"


@settings(max_examples=deep(40), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100_000), st.sampled_from([1.0, 5.0, 15.0, 200.0])), max_size=40))
def test_whatever_comes_there_is_a_number_never_below_zero_and_ascending_in_rank(windows):
    forecast = RateForecast(WIDTH)
    for arrived, seconds in windows:
        forecast.add(float(arrived), seconds)
    found = forecast.quantiles(HORIZONS)
    assert np.isfinite(found).all() and (found >= 0.0).all()
    assert (np.diff(found, axis=0) >= -1e-9).all()


def test_after_the_traffic_has_stopped_so_does_the_forecast():
    found = fed([60.0] * 60 + [0.0] * 80).quantiles(HORIZONS)
    assert (found[RANKS.index(0.5)] < 0.1).all() and (found[RANKS.index(0.9)] < 1.0).all()


@pytest.mark.parametrize(("before", "slope"), [(10.0, 2.0), (40.0, 2.0), (10.0, 0.5), (40.0, -0.4)])
def test_a_ramp_out_of_a_steady_hour_costs_hardly_more_than_last_value(before: float, slope: float):
    """In its first ten bins; a steady hour has made the mixture trust in means, and these lag."""
    ours, last = 0.0, 0.0
    for seed in range(12):
        counts = arrivals(lambda at: before + slope * max(0.0, at / WIDTH - 39.0), 50, seed)
        forecast = fed(counts[:40])
        for now, then in pairwise(counts[39:]):
            ours += abs(float(forecast.quantiles([WIDTH], [0.5])[0, 0]) - then / WIDTH)
            last += abs(now - then) / WIDTH
            forecast.add(then, WIDTH)
    assert ours < 1.2 * last


def test_a_spike_does_not_make_it_expect_ever_more():
    found = fed([30.0] * 100 + [300.0] * 8).quantiles(HORIZONS)
    assert float(found.max()) < 20.0 * 2.5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cut", [0.0, 0.5])
def test_a_jump_is_no_reason_to_expect_another_at_any_moment(seed, cut):
    """However the bins cut it: a first bin that is half old and half new must not hide it."""
    quiet, spike = [0.5] * 40, [0.5 + 2.5 * (1.0 - cut), 3.0, 3.0, 3.0]

    def highest(levels: list[float]) -> float:
        counts = np.random.default_rng(seed).poisson(np.array(levels) * WIDTH)
        return float(fed([float(count) for count in counts]).quantiles((120.0,), (0.95,))[0, 0])

    assert highest(quiet + spike + quiet) < 1.25 * highest(quiet + quiet)


def test_a_period_is_found_once_three_were_seen():
    seasonal = SeasonalExpert()
    dice = np.random.default_rng(1)
    for number in range(3 * 120):
        seasonal.add(math.sqrt(dice.poisson(wave(number * WIDTH) * WIDTH) / WIDTH))
    assert seasonal.period is not None and seasonal.period == pytest.approx(120, abs=8)
    path = seasonal.path((10, 40))
    assert path is not None
    assert path[1] ** 2 == pytest.approx(wave((3 * 120 + 39) * WIDTH), rel=0.35)


def test_noise_has_no_period():
    dice = random.Random(1)
    seasonal = SeasonalExpert()
    for _ in range(500):
        seasonal.add(dice.gauss(2.0, 0.1))
    assert seasonal.period is None and seasonal.path((1,)) is None


@pytest.mark.parametrize("expert", usual(), ids=lambda expert: expert.name)
def test_every_expert_stays_a_number_and_goes_on_after_a_restart(expert: Expert):
    twin = next(each for each in usual() if each.name == expert.name)
    dice = random.Random(2)
    for _ in range(150):
        expert.add(dice.random() * 3.0)
    twin.restore(msgspec.json.decode(msgspec.json.encode(expert.snapshot())))
    for each in (expert, twin):
        each.add(1.0)
    path, again = expert.path((1, 40)), twin.path((1, 40))
    if path is None or again is None:
        assert path is again
        return
    assert np.isfinite(path).all() and (path >= 0.0).all() and (path == again).all()


@pytest.mark.parametrize(
    ("expert", "expected"),
    [(LevelExpert(2), 3.0), (TrendExpert(0.4, 0.1, 0.95), 3.0), (CurveExpert(12), 3.0)],
    ids=["level", "trend", "curve"],
)
def test_every_expert_takes_a_constant_for_constant(expert, expected):
    for _ in range(60):
        expert.add(3.0)
    assert expert.path((1, 20)) == pytest.approx([expected] * 2, rel=0.02)


def test_a_trend_goes_on_and_flattens():
    trend = TrendExpert(0.4, 0.1, 0.95)
    for number in range(60):
        trend.add(0.1 * number)
    near, far, farther = trend.path((1, 20, 200))
    assert near > 5.8 and far > near and farther - far < 20 * 0.1


def test_whoever_errs_less_weighs_more():
    forecast = RateForecast(WIDTH, [LevelExpert(2), TrendExpert(0.4, 0.1, 0.98)])
    for number in range(150):
        forecast.add(WIDTH * (1.0 + 0.05 * number), WIDTH)
    weights = forecast.weights()
    better = max(weights, key=weights.__getitem__)
    assert better.startswith("trend") and weights[better] > 0.9


def test_what_is_kept_and_read_again_forecasts_the_same():
    counts = arrivals(wave, 200, 1)
    forecast, twin = fed(counts[:150]), RateForecast(1.0)
    twin.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(forecast.snapshot()), strict=False))
    for count in counts[150:]:
        forecast.add(count, 7.0)
        twin.add(count, 7.0)
    assert (forecast.quantiles(HORIZONS) == twin.quantiles(HORIZONS)).all()


def beat(
    every: float, seconds: float, more: float, low: float, high: float, slow: float, jitter: float = 0.0
) -> Curved:
    """Return a slow wave with so much more for some seconds of each period, which begins a little early or late."""
    dice = random.Random(f"{every} {slow}")
    late = [dice.uniform(-jitter, jitter) for _ in range(200)]

    def rate(at: float) -> float:
        number = int(at // every)
        wave = (low + high) / 2.0 - (high - low) / 2.0 * math.cos(2.0 * math.pi * at / slow)
        return wave + (more if 0.0 <= at - number * every - every / 3.0 - late[number] < seconds else 0.0)

    return rate


@pytest.mark.parametrize(
    ("rate", "every"),
    [
        (beat(900.0, 180.0, 4.5, 1.5, 4.0, 7200.0), 900.0),
        (beat(900.0, 180.0, 4.5, 1.5, 4.0, 7200.0, jitter=20.0), 900.0),
        (beat(900.0, 180.0, 4.0, 1.0, 5.0, 5400.0), 900.0),
        (beat(420.0, 120.0, 3.0, 1.5, 4.0, 3600.0), 420.0),
        (beat(600.0, 300.0, 4.0, 2.0, 2.0, 1e9), 600.0),
        (beat(1500.0, 240.0, 6.0, 2.0, 3.0, 9000.0), 1500.0),
    ],
    ids=["fifteen minutes", "jitter", "a steep wave", "seven minutes", "square", "twenty-five minutes"],
)
def test_a_beat_that_was_there_three_times_is_foreseen(rate: Curved, every: float) -> None:
    known, bins = int(3.2 * every / WIDTH), int(7.0 * every / WIDTH)
    counts = arrivals(rate, bins, 3)
    forecast = RateForecast(WIDTH)
    ours = last = 0.0
    for number, count in enumerate(counts):
        forecast.add(count, WIDTH)
        if number >= known:
            then = rate((number + 8.5) * WIDTH)
            ours += abs(float(forecast.quantiles((8.0 * WIDTH,), (0.5,))[0, 0]) - then)
            last += abs(sum(counts[number - 3 : number + 1]) / 4.0 / WIDTH - then)
    pattern = forecast.pattern()
    assert pattern is not None
    period, saved = pattern
    assert abs(period % every) <= 2 * WIDTH or abs(every - period % every) <= 2 * WIDTH
    assert saved > 0.3 and ours < 0.55 * last


def test_chance_has_no_pattern() -> None:
    for seed in range(4):
        forecast = fed(arrivals(wandering(seed), 400, seed))
        steady = fed(arrivals(lambda at: 4.0, 400, seed))
        assert steady.pattern() is None or steady.pattern()[1] < 0.2  # type: ignore[index]
        assert forecast.pattern() is None or forecast.pattern()[1] < 0.5  # type: ignore[index]
