"""Environment names and flags: where each leads, and what is said of one that leads nowhere."""

import pytest

from penstock.config.reading.load import load
from penstock.config.reading.problems import ConfigProblems


def problem(overrides=(), env=None, path=None):
    with pytest.raises(ConfigProblems) as caught:
        load(path, overrides, env or {})
    (found,) = caught.value.problems
    return str(found)


def test_environment_names_lead_through_mappings():
    settings = load(None, (), {"PENSTOCK_MODELS__SIM__POOLS__MAIN__REPLICAS": "8"}).settings
    assert settings.models["sim"].pools["main"].replicas == 8
    assert settings.models["sim"].tokenizer == "builtin:sim"


def test_names_with_other_characters_are_written_with_underscores(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("models: {org/Model-1.5: {pools: {main: {}}}}\n")
    env = {"PENSTOCK_MODELS__ORG_MODEL_1_5__POOLS__MAIN__REPLICAS": "2"}
    assert load(path, (), env).settings.models["org/Model-1.5"].pools["main"].replicas == 2


def test_reserved_and_foreign_names_are_left_alone():
    assert load(None, (), {"PENSTOCK_URL": "x", "PENSTOCK_ADMIN_KEY": "y", "PENSTOCKING": "z", "PATH": "/"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("PENSTOCK_ROUTER__MOD", "did you mean PENSTOCK_ROUTER__MODE?"),
        ("PENSTOCK_ROUTR__MODE", "did you mean PENSTOCK_ROUTER__MODE?"),
        ("PENSTOCK_URLS", "did you mean PENSTOCK_URL?"),
        ("PENSTOCK_ROUTER_MODE", "did you mean PENSTOCK_ROUTER__MODE?"),
        ("PENSTOCK_QQQQQ", "`penstock config docs` lists all names"),
        ("PENSTOCK_ROUTER__MODE__X", "did you mean"),
    ],
)
def test_an_unknown_environment_name_is_an_error_with_a_suggestion(name, hint):
    said = problem(env={name: "1"})
    assert said.startswith(f"environment {name}: is not a known name")
    if hint != "did you mean":
        assert hint in said


def test_an_entry_that_is_not_there_is_an_error_because_it_would_be_a_new_pool():
    said = problem(env={"PENSTOCK_MODELS__SIM__POOLS__MIAN__REPLICAS": "1"})
    assert "models.sim.pools has no entry MIAN (there is main)" in said
    said = problem(["models.sim.pools.mian.replicas=1"])
    assert "has no entry 'mian' (did you mean main?" in said
    assert "to add it: --set 'models.sim.pools.mian={...}'" in said


def test_two_models_that_are_written_alike_can_not_be_told_apart(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("models: {a-b: {pools: {main: {}}}, a.b: {pools: {other: {}}}}\n")
    said = problem(env={"PENSTOCK_MODELS__A_B__TOKENIZER": "x"}, path=path)
    assert "may be any of a-b, a.b" in said


def test_a_new_entry_and_a_whole_group_are_given_as_yaml():
    settings = load(
        None,
        ["models.sim.pools.extra={replicas: 2}", "models.sim.pools.extra.replicas=3", "router.breaker={failures: 7}"],
    ).settings
    assert settings.models["sim"].pools["extra"].replicas == 3
    assert settings.models["sim"].pools["main"].replicas == 4
    assert settings.router.breaker.failures == 7
    settings = load(None, ["models={x: {pools: {p: {}}}}", "models.x.pools.p.sim.kv_blocks=9"]).settings
    assert list(settings.models) == ["x"]
    assert settings.models["x"].pools["p"].sim.kv_blocks == 9


def test_a_model_with_dots_in_its_name_is_reached_plain_and_quoted():
    new = "models={org/m-1.5: {pools: {main: {}}}}"
    for name in ("models.org/m-1.5.pools.main.replicas=2", 'models."org/m-1.5".pools.main.replicas=2'):
        assert load(None, [new, name]).settings.models["org/m-1.5"].pools["main"].replicas == 2


def test_dashes_do_for_underscores_and_spaces_do_not_hurt():
    assert load(None, ["router.cost.overlap-credit = 2"]).settings.router.cost.overlap_credit == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("router.mode", "is not name=value"),
        ("=kv", "is not name=value"),
        ("router.mod=kv", "did you mean router.mode?"),
        ("overlap_credit=2", "is not a setting"),
        ("router.mode.x=1", "router.mode is a single value"),
        ("router=kv", "takes a mapping, such as {key: value}"),
        ("models={a: }}", "is not valid YAML"),
        ("router.zzz=1", "known: preset, mode, cost"),
    ],
)
def test_an_override_that_leads_nowhere_is_told(override, said):
    assert said in problem([override])


def test_a_file_that_is_wrong_where_a_flag_leads_is_reported_once(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("router: 5\n")
    assert "takes a mapping of keys, not 5" in problem(["router.mode=kv"], path=path)
