"""up, serve, attach, join and bench: what they hand to the runtime, and that nothing starts on a bad config."""

import sys
import types
from typing import Any

import pytest


@pytest.fixture
def started(monkeypatch):
    """Stand in for the runtime; collects what it would have started."""
    calls: list[tuple[Any, ...]] = []
    module = types.ModuleType("penstock.runtime.supervision.supervisor")
    module.run = lambda loaded, *, command, finished, reload: calls.append((command, loaded.settings)) or 0  # type: ignore[attr-defined]
    joining = types.ModuleType("penstock.runtime.supervision.joining")
    joining.join = lambda *given: calls.append(given[:-1]) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penstock.runtime.supervision.supervisor", module)
    monkeypatch.setitem(sys.modules, "penstock.runtime.supervision.joining", joining)
    return calls


def test_up_starts_the_default(penstock, started):
    assert penstock("up").exit_code == 0
    ((command, settings),) = started
    assert command == "up"
    assert settings.models["sim"].pools["main"].replicas == 4


def test_up_takes_a_file_and_flags_of_both_kinds(penstock, started, tmp_path):
    (tmp_path / "c.yaml").write_text("name: mine\nrouter: {mode: random}\n")
    arguments = ["c.yaml", "--router.mode=kv", "--set", "frontend.port=0", "--router.cost.overlap-credit", "2"]
    assert penstock("up", *arguments, "--name", "yours", "--router.track_output").exit_code == 0
    settings = started[0][1]
    assert settings.name == "yours"
    assert settings.router.mode == "kv"
    assert settings.router.cost.overlap_credit == 2
    assert settings.router.track_output is True
    assert settings.frontend.port == 0


def test_a_boolean_flag_takes_a_word_or_none_and_leaves_the_next_argument(penstock, started, tmp_path):
    (tmp_path / "c.yaml").write_text("")
    assert penstock("up", "--router.track_output", "c.yaml").exit_code == 0
    assert penstock("up", "--router.track_output", "off", "c.yaml").exit_code == 0
    assert penstock("up", "--models.sim.pools.main.sim.enable_prefix_caching", "false").exit_code == 0
    assert [settings.router.track_output for _, settings in started] == [True, False, False]
    assert started[2][1].models["sim"].pools["main"].sim.enable_prefix_caching is False


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "none.yaml"],
        ["up", "--router.mode", "nope"],
        ["up", "--set", "frontend.host=0.0.0.0"],
        ["up", "--frontend.security.tls_cert", "no.pem", "--frontend.security.tls_key", "no.pem"],
        ["serve", "sim", "--sim.block_size", "0"],
        ["serve", "sim", "--tokenizer", "nowhere"],
        ["attach", "gpu1:8000", "--model", "m"],
        ["attach", "http://127.0.0.1:9", "--model", "m", "--router.mod", "kv"],
        ["join", "--model", "sim", "--sim.blok_size", "3"],
        ["join", "--model", "sim", "--engine", "openai"],
    ],
    ids=" ".join,
)
def test_nothing_starts_on_a_bad_config(penstock, started, arguments):
    result = penstock(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith("penstock: ")
    assert started == []


def test_an_unknown_environment_name_starts_nothing(penstock, started):
    result = penstock("up", env={"PENSTOCK_ROUTER__MOD": "kv"})
    assert result.exit_code == 2
    assert "did you mean PENSTOCK_ROUTER__MODE?" in result.output
    assert started == []


def test_serve_makes_one_model_with_one_pool(penstock, started):
    arguments = ["org/my-model-1.5", "--replicas", "2", "--sim.kv_blocks", "4Ki", "--frontend.port", "0"]
    assert penstock("serve", *arguments).exit_code == 0
    ((command, settings),) = started
    assert command == "serve"
    assert list(settings.models) == ["org/my-model-1.5"]
    pool = settings.models["org/my-model-1.5"].pools["main"]
    assert (pool.engine, pool.replicas, pool.sim.kv_blocks) == ("sim", 2, 4096)
    assert settings.frontend.port == 0


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a tokenizer, and a program to serve it."""
    folder = tmp_path / "tiny-1.5"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return folder, str(program)


def test_serve_starts_vllm_on_a_folder(penstock, started, checkpoint):
    folder, program = checkpoint
    arguments = ["--engine", "vllm", "--command", program, "--args=--dtype,bfloat16", "--env", "{A: b}"]
    assert penstock("serve", str(folder), *arguments, "--block_size", "32").exit_code == 0
    (model,) = started[0][1].models.items()
    assert (model[0], model[1].tokenizer) == ("tiny-1.5", str(folder))
    pool = model[1].pools["main"]
    assert (pool.engine, pool.replicas, pool.block_size) == ("vllm", 1, 32)
    assert (pool.model_path, pool.args, pool.env) == (str(folder), ("--dtype", "bfloat16"), {"A": "b"})
    assert penstock("serve", str(folder), *arguments, "--served-name", "mine", "--replicas", "2").exit_code == 0
    assert started[1][1].models["mine"].pools["main"].replicas == 2


def test_serve_finds_the_tokenizer_of_a_hub_model_that_was_fetched_before(penstock, started, checkpoint, tmp_path):
    program = checkpoint[1]
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "abc"
    arguments = ["serve", "org/model", "--engine", "vllm", "--command", program]
    env = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    assert penstock(*arguments, env=env).exit_code == 0
    snapshot.mkdir(parents=True)
    assert penstock(*arguments, env=env).exit_code == 0
    (snapshot / "tokenizer.json").write_text("{}")
    assert penstock(*arguments, env=env).exit_code == 0
    models = [settings.models["org/model"] for _, settings in started]
    assert [model.tokenizer for model in models] == [None, None, str(snapshot)]
    assert models[0].pools["main"].model_path == "org/model"


def test_serve_without_the_program_or_the_folder_starts_nothing(penstock, started, checkpoint, tmp_path):
    result = penstock("serve", str(checkpoint[0]), "--engine", "vllm", "--command", str(tmp_path / "none"))
    assert result.exit_code == 2 and "is not a program that can be started" in result.output
    result = penstock("serve", "./nowhere", "--engine", "vllm")
    assert result.exit_code == 2 and "there is no folder ./nowhere" in result.output
    assert started == []


def test_attach_takes_what_a_server_does_not_tell(penstock, started, cluster):
    cluster.models = ("base",)
    endpoints = ["--events", f"{cluster.url}/v1=tcp://gpu1:1", "--replay", "tcp://gpu1:2", "--stats", "tcp://gpu1:3"]
    assert penstock("attach", cluster.url, "--engine", "sglang", "--topic", "kv", *endpoints).exit_code == 0
    pool = started[0][1].models["base"].pools["attached"]
    assert (pool.engine, pool.topic) == ("sglang", "kv")
    assert (pool.events, pool.replay) == ((f"{cluster.url}=tcp://gpu1:1",), ("tcp://gpu1:2",))
    assert pool.stats == ("tcp://gpu1:3",)
    result = penstock("attach", cluster.url, "--events", "http://other:1=tcp://gpu1:1")
    assert result.exit_code == 2 and "names a server that is not in urls" in result.output


def test_attach_asks_each_server_and_groups_them_by_model(penstock, started, cluster):
    cluster.models = ("base",)
    urls = [cluster.url, f"{cluster.url}/v1/"]
    assert penstock("attach", urls[0], "--block-size", "16").exit_code == 0
    settings = started[0][1]
    assert started[0][0] == "attach"
    pool = settings.models["base"].pools["attached"]
    assert (pool.engine, pool.urls, pool.block_size) == ("openai", (cluster.url,), 16)
    assert settings.models["base"].tokenizer is None
    result = penstock("attach", *urls)
    assert result.exit_code == 2
    assert "stands in pool models.base.pools.attached already" in result.output


def test_attach_takes_all_models_of_a_server_and_one_model_by_all_its_names(penstock, started, cluster):
    cluster.models = ("a", "b", "a-too", "c")
    cluster.roots = {"a": "org/a", "a-too": "org/a", "c": "org/c"}
    assert penstock("attach", cluster.url).exit_code == 0
    models = started[0][1].models
    assert list(models) == ["a", "b", "c"] and models["a"].aliases == ("a-too",) and not models["b"].aliases
    assert {model.pools["attached"].urls for model in models.values()} == {(cluster.url,)}
    assert penstock("attach", cluster.url, "--model", "c").exit_code == 0
    assert list(started[1][1].models) == ["c"]


def test_attach_to_nobody_is_a_sentence(penstock, started):
    result = penstock("attach", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "no model list comes from http://127.0.0.1:9/v1/models" in result.output
    assert started == []


def test_attach_starts_with_the_servers_that_answer(penstock, started, cluster):
    cluster.models = ("base",)
    down = "http://127.0.0.1:9"
    assert penstock("attach", down, cluster.url, "--wait").exit_code == 0
    settings = started[0][1]
    assert settings.models["base"].pools["attached"].urls == (cluster.url, down) and settings.supervise.wait


def test_join_asks_for_the_only_model(penstock, started, cluster):
    assert penstock("join", "--url", cluster.url, "--sim.kv_blocks", "100").exit_code == 0
    ((url, pool, model, settings),) = started
    assert settings.discovery.store == "sqlite"
    assert (url, model, pool.replicas, pool.sim.kv_blocks) == (cluster.url, "sim", 1, 100)
    cluster.status["models"].append({"name": "other"})
    result = penstock("join", "--url", cluster.url)
    assert result.exit_code == 2
    assert "choose one with --model" in result.output


def test_join_takes_a_run_folder_and_urls(penstock, started):
    arguments = ["--run", "runs/x", "--model", "m", "--engine", "vllm", "--urls", "http://127.0.0.1:8001"]
    assert penstock("join", *arguments).exit_code == 0
    ((run, pool, model, _),) = started
    assert (run, model, pool.urls) == ("runs/x", "m", ("http://127.0.0.1:8001",))


def test_join_takes_a_cluster_in_an_etcd_by_flags_and_by_its_config(penstock, started, tmp_path):
    config = tmp_path / "cluster.yaml"
    config.write_text("name: there\ndiscovery: {store: etcd, ttl: 7}\n")
    flags = ["--discovery.host", "10.0.0.2", "--sim.kv_blocks", "100"]
    assert penstock("join", "--config", str(config), "--model", "m", *flags).exit_code == 0
    ((_, pool, model, settings),) = started
    assert (model, pool.sim.kv_blocks, settings.name) == ("m", 100, "there")
    assert (settings.discovery.store, settings.discovery.ttl, settings.discovery.host) == ("etcd", 7, "10.0.0.2")
    result = penstock("join", "--discovery.store", "etcd")
    assert result.exit_code == 2
    assert "needs --model" in result.output


def test_help_all_lists_every_setting(penstock):
    short, whole = penstock("up", "--help").output, penstock("up", "--help-all").output
    assert "--router.mode" in short
    assert "--router.index.predicted_ttl" not in short
    assert "--router.index.predicted_ttl" in whole
    assert "--models.NAME.pools.NAME.sim.timing.speed_up" in whole
    assert "--sim.timing.speed_up" in penstock("serve", "--help").output


def test_bench_hands_its_options_on(penstock, monkeypatch):
    bench = pytest.importorskip("penstock_lab.report.bench.bench_run")
    got = []
    monkeypatch.setattr(bench, "main", lambda options, tls: got.append(options) or 1)
    arguments = ["http://127.0.0.1:9", "--workload", "rag", "--rate", "600/min", "--duration", "2m", "--json"]
    assert penstock("bench", *arguments, "--slo-itl", "50ms").exit_code == 1
    (options,) = got
    assert (options.url, options.workload, options.rate, options.duration) == ("http://127.0.0.1:9", "rag", 10.0, 120.0)
    assert (options.json, options.slo_itl, options.slo_ttft) == (True, 0.05, 2.0)


def test_bench_defaults_are_those_of_its_options(penstock, monkeypatch):
    bench = pytest.importorskip("penstock_lab.report.bench.bench_run")
    got = []
    monkeypatch.setattr(bench, "main", lambda options, tls: got.append(options) or 0)
    assert penstock("bench", "--workload", "chat").exit_code == 0
    assert got == [bench.BenchOptions(url="http://127.0.0.1:8000", workload="chat")]


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["engine", "sim"], "penstock_lab.sim.sim_process"),
        (["frontend"], "penstock.frontend.frontend_process"),
    ],
)
def test_hidden_commands_pass_their_arguments_on(penstock, monkeypatch, arguments, module):
    got = []
    fake = types.ModuleType(module)
    fake.main = lambda words: got.append(words) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, fake)
    assert penstock(*arguments, "--model", "x", "--help").exit_code == 0
    assert got == [["--model", "x", "--help"]]


def test_serve_takes_the_tiers_of_its_engines_as_two_flags(penstock, started, tmp_path):
    assert penstock("serve", "sim", "--host-cache", "64GiB", "--disk-cache", str(tmp_path)).exit_code == 0
    cache = started[0][1].models["sim"].pools["main"].cache
    assert (cache.host, cache.disk, cache.disk_dirs) == (64 << 30, 256 << 30, (str(tmp_path),))
    answer = penstock("serve", "sim", "--disk-cache", str(tmp_path))
    assert answer.exit_code == 2
    assert "all blocks pass through host memory" in answer.output
