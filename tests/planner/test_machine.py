"""The machine by situations: what is seen and answered, what it then wants, and what it says aloud."""

import pytest

from penstock.kernel.machine import Woken
from penstock.planner import events as planning
from penstock.planner.plugins.proposals import Accept, Flip, Override, PoolTarget, Predicted, Prediction, Reason, Reject
from penstock.planner.settings import BudgetSettings, PoolLimits
from tests.planner.driven import BASE, Driven, Says, alarms, asks, outside, record, records, scales, wants

PAIR = {"p": {"role": "prefill", "ready": 2}, "d": {"role": "decode", "ready": 2}}


def codes(becauses) -> list[str]:
    return [because.code for because in becauses]


def answered(tick: int, plugin: str, result=None, **more) -> planning.PluginAnswered:
    return planning.PluginAnswered(id=tick, plugin=plugin, result=result, **more)


# --- a tick's course ------------------------------------------------------------------------------------------------


def test_a_tick_looks_asks_stage_by_stage_and_says_what_should_be():
    order: list[str] = []

    def noted(name, answer):
        def evaluate(context):
            order.append(name)
            return answer(context) if callable(answer) else answer

        return evaluate

    predict = Predicted(models={"m": Prediction(seconds=60.0, requests=7.0)})
    world = Driven(
        Says("c", noted("constrain", Accept()), stage="constrain"),
        Says("r", noted("reconcile", lambda c: wants(main=c.baseline["main"] + 1)), stage="reconcile"),
        Says(
            "s", noted("propose", lambda c: wants(main=round(c.predictions["m"].requests))), requires=("predictions",)
        ),
        Says("f", noted("predict", predict), stage="predict"),
    )
    (look,) = world.begin(0.0)
    assert look == planning.Observe(id=1) and world.wake == 30.0, "a look that never comes ends the tick"
    effects = world.looked()
    assert order == ["predict", "propose", "reconcile", "constrain"]
    scale, ticked = effects
    assert scale.targets == {"main": 8} and codes(scale.reasons) == ["wants", "wants"]
    assert ticked.record.outcome == "apply" and ticked.record.pools["main"].target == 8
    assert [said.id for said in ticked.record.plugin_results] == ["f", "s", "r", "c"]
    assert ticked.record.models["m"].predicted["requests"] == 7.0
    assert world.wake == BASE


def test_it_is_said_again_for_as_long_as_the_connector_wants_something_else_and_then_no_more():
    world = Driven(Says("s", wants(main=5)))
    world.obeys = False
    assert scales(world.ticks(3)) == [{"main": 5}] * 3
    world.obeys = True
    assert scales(world.tick()) == [{"main": 5}]
    effects = world.tick()
    assert not scales(effects) and record(effects).outcome == "keep"


def test_only_pools_that_differ_are_named():
    world = Driven(Says("s", wants(p=2, d=5)), pools=PAIR)
    assert scales(world.tick()) == [{"d": 5}]


def test_one_that_only_advises_says_the_target_and_touches_nothing():
    world = Driven(Says("s", wants(main=5)), advisory=True)
    effects = world.tick()
    assert not scales(effects)
    assert record(effects).outcome == "advise" and record(effects).targets == {"main": 5}


def test_a_veto_ends_the_tick_with_its_reason_and_weaker_stages_are_not_asked():
    last = Says("c", wants(main=1), stage="constrain")
    veto = Reject(reasons=(Reason(code="freeze", text="a release is under way"),))
    world = Driven(Says("s", wants(main=5)), Says("r", veto, stage="reconcile"), last)
    effects = world.tick()
    assert not scales(effects) and not last.asked
    told = record(effects)
    assert told.outcome == "veto" and codes(told.chosen) == ["freeze"] and told.targets == {"main": 2}


def test_flips_are_said_even_where_no_number_changes():
    flip = Flip(model="m", frm="prefill", to="decode")
    world = Driven(Says("s", Override(targets=(), flips=(flip,))), pools=PAIR)
    (scale, ticked) = world.tick()
    assert scale.targets == {} and scale.flips == (flip,) and ticked.record.flips == (flip,)


def test_without_a_prediction_whoever_requires_one_is_passed_over_and_the_record_says_so():
    needs = Says("s", wants(main=5), requires=("predictions",))
    effects = Driven(needs).tick()
    assert not needs.asked and not scales(effects)
    (said,) = record(effects).plugin_results
    assert said.result == "unsatisfied" and "predictions" in said.reasons[0].text


@pytest.mark.parametrize(("mode", "expected"), [("prefill", {"p": 5}), ("decode", {"d": 6})])
def test_a_mode_leaves_the_other_role_alone(mode, expected):
    assert scales(Driven(Says("s", wants(p=5, d=6)), pools=PAIR, mode=mode).tick()) == [expected]


# --- time ------------------------------------------------------------------------------------------------------------


def test_ticks_stay_on_the_grid_when_one_is_late():
    world = Driven(Says("s", Accept()))
    world.tick(3.0)
    assert world.wake == 8.0
    late = world.tick(10.5)
    assert world.wake == 13.0 and record(late).late == pytest.approx(2.5)
    world.begin(13.0)
    world.looked(at=31.0)  # the look took longer than three ticks
    assert world.wake == 33.0
    assert record(world.tick()).late == 0.0


def test_whoever_wakes_it_too_early_gets_no_tick():
    world = Driven(Says("s", Accept()))
    world.tick(0.0)
    assert world.begin(2.0) == [] and world.wake == BASE


def test_a_late_tick_does_not_cost_the_next_one_its_plugins():
    every = Says("s", Accept(), interval=BASE)
    world = Driven(every)
    world.tick(0.0)
    for at in (5.004, 10.001, 15.003, 20.0):  # timers fire a little late, each by a little else
        world.tick(at)
    assert every.asked == [5.004, 10.001, 15.003, 20.0]


def test_an_outside_plugin_that_takes_its_time_is_asked_on_every_turn_all_the_same():
    world = Driven()
    world.post(outside("o", interval=BASE), at=0.0)
    asked = []
    for _ in range(5):
        asked += [(ask.id, world.at) for ask in asks(world.tick())]
        if asked and asked[-1][0] == world.planner.memory.number:
            world.post(answered(asked[-1][0], "o", Accept()), at=world.at + 0.4)
    assert [at for _, at in asked] == [5.0, 10.0, 15.0, 20.0]


def test_the_first_call_comes_one_interval_after_registration_floored_to_the_base():
    slow = Says("slow", wants(main=3), interval=20.0)
    world = Driven(slow)
    world.post(outside("o", interval=10.0), at=0.0)
    world.ticks(3)  # at 0, 5 and 10
    world.post(outside("late", interval=10.0), at=12.0)  # counts from second 10
    found = {ask.plugin: world.at for effects in (world.tick(), world.tick()) for ask in asks(effects)}
    assert slow.asked == [20.0] and found["late"] == 20.0


def test_between_two_calls_hold_last_goes_on_counting_and_accept_when_idle_does_not():
    held = Says("held", wants(main=5), interval=10.0, hold="hold_last", priority=5)
    idle = Says("idle", wants(main=7), interval=10.0)
    world = Driven(held, idle)
    world.obeys = False
    told = [
        (scales(effects), [said.result for said in record(effects).plugin_results])
        for effects in (world.tick() for _ in range(4))
    ]
    assert told[0] == ([], [])  # neither is due yet
    assert told[1] == ([], [])
    assert told[2] == ([{"main": 5}], ["override", "override"])
    assert told[3] == ([{"main": 5}], ["held"])


def test_what_is_held_never_has_the_last_word_again():
    world = Driven(
        Says("held", wants(main=5, final=True), interval=10.0, hold="hold_last", priority=90),
        Says("each", wants(main=3), priority=10),
    )
    world.obeys = False
    said = [scales(world.tick()) for _ in range(4)]
    assert said == [[{"main": 3}], [{"main": 3}], [{"main": 5}], [{"main": 3}]]


# --- time-outs ------------------------------------------------------------------------------------------------------


def test_a_look_that_does_not_come_ends_the_tick_without_effect_and_its_late_answer_is_dropped(monkeypatch):
    monkeypatch.setattr("penstock.planner.planner.TICK_TIMEOUT", 12.0)
    world = Driven(Says("s", wants(main=5)))
    world.begin(0.0)
    assert world.begin(5.0) == [] and world.wake == 12.0
    effects = world.begin(12.0)
    assert alarms(effects) == ["tick_timeout"] and record(effects).outcome == "timeout"
    assert world.wake == 15.0
    assert world.looked(id=1) == [] and world.planner.memory.dropped == 1
    assert scales(world.tick()) == [{"main": 5}]


def test_where_nothing_can_be_seen_all_stays_as_it_is():
    world = Driven(Says("s", wants(main=5)))
    world.begin(0.0)
    effects = world.post(planning.ObserveFailed(id=1, why="connection refused"))
    assert alarms(effects) == ["blind"] and record(effects).outcome == "blind"
    assert "connection refused" in record(effects).chosen[0].text
    assert scales(world.tick()) == [{"main": 5}]


def test_an_outside_plugin_is_given_what_it_needs_and_its_answer_counts():
    world = Driven()
    world.post(outside("o", needs=("traffic",), window=10.0), at=0.0)
    world.tick(0.0)
    world.post(answered(1, "o", Accept()))
    (ask,) = asks(world.tick())
    assert ask.stage == "propose" and ask.deadline == 5.0 and ask.proposal == {"main": 2}
    assert ask.observation is not None
    assert ask.observation.models["m"].traffic.seconds == 10.0, "two looks of five seconds each"
    assert world.wake == 10.0, "five seconds to answer"
    effects = world.post(answered(2, "o", wants(main=4), seconds=0.2), at=5.3)
    assert scales(effects) == [{"main": 4}] and record(effects).plugin_results[0].result == "override"
    assert world.planner.registry.seats["o"].seconds == 0.2


def test_engines_are_sent_only_to_those_that_need_them_and_nothing_to_those_that_need_nothing():
    from tests.planner.policies.looks import engine

    world = Driven(pools={"main": {"ready": 1, "engines": (engine("aggregated", 0),)}})
    for id, needs in (("blind", ()), ("pools", ("pools",)), ("engines", ("engines",))):
        world.post(outside(id, needs=needs), at=0.0)
    found = {ask.plugin: ask.observation for ask in asks(world.tick())}
    assert found["blind"] is None
    assert found["pools"].models["m"].pools["main"].engines == () and found["pools"].models["m"].traffic is None
    assert len(found["engines"].models["m"].pools["main"].engines) == 1


def test_one_that_does_not_answer_in_time_has_no_say_and_its_late_answer_is_dropped_and_counted():
    world = Driven(Says("s", wants(main=3), stage="reconcile"))
    world.post(outside("o"), at=0.0)
    world.tick(0.0)
    assert world.begin(4.0) == [] and world.wake == 5.0
    effects = world.begin(5.0)
    assert alarms(effects) == ["plugin_timeout"] and scales(effects) == [{"main": 3}]
    assert [said.result for said in record(effects).plugin_results] == ["timeout", "override"]
    assert world.post(answered(1, "o", wants(main=9))) == []
    assert world.planner.memory.dropped == 1 and world.planner.registry.seats["o"].evaluations == {"timeout": 1}


def test_a_slow_stage_leaves_the_next_one_its_whole_time_to_answer():
    world = Driven()
    world.post(outside("first"), at=0.0)
    world.post(outside("second", stage="reconcile"), at=0.0)
    world.tick(0.0)
    (ask,) = asks(world.post(answered(1, "first", wants(main=4)), at=4.5))
    assert ask.plugin == "second" and ask.proposal == {"main": 4} and world.wake == 9.5
    assert world.begin(6.0) == []
    assert scales(world.post(answered(1, "second", wants(main=6)), at=7.0)) == [{"main": 6}]


@pytest.mark.parametrize(
    "event", [answered(7, "o", Accept()), answered(1, "nobody", Accept()), planning.PluginAlive(plugin="x")]
)
def test_what_nobody_waits_for_is_dropped_and_counted(event):
    world = Driven()
    world.post(outside("o"), at=0.0)
    world.tick(0.0)
    assert world.post(event) == [] and world.planner.memory.dropped == 1


def test_an_error_and_an_empty_answer_are_failures():
    world = Driven()
    for id in ("broken", "empty"):
        world.post(outside(id), at=0.0)
    world.tick(0.0)
    first = world.post(answered(1, "broken", error="it crashed"))
    assert alarms(first) == ["plugin_error"] and not records(first), "the other one is still waited for"
    last = world.post(answered(1, "empty"))
    assert alarms(last) == ["plugin_error"] and [said.result for said in record(last).plugin_results] == [
        "error",
        "error",
    ]


# --- those that fail --------------------------------------------------------------------------------------------------


def broken(context):
    raise RuntimeError("no such column")


def test_a_plugins_exception_ends_nothing_and_says_which():
    world = Driven(Says("bad", broken), Says("good", wants(main=4)), strict=False)
    effects = world.tick()
    assert scales(effects) == [{"main": 4}] and alarms(effects) == ["plugin_error"]
    (alarm,) = (effect for effect in effects if isinstance(effect, planning.Alarm))
    assert "bad" in alarm.reason.text and "no such column" in alarm.reason.text
    assert [said.result for said in record(effects).plugin_results] == ["error", "override"]


def test_tests_and_simulations_see_the_exception_itself():
    with pytest.raises(RuntimeError, match="no such column"):
        Driven(Says("bad", broken), strict=True).tick()


def test_five_failures_open_the_circuit_for_thirty_seconds_then_one_try_decides():
    bad = Says("bad", broken)
    world = Driven(bad, strict=False)
    world.ticks(12)  # at 0, 5 ... 55
    # The fifth failure is at 20 s: it is left alone until 50 s, fails its one try, and is left alone again.
    assert bad.asked == [0.0, 5.0, 10.0, 15.0, 20.0, 50.0]
    bad.answer = wants(main=4)
    effects = world.ticks(6)  # 60 ... 85
    assert bad.asked[6:] == [80.0, 85.0] and scales(effects) == [{"main": 4}]
    assert world.planner.registry.seats["bad"].circuit(85.0) == "closed"


def test_a_success_in_between_starts_the_count_again():
    turn = iter([broken] * 4 + [lambda c: Accept()] + [broken] * 4)
    world = Driven(Says("shaky", lambda context: next(turn)(context)), strict=False)
    world.ticks(9)
    assert world.planner.registry.seats["shaky"].circuit(40.0) == "closed"


def test_an_open_circuit_ends_what_was_held():
    answers = iter([wants(main=5)])
    shaky = Says("s", lambda context: next(answers), interval=BASE, hold="hold_last")
    world = Driven(shaky, strict=False)
    world.obeys = False
    shown = [record(world.tick()) for _ in range(9)]
    results = [[said.result for said in each.plugin_results] for each in shown]
    assert results[1] == ["override"] and results[2:7] == [["error"]] * 5 and results[7:] == [[], []]


# --- plugins outside come and go ---------------------------------------------------------------------------------


def test_one_that_gives_no_sign_of_life_is_put_out_and_one_that_does_stays():
    world = Driven()
    world.post(outside("silent", interval=100.0), at=0.0)
    world.post(outside("alive", interval=100.0), at=0.0)
    said = []
    for number in range(9):
        world.post(planning.PluginAlive(plugin="alive"), at=5.0 * number)
        said += alarms(world.tick(5.0 * number))
    assert said == ["plugin_silent"] and set(world.planner.registry.seats) == {"alive"}


def test_an_answer_is_a_sign_of_life():
    world = Driven()
    world.post(outside("o"), at=0.0)
    for _ in range(12):
        (ask,) = asks(world.tick())
        world.post(answered(ask.id, "o", Accept()))
    assert "o" in world.planner.registry.seats


def test_one_that_leaves_while_it_is_waited_for_does_not_keep_the_tick():
    world = Driven(Says("s", wants(main=3), stage="reconcile"))
    world.post(outside("o"), at=0.0)
    world.tick(0.0)
    effects = world.post(planning.PluginLeft(plugin="o"))
    assert alarms(effects) == ["plugin_gone"] and scales(effects) == [{"main": 3}]
    assert world.post(planning.PluginLeft(plugin="o")) == []


def test_an_id_that_is_taken_is_refused_and_so_is_a_window_shorter_than_a_tick():
    world = Driven(Says("s", Accept()))
    assert "duplicate_id" in (world.planner.refuses(outside("s").spec) or "")
    assert "bad_window" in (world.planner.refuses(outside("new", window=2.0).spec) or "")
    assert world.planner.refuses(outside("new", window=BASE).spec) is None


def test_nobody_outside_takes_the_place_of_a_step_of_ours():
    own = Says("s", wants(main=4))
    world = Driven(own)
    assert alarms(world.post(outside("s"), at=0.0)) == ["duplicate_id"]
    assert scales(world.tick()) == [{"main": 4}] and own.asked


def test_two_steps_of_ours_with_one_id_are_a_mistake_at_once():
    with pytest.raises(ValueError, match="two plugins have the id s"):
        Driven(Says("s", Accept()), Says("s", Accept()))


# --- limits, sources, people, connectors --------------------------------------------------------------------------


def test_the_ceiling_binds_whatever_is_proposed_and_the_reason_is_kept():
    world = Driven(Says("s", wants(main=50)), budget=BudgetSettings(max_gpus=6))
    effects = world.tick()
    assert scales(effects) == [{"main": 6}]
    assert codes(record(effects).bound) == ["gpu_ceiling_hold"] and record(effects).pools["main"].proposed == 50


def reason(text: str, *pools: str) -> Reason:
    return Reason(code="test", text=text, pools=pools)


def test_each_pool_that_changes_has_the_reason_of_its_own():
    targets = (PoolTarget(pool="p", replicas=1), PoolTarget(pool="d", replicas=3))
    said = (reason("p is down to its last replica", "p"), reason("d 1 -> 3: an engine is full", "d"))
    driven = Driven(
        Says("loads", Override(targets=targets, reasons=said)),
        pools={"p": {"role": "prefill", "ready": 1}, "d": {"role": "decode", "ready": 1}},
    )
    found = record(driven.tick())
    assert {name: pool.why for name, pool in found.pools.items()} == {"p": "", "d": "d 1 -> 3: an engine is full"}
    assert found.why == "d 1 -> 3, because an engine is full"


def test_a_reason_is_of_the_plugin_that_had_the_last_word_and_of_the_limit_that_overruled_it():
    driven = Driven(
        Says(
            "weak", Override(targets=(PoolTarget(pool="a", replicas=9),), reasons=(reason("nine", "a"),)), priority=50
        ),
        Says(
            "strong",
            Override(targets=(PoolTarget(pool="a", replicas=4),), reasons=(reason("all do well"),)),
            priority=1,
        ),
        Says(
            "floor",
            Override(targets=(PoolTarget(pool="b", replicas=6, kind="at_least"),), reasons=(reason("a floor"),)),
        ),
        pools={"a": {"ready": 2}, "b": {"ready": 2}},
        budget=BudgetSettings(max_gpus=9, pools={"a": PoolLimits(priority=1)}),
    )
    found = record(driven.tick())
    assert found.targets == {"a": 4, "b": 5}
    assert found.pools["a"].why == "all do well"
    assert found.pools["b"].why.startswith("b 5 instead of 6: 10 GPUs were wanted")
    assert found.why.count(" -> ") == 2 and "a 2 -> 4, because all do well" in found.why


def test_limits_that_an_operator_changes_hold_from_the_next_tick_on():
    world = Driven(Says("s", wants(main=50)), budget=BudgetSettings(max_gpus=6))
    world.tick()
    assert world.post(planning.LimitsChanged(budget={"max_gpus": 4, "min_replicas": 2})) == []
    assert scales(world.tick()) == [{"main": 4}]
    assert world.planner.memory.budget == BudgetSettings(max_gpus=4, min_replicas=2)


def test_an_unreadable_source_allows_more_but_never_fewer():
    wanted = {"count": 1}
    world = Driven(Says("s", lambda context: wants(main=wanted["count"])))
    world.pools["main"] = {"ready": 3}
    world.traffic = None
    effects = world.tick()
    assert not scales(effects) and record(effects).outcome == "hold"
    assert codes(record(effects).bound) == ["source_stale"]
    wanted["count"] = 5
    assert scales(world.tick()) == [{"main": 5}]
    wanted["count"] = 1
    assert not scales(world.tick())
    world.traffic = Driven().traffic
    assert scales(world.tick()) == [{"main": 1}]


def test_a_source_that_says_it_is_stale_takes_nothing_away():
    world = Driven(Says("s", wants(main=1)))
    world.model = {"health": "stale"}
    assert not scales(world.tick())


def test_a_broken_source_is_said_aloud_once_and_again_only_after_it_was_well(monkeypatch):
    monkeypatch.setattr("penstock.planner.overrides.BROKEN_AFTER", 20.0)
    world = Driven(Says("s", Accept()))
    world.tick()
    world.traffic, world.model = None, {"why": "401 Unauthorized"}
    effects = world.ticks(10)
    assert alarms(effects) == ["source_broken"]
    (alarm,) = (effect for effect in effects if isinstance(effect, planning.Alarm))
    assert "401 Unauthorized" in alarm.reason.text and "m" in alarm.reason.text
    assert records(effects)[0].models["m"].health == "stale" and records(effects)[-1].models["m"].health == "broken"
    assert records(effects)[-1].models["m"].rate is None, "not known is not 0"
    assert all(each.models["m"].why == "401 Unauthorized" for each in records(effects))
    assert all("can't be read: 401 Unauthorized" in each.why for each in records(effects)), "every record says why"
    world.traffic = Driven().traffic
    assert alarms(world.tick()) == []
    world.traffic = None
    assert alarms(world.ticks(10)) == ["source_broken"]


def test_what_somebody_else_has_set_is_noticed_once_respected_and_then_released():
    world = Driven(Says("s", wants(main=4)), manual_hold=30.0)
    world.ticks(2)
    world.pools["main"] = {"ready": 7}
    effects = world.tick()  # at 10 s
    assert alarms(effects) == ["manual"] and not scales(effects)
    assert codes(record(effects).bound) == ["manual"] and record(effects).pools["main"].proposed == 4
    held = world.ticks(5)  # 15 ... 35
    assert not scales(held) and not alarms(held)
    assert scales(world.tick()) == [{"main": 4}]


def test_people_may_go_on_changing_their_mind():
    world = Driven(Says("s", wants(main=4)), manual_hold=30.0)
    world.ticks(2)
    said = []
    for count in (7, 8, 4):
        world.pools["main"] = {"ready": count}
        said.append(alarms(world.tick()))
    assert said[:2] == [["manual"], ["manual"]]


def test_what_it_ordered_itself_is_nobody_elses_even_where_it_comes_late():
    world = Driven(Says("s", wants(main=4)))
    world.obeys = False
    effects = world.ticks(3)
    world.pools["main"] = {"ready": 2, "desired": 4, "starting": (1.0, 1.0)}
    effects += world.ticks(2)
    assert not alarms(effects)


def test_a_ceiling_goes_before_what_somebody_else_has_set():
    world = Driven(Says("s", Accept()), budget=BudgetSettings(max_gpus=5))
    world.ticks(2)
    world.pools["main"] = {"ready": 9}
    assert scales(world.tick()) == [{"main": 5}]


def test_a_connector_that_cannot_is_said_aloud_once_per_reason():
    world = Driven(Says("s", wants(main=4)))
    world.obeys = False
    said = []
    for why in ("no machine is free", "no machine is free", "the quota is used up", None, "no machine is free"):
        effects = world.tick()
        told = {} if why is None else {"main": why}
        number = record(effects).tick
        said.append(alarms(world.post(planning.Scaled(id=number, problems=told))))
    assert said == [["not_scaled"], [], ["not_scaled"], [], ["not_scaled"]]


def test_replicas_that_never_start_count_no_more_and_the_record_says_how_many():
    world = Driven(Says("s", Accept()))
    world.pools["main"] = {"desired": 5, "ready": 2, "starting": (900.0, 4.0), "failed": 1, "problem": "no image"}
    effects = world.tick()
    found = record(effects).pools["main"]
    assert found.given_up == 2 and found.starting == 2
    (alarm,) = (effect for effect in effects if isinstance(effect, planning.Alarm))
    assert alarm.reason.code == "not_started" and "2 of 5 replicas of main" in alarm.reason.text
    assert "no image" in alarm.reason.text
    assert alarms(world.ticks(3)) == [], "it is said once"
    world.pools["main"] |= {"starting": (950.0, 700.0)}
    assert alarms(world.tick()) == ["not_started"], "one more"


def test_start_up_times_that_are_seen_tell_when_the_next_ones_come():
    world = Driven(Says("s", lambda context: seen.update(context.coming) or Accept()))
    seen: dict = {}
    world.pools["main"] = {"desired": 4, "ready": 3, "starting": (10.0,), "start_up_times": (40.0,)}
    world.tick()
    assert seen["main"].due == (30.0,)


def test_what_is_paid_for_counts_those_that_start_and_those_that_leave():
    world = Driven(Says("s", Accept()))
    world.pools["main"] = {"desired": 5, "ready": 2, "starting": (1.0, 2.0), "draining": 1, "gpus": 4}
    assert record(world.tick()).gpus == 20


def test_a_woken_that_comes_twice_begins_one_tick():
    world = Driven(Says("s", Accept()))
    world.begin(0.0)
    assert world.post(Woken()) == []
    world.looked()
    assert world.planner.memory.number == 1
