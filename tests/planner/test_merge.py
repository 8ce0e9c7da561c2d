"""How answers of one stage are joined: golden cases, and a plain re-statement of the rule over random answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.values import RequestShape
from penstock.planner.plugins.merge import merge, merge_predictions
from penstock.planner.plugins.plugin_registry import PluginSpec
from penstock.planner.plugins.proposals import Accept, Flip, Override, PoolTarget, Predicted, Prediction, Reason, Reject


def spec(id: str = "a", priority: int = 100, stage="propose") -> PluginSpec:
    return PluginSpec(id=id, stage=stage, priority=priority)


def override(*targets, final=False, flips=()) -> Override:
    """Return targets, each (kind, replicas) of pool ``main`` or (kind, replicas, pool)."""
    made = tuple(
        PoolTarget(kind=kind, replicas=count, pool=pool[0] if pool else "main") for kind, count, *pool in targets
    )
    return Override(targets=made, final=final, flips=flips)


def reject(code: str) -> Reject:
    return Reject(reasons=(Reason(code=code, text=code),))


def codes(becauses) -> list[str]:
    return [because.code for because in becauses]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([], 5),
        ([(100, ("set", 8))], 8),
        ([(100, ("set", 8)), (50, ("set", 10))], 10),
        ([(100, ("set", 4)), (100, ("at_least", 6))], 6),
        ([(100, ("set", 12)), (100, ("at_most", 8))], 8),
    ],
)
def test_golden_cases_from_a_baseline_of_five(answers, expected):
    given_ = [(spec(f"p{place}", priority), override(target)) for place, (priority, target) in enumerate(answers)]
    assert merge({"main": 5}, given_).targets == {"main": expected}


def test_a_floor_above_a_ceiling_wins_and_that_is_noted():
    found = merge({"main": 5}, [(spec("a"), override(("at_most", 3))), (spec("b"), override(("at_least", 7)))])
    assert found.targets == {"main": 7} and codes(found.notes) == ["floor_over_ceiling"]


def test_floors_and_ceilings_bound_the_baseline_too_and_the_tightest_counts():
    answers = [(spec("a"), override(("at_least", 6))), (spec("b"), override(("at_least", 8)))]
    assert merge({"main": 5}, answers).targets == {"main": 8}
    answers = [(spec("a"), override(("at_most", 4))), (spec("b"), override(("at_most", 2)))]
    assert merge({"main": 5}, answers).targets == {"main": 2}


def test_a_veto_beats_even_the_last_word_and_every_reason_is_kept_strongest_first():
    answers = [
        (spec("late", 90), reject("late")),
        (spec("final", 1), override(("set", 9), final=True)),
        (spec("early", 10), reject("early")),
    ]
    found = merge({"main": 5}, answers)
    assert found.targets == {"main": 5} and codes(found.vetoed) == ["early", "late"]


def test_the_strongest_last_word_counts_and_pools_that_it_does_not_name_keep_theirs():
    answers = [
        (spec("weak", 20), override(("set", 2), final=True)),
        (spec("strong", 10), override(("set", 9), final=True)),
        (spec("stronger but not final", 1), override(("set", 7), ("set", 7, "other"))),
    ]
    found = merge({"main": 5, "other": 3}, answers)
    assert found.targets == {"main": 9, "other": 3}
    assert "strong has the last word before" in found.notes[0].text


def test_whoever_lost_is_noted_with_what_it_wanted():
    found = merge({"main": 5}, [(spec("a", 1), override(("set", 8))), (spec("b", 2), override(("set", 6)))])
    assert codes(found.notes) == ["weaker"] and "b wanted 6 of main" in found.notes[0].text


def test_who_constrains_can_only_bound():
    answers = [
        (spec("set", 1), override(("set", 9), final=True)),
        (spec("most", 2), override(("at_most", 4), flips=(Flip(model="m", frm="prefill", to="decode"),))),
    ]
    found = merge({"main": 5}, answers, constrain=True)
    assert found.targets == {"main": 4} and found.flips == ()
    assert merge({"main": 5}, [(spec(), reject("no"))], constrain=True).vetoed


def test_the_strongest_flips_count():
    one, two = Flip(model="m", frm="prefill", to="decode"), Flip(model="m", frm="decode", to="prefill")
    answers = [(spec("b", 20), override(flips=(two,))), (spec("a", 10), override(flips=(one,)))]
    assert merge({}, answers).flips == (one,)


def test_of_predictions_the_strongest_to_say_something_counts_field_by_field():
    answers = [
        (
            spec("weak", 20, "predict"),
            Predicted(models={"m": Prediction(seconds=60, requests=9.0, shape=RequestShape(1000.0, None))}),
        ),
        (spec("strong", 10, "predict"), Predicted(models={"m": Prediction(seconds=60, requests=5.0)})),
        (spec("other", 30, "predict"), Predicted(models={"n": Prediction(seconds=60, shape=RequestShape(None, 7.0))})),
    ]
    found = merge_predictions(answers)
    assert (found["m"].requests, found["m"].shape.isl, found["m"].shape.osl) == (5.0, 1000.0, None)
    assert found["n"].shape.osl == 7.0


def test_a_final_prediction_ends_the_row():
    answers = [
        (
            spec("weak", 20, "predict"),
            Predicted(models={"m": Prediction(seconds=60, shape=RequestShape(1000.0, None))}),
        ),
        (spec("strong", 10, "predict"), Predicted(models={"m": Prediction(seconds=60, requests=5.0)}, final=True)),
    ]
    assert merge_predictions(answers)["m"].shape.isl is None


# --- a plain re-statement ---------------------------------------------------------------------------------------------

POOLS = ("a", "b")
_targets = st.lists(
    st.builds(
        PoolTarget,
        pool=st.sampled_from(POOLS),
        replicas=st.integers(0, 20),
        kind=st.sampled_from(("set", "at_least", "at_most")),
    ),
    max_size=4,
    unique_by=lambda target: (target.pool, target.kind),
)
_results = st.one_of(
    st.builds(Override, targets=_targets.map(tuple), final=st.integers(0, 9).map(lambda number: number == 0)),
    st.just(Accept()),
    st.integers(0, 19).map(lambda number: reject("no") if number == 0 else Accept()),
)
_answers = st.lists(st.tuples(st.integers(0, 3), _results), max_size=6).map(
    lambda found: [(spec(f"p{place}", priority), result) for place, (priority, result) in enumerate(found)]
)
_baselines = st.fixed_dictionaries(dict.fromkeys(POOLS, st.integers(0, 20)))


def plainly(baseline, answers, constrain):
    """Return what a stage comes to, said as the rule is said: pool by pool, nothing shared."""
    if any(isinstance(result, Reject) for _, result in answers):
        return dict(baseline)
    by_strength = [result for _, result in sorted(answers, key=lambda each: each[0].priority)]
    speaking = [result for result in by_strength if isinstance(result, Override)]
    last_words = [result for result in speaking if result.final]
    if last_words and not constrain:
        return {**baseline, **{target.pool: target.replicas for target in last_words[0].targets}}
    found = {}
    for pool, before in baseline.items():
        mine = [target for result in speaking for target in result.targets if target.pool == pool]
        sets = [target.replicas for target in mine if target.kind == "set" and not constrain]
        middle = sets[0] if sets else before
        floor = max([target.replicas for target in mine if target.kind == "at_least"], default=0)
        ceiling = min([target.replicas for target in mine if target.kind == "at_most"], default=10**9)
        found[pool] = max(floor, min(ceiling, middle))
    return found


@given(_baselines, _answers, st.booleans())
def test_it_comes_to_what_the_rule_says(baseline, answers, constrain):
    assert merge(baseline, answers, constrain=constrain).targets == plainly(baseline, answers, constrain)


@given(_baselines, _answers, st.randoms())
def test_the_order_of_answers_of_different_strength_does_not_matter(baseline, answers, rng):
    answers = [(spec(each.id, place), result) for place, (each, result) in enumerate(answers)]
    mixed = list(answers)
    rng.shuffle(mixed)
    assert merge(baseline, mixed) == merge(baseline, answers)
