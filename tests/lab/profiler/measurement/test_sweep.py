"""Does a sweep find an engine's timing with few points, repeat what varies, and end when time is up?"""

from pathlib import Path

import msgspec
import pytest

from penstock.config.files.profile_manifest import ProfileManifest, ProfilePoint, read_measured
from penstock.kernel.errors import ConfigError, EngineError
from penstock.kernel.machine import MILLISECOND
from penstock.kernel.values import EngineLimits, Slo
from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.settings import TimingSettings
from penstock_lab.engine.timing.timing_model import roofline_of, timing_of
from penstock_lab.profiler.measurement.engine_probe import PointKey, ProbeSample
from penstock_lab.profiler.measurement.profile_run import MeasuredPoints, ProfileOptions, ShareOfBudget
from penstock_lab.profiler.measurement.sweep import (
    COARSE,
    OUTPUT,
    REPEATS,
    REPEATS_MAX,
    Sweep,
    SweepOptions,
    crossing_of,
    first_of,
    flights,
    in_flight_max,
    most_uncertain,
    point_of,
    prompt_lengths,
    steady,
)
from tests.lab.profiler.measurement.swept import SHAPE, Endless, swept
from tests.lab.profiler.measurement.virtual_probe import GAP, MODEL, VirtualProbe, h100


async def test_a_line_is_measured_more_finely_where_it_crosses_the_sla() -> None:
    probe, done = VirtualProbe(h100(1, max_num_seqs=256)), dict[PointKey, ProfilePoint]()
    options = SweepOptions(shape=SHAPE, longest=8_000, mixed=False, ttft=0.1, itl=0.02)
    await Sweep(probe, 1, options, done, Endless(), record=lambda key, point: None).run()
    for kind, place, target in (("prefill", "tokens", 0.1), ("decode", "seqs", 0.02)):
        points = [p for key, p in done.items() if key.kind == kind and key.context in (0, options.context)]
        line = sorted((getattr(point, place), point.mean) for point in points)
        low = max(at for at, seconds in line if seconds <= target)
        high = min(at for at, seconds in line if seconds > target)
        assert high - low <= max(1, 0.03 * high), (kind, line)


def test_a_place_where_the_target_is_met_is_looked_for_only_between_measured_points() -> None:
    line = {1: (0.01, 0.0), 100: (0.03, 0.0)}
    assert crossing_of(line, 0.0199) == 50 and crossing_of(line, None) is None
    assert crossing_of(line, 0.04) is None and crossing_of(line, 0.005) is None
    assert crossing_of({**line, 50: (0.0199, 0.0), 51: (0.0201, 0.0)}, 0.02) is None


async def test_a_point_is_not_repeated_once_time_is_up() -> None:
    class Over:
        calls = 0

        def over(self) -> bool:
            self.calls += 1
            return self.calls > 1

    probe, done = VirtualProbe(h100(1), noise=0.5), dict[PointKey, ProfilePoint]()
    sweep = Sweep(probe, 1, SweepOptions(shape=SHAPE), done, Over(), record=lambda key, point: None)
    await sweep.run()
    (point,) = done.values()
    assert point.repeats == 1 and all(text.endswith("time was up") for text in sweep.left_out) and sweep.left_out


@pytest.mark.parametrize("noise", [0.0, 0.02])
async def test_sizes_1_to_8_are_recovered(tmp_path: Path, noise: float) -> None:
    """The table that comes of a sweep predicts passes that were never measured."""
    await swept(tmp_path, 1, 2, 4, 8, noise=noise)
    for tp in (1, 2, 4, 8):
        own = VirtualProbe(h100(tp, max_num_seqs=64)).timing
        settings = TimingSettings(kind="table", profile=str(tmp_path), tensor_parallel_size=tp)
        table = timing_of(settings, 100_000, load_timing(settings))
        near = 0.04 + 2 * noise
        for tokens in (1_700, 3_333, 6_100):
            assert table.prefill(tokens) == pytest.approx(own.prefill(tokens), rel=near)
        for seqs, context in ((1, 2_000), (9, 3_100), (30, 5_000), (60, 3_100)):
            kv = seqs * context
            assert table.decode(kv, seqs) == pytest.approx(own.decode(kv, seqs), rel=near), (tp, seqs, context)
        mixed = own.mixed(2_000, [(0, 2_000)], 20 * 3_000, 20)
        found = table.mixed(2_000, [(0, 2_000)], 20 * 3_000, 20)
        assert found == pytest.approx(mixed, rel=0.06 + 2 * noise)
        sum_of_both = table.prefill(2_000) + table.decode(20 * 3_000, 20)
        assert found < sum_of_both - 0.5 * MILLISECOND, "weights are read once in a mixed pass, and not twice"


async def test_collectives_and_gaps_are_measured_and_not_assumed(tmp_path: Path) -> None:
    manifest = await swept(tmp_path, 1, 2, 4, 8, gap=GAP)
    for tp in (1, 2, 4, 8):
        assert manifest.host.pass_gap[tp] == pytest.approx(GAP, rel=0.01)
        assert manifest.host.request[tp] == pytest.approx(GAP, rel=0.01)
    probe = VirtualProbe(h100(4))
    assert probe.table is not None
    true = roofline_of(probe.settings.timing, probe.table).collectives.fixed
    assert manifest.host.collectives == pytest.approx(true, rel=0.15)
    two = await swept(tmp_path / "two", 1, 2)
    assert two.host.collectives is None, "two sizes can't tell it from the work"


def test_a_straight_line_needs_no_more_points_and_a_bend_gets_them() -> None:
    grid = prompt_lengths(20_000, 16, 3_000)
    assert len(grid) in (17, 18, 19) and 3_000 in grid
    line = {place: (0.01 + place / 1e5, 0.0) for place in first_of(grid)}
    assert len(line) == COARSE and most_uncertain(grid, line) is None

    def bent(place: int) -> float:
        return 0.02 + max(0, place - 9_000) / 1e5

    measured = {place: (bent(place), 0.0) for place in first_of(grid)}
    added = []
    while (place := most_uncertain(grid, measured)) is not None:
        added.append(place)
        measured[place] = (bent(place), 0.0)
    assert added and len(measured) < len(grid)
    assert min(abs(place - 9_000) for place in added) < 1_300
    noisy = dict.fromkeys(first_of(grid), (1.0, 0.2))
    assert most_uncertain(grid, noisy) is not None, "points that vary much are uncertain, too"


def test_flights_go_from_one_to_what_fits() -> None:
    assert flights(1) == [1] and flights(3) == [1, 2, 3]
    many = flights(256)
    assert many[0] == 1 and many[-1] == 256 and len(many) == 9


async def test_an_engine_that_does_not_say_how_many_it_takes_is_measured_up_to_as_many_as_it_takes() -> None:
    class Silent(VirtualProbe):
        @property
        def limits(self) -> EngineLimits[int | None]:
            return msgspec.structs.replace(super().limits, max_num_seqs=None)

        async def measure(self, key: PointKey) -> ProbeSample:
            if key.seqs > (self.settings.max_num_seqs or 0):
                raise EngineError(f"{key.seqs} sequences never decoded at one time")
            return await super().measure(key)

    for most in (2, 8):
        probe, done = Silent(h100(1, max_num_seqs=most)), dict[PointKey, ProfilePoint]()
        options = SweepOptions(shape=SHAPE, longest=6_000, mixed=False)
        sweep = Sweep(probe, 1, options, done, Endless(), record=lambda key, point: None)
        await sweep.run()
        measured = {key.seqs for key in done if key.kind == "decode" and key.context == options.context}
        fits = in_flight_max(probe.limits, options.context, OUTPUT)
        assert max(measured) == max(each for each in flights(fits) if each <= most) > most // 2, measured


async def test_an_outlier_is_repeated_and_left_out() -> None:
    key = PointKey("prefill", 1, 1_000)
    samples = [ProbeSample(seconds) for seconds in (0.1, 1.0, 0.101)]
    assert not steady(samples)
    samples.append(ProbeSample(0.099))
    assert steady(samples)
    point = point_of(key, samples)
    assert (point.repeats, point.outliers) == (3, 1) and point.mean == pytest.approx(0.1)

    probe, done = VirtualProbe(h100(1, max_num_seqs=8), spike=9), dict[PointKey, ProfilePoint]()
    sweep = Sweep(probe, 1, SweepOptions(shape=SHAPE, longest=6_000), done, Endless(), record=lambda key, point: None)
    await sweep.run()
    assert sum(point.outliers for point in done.values()) > 3
    assert all(probe.calls[key] <= REPEATS_MAX for key in done if key.tokens != 3_000)
    exact = VirtualProbe(h100(1, max_num_seqs=8))
    for key, point in done.items():
        assert point.repeats >= REPEATS
        assert point.mean == pytest.approx(exact._exact(key)[0]), key


async def test_when_time_is_up_what_is_left_is_named_and_a_later_run_goes_on(tmp_path: Path) -> None:
    options = ProfileOptions(
        sweep=SweepOptions(shape=SHAPE, longest=6_000), out=tmp_path, slo=Slo(), seconds=4.0, sizes=(1,)
    )
    subject = ProfileManifest(model=MODEL, engine="sim")

    async def once(seconds: float) -> tuple[VirtualProbe, Sweep, MeasuredPoints]:
        probe = VirtualProbe(h100(1, max_num_seqs=8))
        points = MeasuredPoints(tmp_path, lambda: probe.clock)
        points.open(subject)
        timed = ProfileOptions(sweep=options.sweep, out=tmp_path, slo=Slo(), seconds=seconds)
        budget = ShareOfBudget(timed, 1, 1, 0.0, 0.0, lambda: probe.clock)
        sweep = Sweep(probe, 1, timed.sweep, points.done, budget, record=points.add)
        await sweep.run()
        return probe, sweep, points

    first, cut, points = await once(1.5)
    assert len(points.lines) > 0 and any("time was up" in text for text in cut.left_out)
    assert points.seconds == pytest.approx(first.clock), "every second belongs to a point"
    assert first.clock < 2.5
    assert "prefill, TP 1: 3,000 tokens" not in " ".join(cut.left_out), "the target comes first"
    second, whole, again = await once(1e9)
    assert whole.left_out == [] and not set(second.calls) & {line.key for line in points.lines} - {_target()}
    assert len(again.lines) > len(points.lines)
    (tmp_path / "measured.jsonl").write_bytes((tmp_path / "measured.jsonl").read_bytes() + b'{"key": ["pre')
    points = MeasuredPoints(tmp_path)
    points.open(subject)
    assert len(points.lines) == len(again.lines), "a line that was cut off does not count"
    with pytest.raises(ConfigError, match=r"points of model Llama-3.1-8B, and this is other"):
        MeasuredPoints(tmp_path).open(ProfileManifest(model="other", engine="sim"))


def _target() -> PointKey:
    return PointKey("prefill", 1, 3_000)


def test_time_and_gpu_hours_are_shared_by_the_sizes_that_are_left(tmp_path: Path) -> None:
    clock = [100.0]
    options = ProfileOptions(sweep=SweepOptions(shape=SHAPE), out=tmp_path, slo=Slo(), seconds=300.0, gpu_hours=0.1)
    time_bound = ShareOfBudget(options, 1, 3, 0.0, 0.0, lambda: clock[0])
    gpu_bound = ShareOfBudget(options, 8, 2, 0.0, 120.0, lambda: clock[0])
    clock[0] = 114.0
    assert not time_bound.over() and not gpu_bound.over()
    clock[0] = 115.1  # (360 - 120) GPU-seconds over two sizes and eight GPUs
    assert not time_bound.over() and gpu_bound.over()
    clock[0] = 166.8
    assert time_bound.over()


async def test_an_engine_that_refuses_a_point_costs_that_point_only(tmp_path: Path) -> None:
    class Refusing(VirtualProbe):
        async def measure(self, key: PointKey) -> ProbeSample:
            if key.seqs > 4:
                raise EngineError("too many")
            return await super().measure(key)

    done = dict[PointKey, ProfilePoint]()
    sweep = Sweep(
        Refusing(h100(1, max_num_seqs=8)),
        1,
        SweepOptions(shape=SHAPE, longest=6_000),
        done,
        Endless(),
        record=lambda key, point: None,
    )
    await sweep.run()
    assert done and max(key.seqs for key in done) <= 4
    assert all("too many" in text for text in sweep.left_out) and sweep.left_out


async def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    manifest = await swept(tmp_path, 1, 2)
    again = read_measured(tmp_path)
    assert again.manifest == manifest
    points = MeasuredPoints(tmp_path)
    points.open(ProfileManifest(model=MODEL, engine="sim"))
    assert again.points == list(points.done.values())
