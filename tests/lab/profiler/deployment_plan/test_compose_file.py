"""Compose file: services with addresses, GPUs and health checks, and a frontend whose config names them."""

from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.reading.load import load
from penstock.kernel.errors import ConfigError
from penstock_lab.profiler.deployment_plan.compose_file import compose_yaml
from tests.lab.profiler.deployment_plan.questions import model_folder

PAIR = """
models:
  my-model:
    tokenizer: {model}
    pools:
      prefill: {{engine: vllm, role: prefill, replicas: 2, gpus: 2, model_path: {model}, env: {{A: "1$x"}}}}
      decode: {{engine: vllm, role: decode, replicas: 1, gpus: 4, model_path: {model}, args: [--max-num-seqs, "64"]}}
"""


def rendered(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return yaml.safe_load(compose_yaml(load(path).settings))


def inner_config(tmp_path: Path, compose: Any) -> Any:
    """Read the frontend's config as Compose hands it over: a doubled dollar is one."""
    path = tmp_path / "inner.yaml"
    path.write_text(compose["configs"]["cluster"]["content"].replace("$$", "$"))
    return load(path).settings


def checked_compose(compose: Any) -> None:
    """Check what Compose would refuse: keys of the specification, names that are defined, addresses of the network."""
    keys = {
        "image", "build", "command", "entrypoint", "configs", "ports", "environment", "volumes", "networks",
        "depends_on", "restart", "stop_grace_period", "healthcheck", "deploy", "ipc",
    }  # fmt: skip
    (subnet,) = [ip_network(each["subnet"]) for each in compose["networks"]["cluster"]["ipam"]["config"]]
    addresses = []
    for name, service in compose["services"].items():
        assert set(service) <= keys and service["image"], name
        assert set(service["networks"]) <= set(compose["networks"])
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert source.startswith(("/", "${")) or source in compose["volumes"], mount
        for mount in service.get("configs", ()):
            assert mount["source"] in compose["configs"]
        assert set(service.get("depends_on", ())) <= set(compose["services"])
        for entry in [*service.get("command", ()), *service.get("entrypoint", ())]:
            assert isinstance(entry, str) and "$" not in entry.replace("$$", "")
        if address := service["networks"]["cluster"].get("ipv4_address"):
            addresses.append(ip_address(address))
            assert service["healthcheck"]["test"][0] == "CMD" and address in service["healthcheck"]["test"][-1]
    assert len(set(addresses)) == len(addresses) and all(address in subnet for address in addresses)


def devices(service: Any) -> list[str]:
    if "deploy" not in service:
        return []
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    return list(device["device_ids"])


def test_a_pair_of_vllm_pools(tmp_path: Path) -> None:
    model = model_folder(tmp_path)
    compose = rendered(tmp_path, PAIR.format(model=model))
    checked_compose(compose)
    services = compose["services"]
    assert list(services) == ["frontend", "prefill-0", "prefill-1", "decode-0"]
    assert [devices(each) for each in services.values()] == [[], ["0", "1"], ["2", "3"], ["4", "5", "6", "7"]]
    decode = services["decode-0"]
    command = " ".join(decode["command"])
    assert decode["entrypoint"] == ["vllm"] and command.startswith(f"serve {model} ")
    for words in ("--tensor-parallel-size 4", "--max-num-seqs 64", "NixlConnector", '"topic": "kv@decode-0"'):
        assert words in command
    address = decode["networks"]["cluster"]["ipv4_address"]
    assert decode["environment"] == {
        "VLLM_HOST_IP": address, "VLLM_NIXL_SIDE_CHANNEL_HOST": address, "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
    }  # fmt: skip
    assert services["prefill-0"]["environment"]["A"] == "1$$x"
    assert f"{model}:{model}:ro" in decode["volumes"] and f"{model}:{model}:ro" in services["frontend"]["volumes"]
    assert set(services["frontend"]["depends_on"]) == {"prefill-0", "prefill-1", "decode-0"}


def test_the_frontends_config_names_the_engines(tmp_path: Path) -> None:
    compose = rendered(tmp_path, PAIR.format(model=model_folder(tmp_path)))
    settings = inner_config(tmp_path, compose)
    pools = settings.models["my-model"].pools
    for name, pool in pools.items():
        addresses = [
            service["networks"]["cluster"]["ipv4_address"]
            for engine, service in compose["services"].items()
            if engine.startswith(name)
        ]
        assert pool.urls == tuple(f"http://{address}:8000" for address in addresses) and pool.role == name
    assert settings.frontend.host == "0.0.0.0" and settings.frontend.port == 8000
    assert compose["services"]["frontend"]["ports"] == ["127.0.0.1:8000:8000"]
    assert compose["services"]["frontend"]["command"] == ["up", compose["services"]["frontend"]["configs"][0]["target"]]


def test_simulated_engines_need_no_gpu_and_get_their_files(tmp_path: Path) -> None:
    file = model_folder(tmp_path) / "config.json"
    timing = f"timing: {{kind: roofline, model: {file}, gpu: h200}}"
    text = f"models: {{m: {{tokenizer: 'builtin:sim', pools: {{main: {{replicas: 2, sim: {{{timing}}}}}}}}}}}"
    compose = rendered(tmp_path, text)
    checked_compose(compose)
    engine = compose["services"]["main-1"]
    assert engine["entrypoint"] == ["python"] and engine["command"][:2] == [
        "-m",
        "penstock_lab.sim.sim_process",
    ]
    assert engine["volumes"] == [f"{file}:{file}:ro"] and not devices(engine) and "environment" not in engine
    assert inner_config(tmp_path, compose).models["m"].pools["main"].urls[1].endswith(":8000")


def test_sglang_of_a_plan(tmp_path: Path) -> None:
    pools = "".join(
        f"      {role}: {{engine: sglang, role: {role}, handoff: bootstrap, gpus: 1, urls: ['http://{role}-0:30000']}}\n"
        for role in ("prefill", "decode")
    )
    compose = rendered(tmp_path, f"models:\n  Qwen/Qwen3-8B:\n    pools:\n{pools}")
    checked_compose(compose)
    command = " ".join(compose["services"]["prefill-0"]["command"])
    assert "--disaggregation-mode prefill" in command and "--page-size 16" in command and "--port 30000" in command
    pool = inner_config(tmp_path, compose).models["Qwen/Qwen3-8B"].pools["prefill"]
    (url,) = pool.urls
    assert pool.events == (f"{url}=tcp://{url.split('/')[2].split(':')[0]}:5557",)


def test_servers_elsewhere_stay_where_they_are(tmp_path: Path) -> None:
    text = "models: {m: {pools: {main: {engine: vllm, urls: ['http://gpu1:8000']}}}}"
    compose = rendered(tmp_path, text)
    checked_compose(compose)
    assert list(compose["services"]) == ["frontend"]
    assert inner_config(tmp_path, compose).models["m"].pools["main"].urls == ("http://gpu1:8000",)


def test_two_models_do_not_share_services(tmp_path: Path) -> None:
    text = "models: {a: {pools: {main: {replicas: 1}}}, b: {pools: {main: {replicas: 2}}}}"
    compose = rendered(tmp_path, text)
    checked_compose(compose)
    settings = inner_config(tmp_path, compose)
    assert len(settings.models["a"].pools["main"].urls) == 1 and len(settings.models["b"].pools["main"].urls) == 2


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ("{engine: llamacpp, model_path: x.gguf}", "llamacpp"),
        ("{engine: vllm, handoff: push}", "push"),
        ("{replicas: 500}", "too many"),
    ],
)
def test_what_can_be_no_service_is_named(tmp_path: Path, pool: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rendered(tmp_path, f"models: {{m: {{pools: {{main: {pool}}}}}}}")
