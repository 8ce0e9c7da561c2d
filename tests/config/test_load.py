"""A config with every kind of mistake in it: each problem has its position, its value and a hint, all at once."""

import io
from pathlib import Path

import msgspec
import pytest

from penstock.config.presets import PRESETS
from penstock.config.reading.load import load, load_group, load_resolved, resolved_yaml
from penstock.config.reading.problems import ConfigProblems
from penstock.config.settings.cluster_settings import ClusterSettings, PoolSettings
from penstock.kernel.errors import ConfigError


@pytest.fixture
def check(tmp_path):
    """Return the problems of a YAML text, its path shortened to c.yaml."""

    def problems(text, overrides=(), env=None):
        path = tmp_path / "c.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        try:
            load(path, overrides, env or {})
        except ConfigProblems as error:
            return [str(problem).replace(str(path), "c.yaml") for problem in error.problems]
        return []

    return problems


def test_a_preset_sets_what_nothing_else_does(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("router:\n  preset: agentic\n  affinity:\n    ttl: 5m\n")
    loaded = load(file)
    assert (loaded.settings.router.affinity.mode, loaded.settings.router.affinity.ttl) == ("soft", 300.0)
    assert str(loaded.origin("router.affinity.mode")) == "preset agentic"
    assert load(file, ["router.affinity.mode=off"]).settings.router.affinity.mode == "off"
    again = tmp_path / "resolved.yaml"
    again.write_text(resolved_yaml(loaded.settings))
    assert load(again).settings == loaded.settings
    assert load(None).settings.router.affinity.mode == "off"
    with pytest.raises(ConfigProblems, match="general, agentic"):
        load(None, ["router.preset=agents"])
    for name, texts in PRESETS.items():
        settings = load(None, [f"router.preset={name}"]).settings
        assert settings == msgspec.structs.replace(
            load(None, [f"{key}={text}" for key, text in texts.items()]).settings,
            router=settings.router,
        )


def test_without_a_file_it_is_the_embedded_default():
    loaded = load(None)
    assert loaded.settings == ClusterSettings()
    assert list(loaded.settings.models) == ["sim"]
    assert loaded.settings.models["sim"].pools["main"].replicas == 4
    assert loaded.origin("router.mode").kind == "default"


def test_every_problem_at_once_in_the_order_of_the_file(check):
    found = check(
        """\
modelz: {}
router:
  mode: kvv
  cost:
    overlap_credt: 2
    host_credit: -1
  queue:
    wait_max: 5 lightyears
  breaker: {open_for: 2m}
frontend:
  port: 70000
  host: 0.0.0.0
models:
  a:
    pools:
      main: {replicas: 0, sim: {block_size: 32}}
      other: {}
""",
        ["router.cost.temperature=2m"],
        {"PENSTOCK_ROUTER__COST__OVERLAP_CREDT": "1"},
    )
    assert found == [
        "c.yaml:1:1: modelz: unknown key (did you mean models?)",
        "c.yaml:3:9: router.mode: 'kvv' takes one of kv, round_robin, random, least_loaded, power_of_two, direct "
        "(did you mean kv?)",
        "c.yaml:5:5: router.cost.overlap_credt: unknown key (did you mean overlap_credit?)",
        "c.yaml:6:18: router.cost.host_credit: '-1' is out of range: 0 or more",
        "c.yaml:8:15: router.queue.wait_max: '5 lightyears' has the unknown unit 'lightyears', such as 200ms, 5s, 2m "
        "or 1h",
        "c.yaml:9:23: router.breaker.open_for: '2m' is out of range: above 0 and 60 or less s",
        "c.yaml:11:9: frontend.port: '70000' is out of range: 0 to 65535",
        "c.yaml:12:9: frontend.host: 0.0.0.0 is reached by other machines, but there is no API key (set "
        "PENSTOCK_FRONTEND__SECURITY__API_KEYS, or frontend.security.insecure: true if you mean it)",
        "c.yaml:16:24: models.a.pools.main.replicas: '0' is out of range: 1 to 1024",
        "c.yaml:17:14: models.a.pools.other.sim.block_size: is 64, but pool main of the same model has 32 (one model "
        "has one block size, or no prefix would match across its pools)",
        "environment PENSTOCK_ROUTER__COST__OVERLAP_CREDT: is not a known name (did you mean "
        "PENSTOCK_ROUTER__COST__OVERLAP_CREDIT?)",
        "flag router.cost.temperature: router.cost.temperature: '2m' has the unknown unit 'm'",
    ]


def test_the_error_is_a_config_error_that_lists_its_problems():
    with pytest.raises(ConfigError) as caught:
        load(None, ["router.mode=nope", "frontend.port=x"])
    assert len(caught.value.problems) == 2
    assert "2 problems in the config" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("router: 5\n", "c.yaml:1:9: router: takes a mapping of keys, not 5"),
        ("router: [a]\n", "c.yaml:1:9: router: takes a mapping of keys, not a list of 1"),
        ("- a\n", "c.yaml:1:1: is not a mapping of settings (start with a line such as 'router:')"),
        ("just text\n", "c.yaml:1:1: is not a mapping of settings (start with a line such as 'router:')"),
        ("models: {a: 3}\n", "c.yaml:1:13: models.a: takes a mapping of keys, not 3"),
        ("router: {mode: }\n", "c.yaml:1:15: router.mode: has no value (it takes one of kv"),
        ("router: {mode: {a: 1}}\n", "c.yaml:1:16: router.mode: takes one of kv"),
        ("frontend: {port: [1]}\n", "c.yaml:1:18: frontend.port: takes a whole number, not a list"),
        ("frontend: {port: 1.5}\n", "c.yaml:1:18: frontend.port: '1.5' must be a whole number"),
        ("frontend: {port: true}\n", "c.yaml:1:18: frontend.port: 'true' is not a number"),
        ("frontend: {security: {insecure: maybe}}\n", "'maybe' takes true or false"),
        ("frontend: {proxied_routes: {a: 1}}\n", "takes a list of texts"),
        ("router: {cost: {mode: kv}}\n", "c.yaml:1:17: router.cost.mode: unknown key"),
        ("port: 80\n", "c.yaml:1:1: port: unknown key (it belongs at frontend.port)"),
        ("frontend: {zzzzzz: 1}\n", "known: host, port, admin_port"),
    ],
)
def test_a_wrong_shape_is_told_at_its_place(check, text, said):
    (problem,) = check(text)
    assert said in problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("router:\n\tmode: kv\n", "c.yaml:2:1: a tab indents this line; YAML allows only spaces"),
        ("router: {mode: kv\n", "c.yaml:2:1: is not valid YAML"),
        ("a: b: c\n", "quote a value that has a colon"),
        ("name: a\n---\nname: b\n", "a config is one document"),
        ("name: \x00\n", "a character that YAML does not allow: U+0000"),
        (b"name: \xff\xfe\n", "c.yaml:1:1: is not UTF-8 text"),
        ("name: a\nname: b\n", "c.yaml:2:1: 'name' stands here a second time; the first is at"),
        ("router: {[a]: 1}\n", "a key must be one word"),
        ("name: !!python/object:os.system x\n", "has the tag tag:yaml.org,2002:python/object"),
        ("name: *nobody\n", "found undefined alias"),
        ("router: &a {cost: *a}\n", "nested more than 32 levels deep"),
        ("name: " + "[" * 2000, "is "),
        ("x: " + "y" * (1 << 20), "is larger than 1048576 bytes"),
    ],
)
def test_text_that_is_no_config_is_told_once(check, text, said):
    found = check(text)
    assert any(said in problem for problem in found), found
    assert len(found) <= 2


def test_an_alias_bomb_ends_quickly(check):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert any("more than 20000 values" in problem for problem in check("\n".join(lines)))


def test_aliases_and_merge_keys_work(check, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "models:\n  m:\n    pools:\n      a: {replicas: 1, sim: &s {kv_blocks: 100}}\n"
        "      b: {sim: {<<: *s, kv_blocks: 50}}\n      c: {sim: *s}\n"
    )
    pools = load(path).settings.models["m"].pools
    assert [pools[name].sim.kv_blocks for name in "abc"] == [100, 50, 100]


def test_a_group_whose_keys_are_all_commented_out_is_as_if_it_were_not_there(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("router:\n  # mode: random\nfrontend:\nmodels:\n  sim:\n    pools:\n      main:\n        sim:\n")
    settings = load(path).settings
    assert settings.router == ClusterSettings().router
    assert settings.models["sim"].pools["main"] == PoolSettings()


def test_an_empty_file_is_the_default(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("# nothing\n")
    assert load(path).settings == ClusterSettings()


def test_words_mean_what_the_knob_says_not_what_yaml_does(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "name: 123\nrouter: {affinity: {mode: off}, track_output: yes}\nfrontend: {limits: {prompt_max: null}}\n"
    )
    settings = load(path).settings
    assert settings.name == "123"
    assert settings.router.affinity.mode == "off"
    assert settings.router.track_output is True
    assert settings.frontend.limits.prompt_max is None


def test_flags_win_over_environment_and_environment_over_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("router: {mode: random}\nframe: 1\n".replace("frame: 1\n", ""))
    env = {"PENSTOCK_ROUTER__MODE": "least_loaded", "HOME": "/"}
    assert load(path).settings.router.mode == "random"
    loaded = load(path, (), env)
    assert loaded.settings.router.mode == "least_loaded"
    assert str(loaded.origin("router.mode")) == "environment PENSTOCK_ROUTER__MODE"
    loaded = load(path, ["router.mode=direct", "router.mode=round_robin"], env)
    assert loaded.settings.router.mode == "round_robin"
    assert str(loaded.origin("router.mode")) == "flag router.mode"
    assert load(path).origin("router.mode").text == f"{path}:1:16"


def test_a_missing_or_unreadable_file_is_a_sentence(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigProblems, match=r"is not there|can't be read"):
            load(path)


def test_a_config_can_come_from_standard_input(monkeypatch):
    class Stdin:
        buffer = io.BytesIO(b"router: {mode: rand}\n")

    monkeypatch.setattr("sys.stdin", Stdin)
    with pytest.raises(ConfigProblems, match="standard input:1:16"):
        load("-")


def test_one_group_can_be_read_on_its_own():
    pool = load_group(PoolSettings, ["replicas=2", "sim.kv_blocks=8k", "urls=http://a:1,http://b:2"])
    assert (pool.replicas, pool.sim.kv_blocks, pool.urls) == (2, 8000, ("http://a:1", "http://b:2"))
    with pytest.raises(ConfigProblems, match="did you mean replicas"):
        load_group(PoolSettings, ["replica=2"])


def test_a_secret_is_neither_written_down_nor_repeated_in_a_problem(tmp_path):
    env = {"PENSTOCK_FRONTEND__SECURITY__API_KEYS": "hush-hush"}
    settings = load(None, (), env).settings
    assert settings.frontend.security.api_keys == ("hush-hush",)
    assert "hush" not in resolved_yaml(settings)
    assert "hush" in resolved_yaml(settings, secrets=True)
    path = tmp_path / "c.yaml"
    path.write_text("frontend: {security: {api_keys: {hush: hush}}}\n")
    with pytest.raises(ConfigProblems) as caught:
        load(path)
    assert "hush" not in str(caught.value).replace(str(path), "")


def test_a_child_reads_the_resolved_file_and_only_its_secrets_from_the_environment(tmp_path):
    env = {"PENSTOCK_ROUTER__MODE": "random", "PENSTOCK_FRONTEND__SECURITY__API_KEYS": '["a,b", "c"]'}
    settings = load(None, ["router.mode=direct"], env).settings
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(settings))
    assert load_resolved(path, env) == settings
    assert settings.frontend.security.api_keys == ("a,b", "c")
