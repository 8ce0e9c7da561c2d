"""Which knobs a running cluster may change: only what is marked, only what fits, all or nothing."""

import msgspec
import pytest

from penstock.config.derived.knobs import derive
from penstock.config.live_knobs import changed, differences, live_knobs, live_values, with_values
from penstock.config.reading.problems import ConfigProblems
from penstock.config.settings.cluster_settings import ClusterSettings, NameSettings

DEFAULT = ClusterSettings()


def problems(*overrides: str, started: ClusterSettings = DEFAULT) -> list[str]:
    with pytest.raises(ConfigProblems) as raised:
        changed(DEFAULT, overrides, started)
    return [str(problem) for problem in raised.value.problems]


def test_what_changes_is_told_with_old_and_new():
    found = changed(DEFAULT, ["router.cost.overlap_credit=2", "router.queue.wait_max=500ms", "slo.ttft=3"], DEFAULT)
    assert [tuple(change) for change in found] == [
        ("router.cost.overlap_credit", 1.0, 2.0),
        ("router.queue.wait_max", 60.0, 0.5),
        ("slo.ttft", None, 3.0),
    ]
    assert changed(DEFAULT, ["router.cost.overlap_credit=1"], DEFAULT) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["router.mode=random"], "router.mode: can't be changed while the cluster runs"),
        (["router.mode=kv"], "router.mode: can't be changed"),
        (["frontend.port=9"], "start the cluster again"),
        (["models.sim.pools.main.replicas=7"], "'penstock scale POOL=N'"),
        (["models.sim.pools.main.sim.block_size=32"], "can't be changed while the cluster runs"),
        (["router={mode: random}"], "can't be changed while the cluster runs"),
        (["models.other={pools: {main: {}}}"], "can't be changed while the cluster runs"),
        (["router.cost.overlap_credt=2"], "did you mean router.cost.overlap_credit?"),
        (["router.cost.overlap_credit=-1"], "is out of range: 0 or more"),
        (["router.cost.overlap_credit=much"], "router.cost.overlap_credit"),
        (["router.queue.wait_max=0"], "is out of range: above 0"),
        (["router.mode"], "is not name=value"),
        (["nosuch=1"], "nosuch: is not a setting ('penstock set' lists what can be changed)"),
    ],
)
def test_what_can_not_be_is_refused_with_the_way_out(overrides, said):
    assert any(said in problem for problem in problems(*overrides)), problems(*overrides)
    name = overrides[0].partition("=")[0]
    assert all(problem.count(f"{name}: ") <= 1 for problem in problems(*overrides)), problems(*overrides)


def test_what_is_set_is_no_flag():
    assert not any("flag" in problem for problem in problems("nosuch=1", "router.queue.wait_max=0", "frontend.port=1"))


def test_one_wrong_value_among_several_changes_nothing():
    assert len(problems("router.attempts_max=2", "router.queue.length_max=-1", "frontend.port=1")) == 2


def test_a_weight_on_cached_blocks_needs_the_index_from_the_start():
    router = msgspec.structs.replace(
        DEFAULT.router, cost=msgspec.structs.replace(DEFAULT.router.cost, overlap_credit=0.0, host_credit=0.0)
    )
    started = msgspec.structs.replace(DEFAULT, router=router)
    assert any("needs the index" in problem for problem in problems("router.cost.overlap_credit=2", started=started))
    assert changed(DEFAULT, ["router.cost.overlap_credit=0", "router.cost.host_credit=0"], DEFAULT)


def test_values_are_put_in_as_they_were_told():
    found = changed(DEFAULT, ["router.queue.policy=edf", "frontend.limits.prompt_max=8k", "logs.level=debug"], DEFAULT)
    made = with_values(DEFAULT, {change.key: change.new for change in found})
    assert (made.router.queue.policy, made.frontend.limits.prompt_max, made.logs.level) == ("edf", 8000, "debug")
    assert differences(DEFAULT, made) == found
    assert with_values(DEFAULT, {"router.mode": "random", "nothing": 1}) == DEFAULT, "only live knobs are taken"
    with pytest.raises(msgspec.ValidationError):
        with_values(DEFAULT, {"router.attempts_max": "three"})


def test_every_live_knob_can_be_set_to_what_it_is_and_shown():
    values = live_values(DEFAULT)
    assert with_values(DEFAULT, values) == DEFAULT
    assert values.keys() == live_knobs(DEFAULT).keys() and len(values) > 40
    assert not any(knob.knob.secret or "*" in knob.path for knob in live_knobs(DEFAULT).values())


def test_weights_of_names_are_live_and_names_are_not():
    shared = msgspec.structs.replace(
        DEFAULT, names={"chat-4.1": NameSettings(models={"sim": 1.0}), "sim": NameSettings()}
    )
    key = 'names."chat-4.1".models'
    assert live_values(shared)[key] == {"sim": 1.0} and "names.sim.shadow" in live_values(shared)
    found = changed(shared, ["names.chat-4.1.models={sim: 3}"], shared)
    assert [tuple(change) for change in found] == [(key, {"sim": 1.0}, {"sim": 3.0})]
    made = with_values(shared, {change.key: change.new for change in found})
    assert made.names["chat-4.1"].models == {"sim": 3.0} and differences(shared, made) == found
    with pytest.raises(ConfigProblems, match="no weight above 0"):
        changed(shared, ["names.chat-4.1.models={sim: 0}"], shared)
    with pytest.raises(ConfigProblems, match="can't be changed while"):
        changed(shared, ["names.other={models: {sim: 1}}"], shared)


def test_secrets_are_told_without_their_values():
    security = msgspec.structs.replace(DEFAULT.frontend.security, api_keys=("hush",))
    other = msgspec.structs.replace(DEFAULT, frontend=msgspec.structs.replace(DEFAULT.frontend, security=security))
    assert [tuple(change) for change in differences(DEFAULT, other)] == [("frontend.security.api_keys", None, None)]


def test_the_page_says_which_are_live():
    from penstock.config.derived.docs import configuration_page

    assert configuration_page().count("*Live.*") == sum(knob.knob.live for knob in derive(ClusterSettings))
