"""Does a search for settings find what is better, say what it costs, and prove it on traffic it did not see?"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.reading.load import load
from penstock.kernel.errors import ConfigError
from penstock_lab.cli.tune import command
from penstock_lab.profiler.tuning import tuning_run
from penstock_lab.profiler.tuning.tuning_report import SettingEffect, TunedSettings, TuningOutcome, print_tables
from penstock_lab.profiler.tuning.tuning_run import TrafficStretch, TrialRunner, _searched_scores, pared
from penstock_lab.profiler.tuning.tuning_space import Candidate, TuningAxis, TuningSpace, space_of
from penstock_lab.profiler.tuning.tuning_trial import Gain, TrialScore, TuningTrial, front, gain, halve, ranked
from tests.page.documents import document_of, words

SCORES = st.dictionaries(
    st.integers(0, 50),
    st.builds(TrialScore, *(st.sampled_from(values) for values in ([0.5, 0.9, 1.0], [1.0, 2.0, 4.0], [0.1, 2.0]))),
    min_size=1,
)
PLAIN = "models: {m: {tokenizer: 'builtin:sim', pools: {main: {replicas: 4, sim: {kv_blocks: 3000}}}}}\n"
SPLIT = """
models:
  m:
    tokenizer: builtin:sim
    pools:
      p: {role: prefill, replicas: 1}
      d: {role: decode, replicas: 3}
"""
BAD_ROUTING = "router: {mode: random}\nslo: {ttft: 600ms, itl: 20ms}\n"
"""The SLO needs a router that looks at load, or more engines."""


# --- the front and the halving -------------------------------------------------------------------------------------


@given(SCORES)
def test_the_front_has_one_of_each_score_that_nothing_dominates(scores: Mapping[int, TrialScore]) -> None:
    chosen = front(scores)
    assert chosen == sorted(chosen, key=lambda one: scores[one].gpu_hours)
    for candidate, score in scores.items():
        beaten = any(other.dominates(score) and other[:2] != score[:2] for other in scores.values())
        same = [one for one in chosen if scores[one][:2] == score[:2]]
        assert len(same) == (0 if beaten else 1), candidate
        assert all(scores[one].strain <= score.strain for one in same)


@given(SCORES)
def test_a_ranking_has_everybody_once_and_nobody_before_one_who_dominates_it(scores: Mapping[int, TrialScore]) -> None:
    order = ranked(scores)
    assert sorted(order) == sorted(scores)
    for place, candidate in enumerate(order):
        assert not any(scores[later].dominates(scores[candidate]) for later in order[place:])


def test_many_equal_ones_do_not_crowd_a_cheaper_one_out() -> None:
    scores = {number: TrialScore(1.0, 4.0, 0.5 + number / 100) for number in range(20)}
    scores[20] = TrialScore(0.998, 3.0, 0.9)
    assert set(ranked(scores)[:2]) == {0, 20}


def test_each_rung_has_half_of_the_one_before_and_the_present_settings_are_never_left_out() -> None:
    paid: list[tuple[float, int]] = []

    def evaluate(candidates: Sequence[int], share: float) -> dict[int, TrialScore]:
        paid.append((share, len(candidates)))
        assert 0 in candidates
        return {one: TrialScore(one / 100, 1.0, 0.0) for one in candidates}

    scores = halve(range(1, 27), (0.1, 0.5, 1.0), evaluate, always=0)
    assert paid == [(0.1, 27), (0.5, 15), (1.0, 9)]
    assert max(scores) == 26 and 0 in scores


# --- what is varied --------------------------------------------------------------------------------------------------


def settings_of(tmp_path: Path, text: str) -> Any:
    (tmp_path / "c.yaml").write_text(text)
    return load(tmp_path / "c.yaml").settings


def test_without_a_planner_the_replicas_are_varied_and_with_one_its_eagerness(tmp_path: Path) -> None:
    static = {axis.name for axis in space_of(settings_of(tmp_path, PLAIN), "m").axes}
    planned = {axis.name for axis in space_of(settings_of(tmp_path, PLAIN + "planner: {enabled: true}\n"), "m").axes}
    assert static - planned == {"replicas of main"}
    assert planned - static == {"planner.slo.miss_cost", "planner.slo.hold"}
    assert "models.m.pools.main.sim.max_num_batched_tokens" in static & planned


def test_a_split_moves_gpus_between_prefill_and_decode_and_keeps_their_sum(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, SPLIT)
    (axis,) = [axis for axis in space_of(settings, "m").axes if axis.name == "split of the GPUs"]
    splits = [[int(text.partition("=")[2]) for text in choice] for choice in axis.choices[1:]]
    assert splits == [[2, 2], [3, 1]]


def test_every_sample_and_neighbour_is_a_valid_config(tmp_path: Path) -> None:
    space, rng = space_of(settings_of(tmp_path, SPLIT), "m"), random.Random(1)
    near: list[Candidate] = []
    for source in (space.samples(rng), space.neighbours([space.configured], rng)):
        near = [next(source) for _ in range(60)]
        for candidate in near:
            load(tmp_path / "c.yaml", space.overrides(candidate))
    assert max(sum(choice != 0 for choice in one) for one in near) <= 2
    assert space.overrides(space.configured) == ()


def test_what_is_chosen_by_hand_is_all_that_is_varied(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, PLAIN)
    (axis,) = space_of(settings, "m", ["router.mode=kv,random"]).axes
    assert axis.choices == ((), ("router.mode=kv",), ("router.mode=random",))
    with pytest.raises(ConfigError, match="names nothing to vary"):
        space_of(settings, "m", ["router.mode"])


# --- is a gain real? -------------------------------------------------------------------------------------------------


def trial(in_slo: bytes) -> TuningTrial:
    return TuningTrial(
        candidate=(0,), share=1.0, holdout=True, attainment=0.5, gpu_hours=1.0, strain=1.0, in_slo=in_slo
    )


def test_a_gain_that_lies_in_one_stretch_is_not_certain_and_one_that_lies_everywhere_is() -> None:
    before = trial(bytes(400))
    everywhere = gain(trial(bytes(int(place % 5 == 0) for place in range(400))), before)
    somewhere = gain(trial(bytes([1] * 80 + [0] * 320)), before)
    assert everywhere is not None and somewhere is not None
    assert everywhere.mean == pytest.approx(0.2) and somewhere.mean == pytest.approx(0.2)
    assert everywhere.low > 0.15 and somewhere.low < 0.02
    assert gain(trial(bytes(10)), trial(bytes(10))) is None


def outcome(won: Gain | None, *, gpu_hours: float = 1.0) -> TuningOutcome:
    before, chosen = trial(bytes(40)), msgspec.structs.replace(trial(bytes(40)), gpu_hours=gpu_hours)
    rows = [
        TunedSettings(candidate=(place,), changes=(), searched=one, holdout=one, gain=won if place else None)
        for place, one in enumerate((before, chosen))
    ]
    return TuningOutcome(
        rows=rows,
        proposed=(1,),
        effects=(),
        trials=(),
        configurations=2,
        requests=(1, 1),
        seconds=(1, 1),
        axes=(),
        wanted=0.99,
        notes=(),
    )


@given(st.floats(-0.2, 0.2), st.floats(0.001, 0.1), st.sampled_from([0.5, 1.0, 1.5]))
def test_nothing_holds_whose_range_has_both_signs(mean: float, spread: float, gpu_hours: float) -> None:
    won = Gain(mean=mean, low=mean - spread, high=mean + spread)
    verdict = outcome(won, gpu_hours=gpu_hours).verdict
    assert ("The gain holds" in verdict) == (won.low > 0)
    assert ("no difference in attainment can be told" in verdict) == (won.low <= 0 <= won.high)
    text = SettingEffect(names=["a"], gain=won, gpu_hours=0.0).text
    assert ("no difference" in text) == (won.low <= 0 <= won.high)


def test_gpu_hours_of_a_short_trace_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert "-0.0042 GPU-hours" in SettingEffect(names=["a"], gain=None, gpu_hours=-0.0042).text
    assert "+1.50 GPU-hours" in SettingEffect(names=["a"], gain=None, gpu_hours=1.5).text
    print_tables(outcome(None, gpu_hours=0.00833), Path("out"))
    assert "0.0083" in capsys.readouterr().out


def test_changes_that_bring_nothing_are_undone_and_the_one_that_matters_stays() -> None:
    """Axis 1 brings a fifth of the requests into the SLO, axes 0 and 2 nothing that can be told."""

    def trial_of(candidate: Candidate) -> TuningTrial | None:
        noise = sum(candidate[place] * 7 for place in (0, 2))
        in_slo = [candidate[1] and (place + noise) % 5 == 0 for place in range(400)]
        share = sum(in_slo) / 400
        return msgspec.structs.replace(trial(bytes(in_slo)), candidate=candidate, attainment=share)

    assert pared((3, 1, 2), trial_of, wanted=0.99) == (0, 1, 0)
    assert pared((3, 1, 2), lambda one: trial_of(one) if one == (3, 1, 2) else None, wanted=0.99) == (3, 1, 2)
    assert pared((0, 0, 0), trial_of, wanted=0.99) == (0, 0, 0)


# --- the command -----------------------------------------------------------------------------------------------------


def tune(tmp_path: Path, config: str, *arguments: str) -> Any:
    """Tune in this process unless ``--jobs`` is given: each rung's new processes take longer than so small trials."""
    if "--jobs" not in arguments:
        arguments = (*arguments, "--jobs", "1")
    (tmp_path / "c.yaml").write_text(config)
    given = [str(tmp_path / "c.yaml"), "--workload", "chat", "--out", str(tmp_path / "out"), *arguments]
    return CliRunner().invoke(command, given, standalone_mode=False)


def test_a_better_router_is_found_and_proved_on_traffic_that_was_held_out(tmp_path: Path) -> None:
    vary = ["--vary", "router.mode=kv,power_of_two", "--vary", "router.queue.policy=fcfs,lcfs"]
    loaded = ("--rate", "12", "--duration", "240", "--seed", "1")  # of a seed whose last minutes are loaded as well
    done = tune(tmp_path, PLAIN + BAD_ROUTING, *loaded, "--trials", "8", *vary, "--json")
    assert done.exception is None, done.exception
    found = json.loads(done.stdout)
    before, *others = found["settings"]
    (chosen,) = [each for each in found["settings"] if each["proposed"]]
    assert before["changes"] == {} and before["gain"] is None
    assert chosen["changes"]["router.mode"] in ("kv", "power_of_two")
    assert chosen["holdout"]["attainment"] > before["holdout"]["attainment"]
    assert chosen["gain"]["mean"] == pytest.approx(
        chosen["holdout"]["attainment"] - before["holdout"]["attainment"], abs=0.01
    )
    assert "The gain holds" in found["verdict"] and others
    assert list(chosen["changes"]) == ["router.mode"], "the order in a queue that is empty matters to nobody"
    tuned = load(tmp_path / "out/tuned.yaml").settings
    assert tuned.router.mode == chosen["changes"]["router.mode"]
    page = document_of(tmp_path / "out/report.html")
    assert found["verdict"] in words(page)
    head, *rows = (tmp_path / "out/trials.csv").read_text().splitlines()
    assert (
        head.startswith("holdout,share,attainment,gpu_hours,strain,router.mode") and len(rows) == found["simulations"]
    )
    assert found["trials"] == 8


@pytest.mark.parametrize("rungs", [(1.0,), (0.2, 0.5, 1.0)])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 13, 60])
def test_as_many_configurations_are_searched_as_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, count: int, rungs: tuple[float, ...]
) -> None:
    """The present one among them, each of them once on the first rung; where there are fewer, all there are."""
    monkeypatch.setattr(tuning_run, "RUNGS", rungs)
    seen: list[Candidate] = []

    def evaluate(candidates: Sequence[Candidate], share: float) -> dict[Candidate, TrialScore]:
        seen.extend(one for one in candidates if share == rungs[0] and (one not in seen or one != (0, 0, 0)))
        return {one: TrialScore(sum(one) / 100, 1.0 + sum(one), 0.0) for one in candidates}

    for sizes in ((4, 4, 4), (2, 2, 1)):
        seen.clear()
        space = TuningSpace([TuningAxis(str(size), ((),) * size) for size in sizes])
        nothing: Any = None
        requests: Any = [None] * 10_000
        runner = TrialRunner(nothing, space, TrafficStretch(requests, 1.0), TrafficStretch([], 1.0))
        monkeypatch.setattr(runner, "evaluate", evaluate)
        monkeypatch.setattr(runner, "variant", lambda candidate: None)
        options: Any = SimpleNamespace(trials=count, simulate=SimpleNamespace(seed=1))
        _searched_scores(options, space, runner)
        assert len(seen) == len(set(seen)) == runner.searched
        assert len(seen) == min(count, math.prod(sizes))


@pytest.mark.slow
def test_the_same_seed_finds_the_same_on_one_core_as_on_two(tmp_path: Path) -> None:
    short = ["--rate", "6", "--duration", "60", "--trials", "4", "--json"]
    one, two = (tune(tmp_path, PLAIN, *short, "--jobs", jobs) for jobs in ("1", "2"))
    assert one.exception is None and two.exception is None, (one.exception, two.exception)
    assert json.loads(one.stdout) == json.loads(two.stdout)


def test_where_nothing_is_better_the_present_settings_stay(tmp_path: Path) -> None:
    done = tune(tmp_path, PLAIN, "--rate", "4", "--duration", "60", "--trials", "4", "--vary", "router.mode=kv")
    assert done.exception is None, done.exception
    assert "The present settings stay" in done.stdout and "Proposed" not in done.stdout


def test_settings_that_contradict_each_other_are_left_out_and_named(tmp_path: Path) -> None:
    knob = "models.m.pools.main.sim.max_num_batched_tokens"
    done = tune(tmp_path, PLAIN, "--rate", "4", "--duration", "60", "--trials", "6", "--vary", f"{knob}=64,4096")
    assert done.exception is None, done.exception
    assert "left out" in done.stdout and "max_num_batched_tokens" in done.stdout


def test_traffic_that_can_not_be_split_is_refused(tmp_path: Path) -> None:
    done = tune(tmp_path, PLAIN, "--requests", "1")
    assert isinstance(done.exception, ConfigError) and "--hold-out" in str(done.exception)


def test_a_planner_of_the_config_plans_in_the_trials(tmp_path: Path) -> None:
    planned = PLAIN + "planner: {enabled: true, budget: {max_gpus: 4}}\nslo: {ttft: 1s, itl: 40ms}\n"
    vary = ["--vary", "planner.slo.miss_cost=1,200"]
    done = tune(tmp_path, planned, "--rate", "6", "--duration", "300", "--trials", "2", *vary, "--json")
    assert done.exception is None, done.exception
    rows = json.loads(done.stdout)["settings"]
    assert all(row["searched"]["gpu_hours"] < 4 * 210 / 3600 for row in rows)


def test_every_trial_has_the_config_that_came_on_standard_input(tmp_path: Path) -> None:
    given = ["-", "--workload", "chat", "--rate", "6", "--duration", "20", "--trials", "2", "--out", str(tmp_path)]
    two, one = (
        CliRunner().invoke(command, [*given, *more], standalone_mode=False, input=PLAIN)
        for more in (["--jobs", "2", "--json"], ["--jobs", "1", "--json"])
    )
    assert one.exception is None and two.exception is None, (one.exception, two.exception)
    assert json.loads(one.stdout) == json.loads(two.stdout)
    assert list(load(tmp_path / "tuned.yaml").settings.models) == ["m"]


def test_what_follows_from_the_config_is_not_written_into_it(tmp_path: Path) -> None:
    timing = "{kind: roofline, model: Llama-3.1-8B, gpu: h100}"
    config = (
        f"models: {{m: {{tokenizer: 'builtin:sim', pools: {{main: {{replicas: 1, sim: {{timing: {timing}}}}}}}}}}}\n"
    )
    vary = ["--vary", "models.m.pools.main.sim.max_num_batched_tokens=2048"]
    done = tune(tmp_path, config, "--rate", "2", "--duration", "60", "--trials", "2", *vary, "--json")
    assert done.exception is None, done.exception
    assert {key for row in json.loads(done.stdout)["settings"] for key in row["changes"]} <= {vary[1].partition("=")[0]}
    assert load(tmp_path / "out/tuned.yaml").settings.models["m"].pools["main"].sim.kv_blocks == "auto"
