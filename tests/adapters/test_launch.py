"""Is an engine started with the flags, environment and card that its pool asks for?"""

import json
from pathlib import Path

import pytest

from penstock.adapters.engines.launch import Launch, launch_of
from penstock.adapters.engines.pool_overrides import overrides_of
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.pass_report import STATS_ENV
from penstock_lab.engine.settings import SimSettings


def flag(launch: Launch, name: str) -> str:
    """The word after a flag, which must stand there once."""
    assert launch.argv.count(name) == 1, launch.argv
    return launch.argv[launch.argv.index(name) + 1]


def vllm(**settings: object) -> PoolSettings:
    return PoolSettings(engine="vllm", **settings)


def test_vllm_is_told_to_announce_its_cache_on_loopback_and_to_say_what_it_reused() -> None:
    launch = launch_of("main-0", "tiny", vllm(model_path="/models/tiny", command="/opt/bin/vllm"), port=8123)
    assert launch.argv[:3] == ("/opt/bin/vllm", "serve", "/models/tiny")
    assert flag(launch, "--host") == "127.0.0.1"
    assert flag(launch, "--port") == "8123"
    assert flag(launch, "--served-model-name") == "tiny"
    events = json.loads(flag(launch, "--kv-events-config"))
    assert events["enable_kv_cache_events"] is True
    assert events["endpoint"] == events["replay_endpoint"] == "tcp://*:0"
    assert launch.env["VLLM_HOST_IP"] == "127.0.0.1"
    assert "--enable-prefix-caching" in launch.argv
    assert "--enable-prompt-tokens-details" in launch.argv
    assert launch.url == "http://127.0.0.1:8123"
    assert launch.start_timeout == 600.0
    assert launch.card["engine"] == "vllm"


def test_the_statistics_plug_in_is_switched_on_by_its_environment_and_named_in_the_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.adapters.engines.launch.plugin_installed", lambda program, env: True)
    on = launch_of("main-0", "tiny", vllm(), port=8123)
    assert on.env[STATS_ENV].startswith("tcp://127.0.0.1:")
    assert on.card["stats"] == on.env[STATS_ENV]
    assert "--enable-logging-iteration-details" in on.argv
    elsewhere = launch_of("w", "tiny", vllm(env={STATS_ENV: "tcp://127.0.0.1:5"}), port=8123)
    assert elsewhere.card["stats"] == "tcp://127.0.0.1:5"
    monkeypatch.undo()
    off = launch_of("main-0", "tiny", vllm(command="nowhere"), port=8123)
    assert STATS_ENV not in off.env
    assert "stats" not in off.card
    assert "--enable-logging-iteration-details" not in off.argv


def test_a_pool_whose_replicas_may_sleep_gets_the_flag_and_the_routes() -> None:
    assert "--enable-sleep-mode" not in launch_of("w", "m", vllm(), port=1).argv
    launch = launch_of("w", "m", vllm(sleeping=1), port=1)
    assert launch.argv.count("--enable-sleep-mode") == 1 and launch.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert (
        "--enable-sleep-mode"
        not in launch_of("w", "m", vllm(sleeping=1, args=("--no-enable-sleep-mode",)), port=1).argv
    )


def test_details_of_passes_are_asked_for_only_where_the_plug_in_takes_them(tmp_path: Path) -> None:
    program = tmp_path / "venv" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    flag = "--enable-logging-iteration-details"  # without the plug-in, a line in the log for each pass
    assert flag not in launch_of("w", "m", vllm(command=str(program)), port=1).argv
    installed = tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "penstock-0.1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "entry_points.txt").write_text("[console_scripts]\npenstock = penstock.cli.main:main\n")
    assert flag not in launch_of("w", "m", vllm(command=str(program)), port=1).argv
    (installed / "entry_points.txt").write_text("[vllm.stat_logger_plugins]\npenstock = a:b\n")
    found = launch_of("w", "m", vllm(command=str(program)), port=1)
    assert flag in found.argv and found.card["stats"] == found.env[STATS_ENV]
    on_path = vllm(command="vllm", env={"PATH": str(program.parent)})
    assert flag in launch_of("w", "m", on_path, port=1).argv
    elsewhere = vllm(command="nowhere", env={"PYTHONPATH": f"{tmp_path}:{installed.parent}"})
    assert flag in launch_of("w", "m", elsewhere, port=1).argv
    refused = vllm(command=str(program), args=("--no-enable-logging-iteration-details",))
    assert flag not in launch_of("w", "m", refused, port=1).argv


def test_own_flags_and_environment_win() -> None:
    args = ("--scheduling-policy=fcfs", "--no-enable-prefix-caching", "--kv-events-config.topic", "x", "-tp", "4")
    launch = launch_of("main-0", "tiny", vllm(args=args, env={"VLLM_HOST_IP": "::1", "A": "b"}), port=1, gpus=(0, 1))
    assert launch.argv[-len(args) :] == args
    for ours in ("--scheduling-policy", "--enable-prefix-caching", "--kv-events-config", "--tensor-parallel-size"):
        assert ours not in launch.argv
    assert launch.env["VLLM_HOST_IP"] == "::1"
    assert launch.env["A"] == "b"


def test_priorities_are_sent_on_only_where_the_engine_schedules_by_them() -> None:
    launch = launch_of("main-0", "tiny", vllm(), port=1)
    assert flag(launch, "--scheduling-policy") == "priority"
    assert launch.card["labels"] == {"priority": "on"}
    for pool in (vllm(args=("--scheduling-policy=fcfs",)), PoolSettings(engine="vllm", priority=False)):
        other = launch_of("main-0", "tiny", pool, port=1)
        assert "--scheduling-policy" not in other.argv
        assert other.card.get("labels", {}).get("priority") != "on"


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (("-tp", "4", "--pipeline-parallel-size=2"), {"tp_size": "4", "pp_size": "2"}),
        (("--tensor_parallel_size", "8", "-pp", "1"), {"tp_size": "8"}),
        ((), {}),
    ],
)
def test_the_card_says_over_how_many_gpus_an_engine_is_spread(args, found) -> None:
    labels = launch_of("w", "m", vllm(args=args), port=1).card["labels"]
    assert {name: labels[name] for name in labels if name != "priority"} == found


def test_a_simulated_engine_takes_priorities_where_it_schedules_by_them() -> None:
    assert "labels" not in launch_of("w", "sim", PoolSettings(), port=0).card
    sim = PoolSettings(sim=SimSettings(scheduling_policy="priority"))
    assert launch_of("w", "sim", sim, port=0).card["labels"] == {"priority": "on"}


def test_what_an_operator_says_of_servers_goes_to_the_one_that_is_meant() -> None:
    one, two = "http://gpu1:8000", "http://gpu2:8000"
    pool = PoolSettings(
        engine="vllm",
        urls=(one, two),
        events=(f"{one}/=tcp://gpu1:1", f"{one}=tcp://gpu1:2", f"{two}=@tcp://gpu0:3"),
        replay=(f"{one}=tcp://gpu1:4", f"{one}=tcp://gpu1:5"),
        stats=(f"{two}=tcp://gpu2:6",),
        topic="kv",
        block_size=32,
    )
    first, second = overrides_of(pool, one), overrides_of(pool, two)
    assert first["events"] == ("tcp://gpu1:1", "tcp://gpu1:2") and first["ranks"] == 2
    assert first["replay"] == ("tcp://gpu1:4", "tcp://gpu1:5") and "stats" not in first
    assert second["events"] == ("@tcp://gpu0:3",) and second["stats"] == "tcp://gpu2:6" and "replay" not in second
    assert first["engine"] == "vllm" and first["topic"] == "kv" and first["block_size"] == 32
    assert "labels" not in first  # nobody said that it schedules by priority
    single = PoolSettings(urls=(one,), events=("tcp://gpu1:1",), priority=True)
    assert overrides_of(single, one)["events"] == ("tcp://gpu1:1",)
    assert overrides_of(single, one)["labels"] == {"priority": "on"}
    assert "engine" not in overrides_of(single, one)  # the default is no statement


def test_sizes_of_the_pool_become_flags_and_card() -> None:
    pool = PoolSettings(engine="vllm", block_size=32, kv_blocks=100, max_model_len=2048, max_num_batched_tokens=4096)
    launch = launch_of("main-0", "org/model", pool, port=8123)
    assert launch.argv[2] == "org/model"
    assert flag(launch, "--block-size") == "32"
    assert flag(launch, "--num-gpu-blocks-override") == "100"
    assert flag(launch, "--max-model-len") == "2048"
    assert flag(launch, "--max-num-batched-tokens") == "4096"
    assert launch.card["block_size"] == 32
    assert launch.card["kv_blocks"] == 100


def test_the_card_says_how_many_sequences_a_pass_takes() -> None:
    assert launch_of("w", "m", vllm(args=("--max-num-seqs", "16")), port=1).card["max_num_seqs"] == 16
    assert "max_num_seqs" not in launch_of("w", "m", vllm(), port=1).card


def test_gpus_are_made_visible_and_shared_by_one_engine() -> None:
    assert launch_of("w", "m", vllm(), port=1, gpus=(3,)).env["CUDA_VISIBLE_DEVICES"] == "3"
    assert "--tensor-parallel-size" not in launch_of("w", "m", vllm(), port=1, gpus=(3,)).argv
    two = launch_of("w", "m", vllm(), port=1, gpus=(0, 2))
    assert two.env["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert flag(two, "--tensor-parallel-size") == "2"
    assert two.card["labels"]["tp_size"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in launch_of("w", "m", vllm(), port=1).env


def test_a_simulated_engine_says_itself_where_it_listens() -> None:
    launch = launch_of("main-0", "sim", PoolSettings(sim=SimSettings(kv_blocks=77)), port=0)
    assert launch.url is None
    assert launch.argv[1:3] == ("-m", "penstock_lab.sim.sim_process")
    assert json.loads(flag(launch, "--settings"))["kv_blocks"] == 77
    assert launch.card["max_num_seqs"] == SimSettings().max_num_seqs


def test_what_can_not_be_started_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="trtllm are not started here"):
        launch_of("w", "m", PoolSettings(engine="trtllm"), port=1)
    with pytest.raises(ConfigError, match="does not say which port"):
        launch_of("w", "m", vllm(), port=0)


def sglang(**settings: object) -> PoolSettings:
    return PoolSettings(engine="sglang", model_path="/m", command="/opt/sglang/bin/python", **settings)


def test_an_sglang_publishes_and_replays_at_ports_of_its_own() -> None:
    pool = sglang(block_size=16, args=("--page-size", "64", "--enable-metrics"))
    one, other = (launch_of(name, "m", pool, port=8123, host="10.0.0.1") for name in ("main-0", "main-1"))
    assert one.argv[:3] == ("/opt/sglang/bin/python", "-m", "sglang.launch_server")
    assert one.argv.count("--page-size") == one.argv.count("--enable-metrics") == 1, "the operator's words win"
    assert one.url == "http://10.0.0.1:8123" and flag(one, "--served-model-name") == "m"
    mine, its = (json.loads(flag(launch, "--kv-events-config")) for launch in (one, other))
    assert mine["topic"] == "kv@main-0" and mine["publisher"] == "zmq"
    ports = {config[name] for config in (mine, its) for name in ("endpoint", "replay_endpoint")}
    assert len(ports) == 4 and all(port.startswith("tcp://*:") for port in ports), "without a star it would connect"


def test_an_sglang_schedules_by_priority_where_its_pool_says_so() -> None:
    one, other = (launch_of("w", "m", sglang(priority=said), port=8123) for said in (True, None))
    assert "--enable-priority-scheduling" in one.argv and one.card["labels"]["priority"] == "on"
    assert "--enable-priority-scheduling" not in other.argv and "labels" not in other.card


def test_an_sglang_takes_as_many_adapters_as_its_pool_says() -> None:
    launch = launch_of(
        "w", "m", sglang(max_cpu_loras=2, max_lora_rank=64, args=("--lora-target-modules", "q_proj")), port=1
    )
    assert "--enable-lora" in launch.argv and launch.card["adapter_slots"] == 2
    for name, value in (("--max-loaded-loras", "2"), ("--max-loras-per-batch", "2"), ("--max-lora-rank", "64")):
        assert flag(launch, name) == value
    assert launch.argv.count("--lora-target-modules") == 1 and flag(launch, "--lora-target-modules") == "q_proj"
    assert "--enable-lora" not in launch_of("w", "m", sglang(), port=1).argv


def test_two_prefill_servers_of_sglang_on_one_machine_meet_their_others_at_two_ports() -> None:
    pair = [launch_of(f"p-{n}", "m", sglang(role="prefill"), port=8123 + n) for n in (0, 1)]
    assert [flag(launch, "--disaggregation-mode") for launch in pair] == ["prefill", "prefill"]
    assert len({flag(launch, "--disaggregation-bootstrap-port") for launch in pair}) == 2
    decode = launch_of("d-0", "m", sglang(role="decode"), port=8123)
    assert "--disaggregation-bootstrap-port" not in decode.argv
    with pytest.raises(ConfigError, match="does not say which port"):
        launch_of("w", "m", sglang(), port=0)


def llamacpp(**settings: object) -> PoolSettings:
    return PoolSettings(engine="llamacpp", max_model_len=4096, **settings)


def test_llama_server_gets_its_port_its_name_and_the_pages_that_are_read_of_it() -> None:
    launch = launch_of("main-0", "tiny", llamacpp(command="/opt/llama-server", model_path="/m/a.gguf"), port=8123)
    assert launch.argv[0] == "/opt/llama-server"
    assert flag(launch, "--model") == "/m/a.gguf" and flag(launch, "--alias") == "tiny"
    assert flag(launch, "--port") == "8123" and flag(launch, "--host") == "127.0.0.1"
    assert flag(launch, "--ctx-size") == "4096"
    assert "--metrics" in launch.argv and "--slots" in launch.argv
    assert launch.url == "http://127.0.0.1:8123"
    assert launch.card["engine"] == "llamacpp" and "max_num_seqs" not in launch.card


def test_the_server_of_the_python_package_finishes_what_it_began_and_takes_one_at_a_time() -> None:
    launch = launch_of("main-0", "tiny", llamacpp(command="/venv/bin/python", model_path="/m/a.gguf"), port=8123)
    assert launch.argv[:3] == ("/venv/bin/python", "-m", "llama_cpp.server")
    assert flag(launch, "--model_alias") == "tiny" and flag(launch, "--n_ctx") == "4096"
    assert flag(launch, "--interrupt_requests") == "false"
    assert launch.card["max_num_seqs"] == 1
    own = launch_of("w", "tiny", llamacpp(command="python3", model_path="/m/a.gguf", args=("--n_ctx", "512")), port=1)
    assert flag(own, "--n_ctx") == "512"


def test_llamacpp_gets_its_gpus_and_must_be_given_a_port() -> None:
    launch = launch_of("w", "tiny", llamacpp(model_path="/m/a.gguf", env={"A": "b"}), port=1, gpus=(2, 3))
    assert launch.env == {"CUDA_VISIBLE_DEVICES": "2,3", "A": "b"}
    with pytest.raises(ConfigError, match="port"):
        launch_of("w", "tiny", llamacpp(model_path="/m/a.gguf"), port=0)


def test_vllm_loads_adapters_while_it_runs_where_its_pool_has_room_for_some() -> None:
    launch = launch_of("main-0", "tiny", vllm(max_cpu_loras=2, max_lora_rank=64), port=8123)
    assert "--enable-lora" in launch.argv and launch.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert [flag(launch, f"--{name}") for name in ("max-loras", "max-cpu-loras", "max-lora-rank")] == ["2", "2", "64"]
    assert launch.card["adapter_slots"] == 2
    without = launch_of("main-0", "tiny", vllm(), port=8123)
    assert "--enable-lora" not in without.argv and "adapter_slots" not in without.card
