"""Compose file: a config's engines and its frontend as services of Docker Compose on one host.

Each engine has an address of its own in one network: vLLM's event sockets and NIXL's side channel bind to an address
and tell others the same one, which a name could not be. The frontend's config is the given one, with those addresses as
URLs.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import yaml

from penstock.adapters.engines.launch import launch_of
from penstock.config.reading.load import resolved_yaml
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.config.worker_names import pool_prefix
from penstock.kernel.errors import ConfigError
from penstock.kernel.pass_report import STATS_ENV
from penstock.kernel.plurals import counted
from penstock_lab.config.timing_files import timing_files
from penstock_lab.engine.settings import SimSettings

SUBNET = "172.31.71."
"""Network of the services. Any private one does; this is seldom taken."""
FIRST_ADDRESS, LAST_ADDRESS = 10, 250
PORT = 8000
NIXL_PORT = 5600
"""vLLM's default: each engine has an address of its own, so that all may have the same port."""
EVENTS_PORT = 5557
CONFIG_PATH = "/etc/penstock/penstock.yaml"
RUNS = "/var/lib/penstock/runs"
IMAGES = {
    "sim": "${PENSTOCK_IMAGE:-penstock}",
    "vllm": "${VLLM_IMAGE:-vllm/vllm-openai:latest}",
    "sglang": "${SGLANG_IMAGE:-lmsysorg/sglang:latest}",
}
"""Images by kind of engine; the environment of ``docker compose`` names others."""
DOCKERFILE = """\
FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir /src
ENTRYPOINT ["penstock"]
"""
CACHE = "${HF_HOME:-${HOME}/.cache/huggingface}:/root/.cache/huggingface"
"""Downloaded checkpoints, shared with the host."""
HEALTH_START = "900s"
"""Longest start of an engine on a GPU: a large checkpoint takes minutes to load, more to download."""


def compose_yaml(settings: ClusterSettings) -> str:
    """Return the compose file of a cluster.

    Raises:
        ConfigError: a pool's engines can't be put into containers, or there are too many.
    """
    engines = dict(_composed_engines(settings))
    if len(engines) > LAST_ADDRESS - FIRST_ADDRESS:
        raise ConfigError(f"{len(engines)} engines are too many for one host", hint="render fewer replicas")
    urls = {name: entry.url for name, entry in engines.items()}
    services = {"frontend": _frontend_service(settings, urls), **{name: each.service for name, each in engines.items()}}
    document = {
        "name": "penstock",
        "services": services,
        "networks": {"cluster": {"ipam": {"config": [{"subnet": f"{SUBNET}0/24"}]}}},
        "configs": {"cluster": {"content": resolved_yaml(_with_urls(settings, urls)).replace("$", "$$")}},
        "volumes": {"runs": {}},
    }
    gpus = sum(len(each.gpus) for each in engines.values())
    head = (
        f"# {counted(len(engines), 'engine')}"
        + (f" on GPUs 0 to {gpus - 1} of one host" if gpus else ", no GPU")
        + "; start it with\n"
        "#   PENSTOCK_SOURCE=CHECKOUT docker compose up --build\n"
        "# It needs Compose 2.23.1 or newer (configs with content)"
        + (" and the NVIDIA Container Toolkit.\n" if gpus else ".\n")
    )
    return head + yaml.dump(document, Dumper=BlockDumper, sort_keys=False, width=120, allow_unicode=True)


class BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, and the same list twice rather than a reference to it."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _block_scalar(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


BlockDumper.add_representer(str, _block_scalar)


class ComposeEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as a service."""

    url: str
    gpus: tuple[int, ...]
    service: Mapping[str, Any]


def _composed_engines(settings: ClusterSettings) -> Iterator[tuple[str, ComposeEngine]]:
    """Yield each engine that is started, by its worker's name; servers that run elsewhere stay where they are."""
    number, first = FIRST_ADDRESS, 0
    for model, entry in settings.models.items():
        for pool_name, pool in entry.pools.items():
            prefix = f"{pool_prefix(model, len(settings.models))}{pool_name}"
            if pool.urls and not _runs_our_image(pool, pool_name):
                continue
            if pool.engine not in IMAGES or pool.handoff == "push":
                raise ConfigError(
                    f"pool {pool_name} of {model} is {pool.engine}, handoff {pool.handoff}: no service is made of that",
                    hint=f"engines may be {', '.join(IMAGES)} without push, or servers in urls",
                )
            count = 0 if pool.engine == "sim" else 1 if pool.gpus is None else pool.gpus
            for replica in range(len(pool.urls) or pool.replicas):
                gpus = tuple(range(first, first + count))
                address = f"{SUBNET}{number}"
                port = urlsplit(pool.urls[replica]).port or PORT if pool.urls else PORT
                name = f"{prefix}-{replica}"
                service = _engine_service(name, model, pool, address, port, gpus)
                yield name, ComposeEngine(url=f"http://{address}:{port}", gpus=gpus, service=service)
                number, first = number + 1, first + count


def _runs_our_image(pool: PoolSettings, pool_name: str) -> bool:
    """Return whether a pool's URLs name services of this file, as `penstock plan` writes them for SGLang."""
    return all(urlsplit(url).hostname == f"{pool_name}-{n}" for n, url in enumerate(pool.urls))


def _engine_service(
    name: str, model: str, pool: PoolSettings, address: str, port: int, gpus: Sequence[int]
) -> Mapping[str, Any]:
    if pool.engine == "sglang":
        argv, env = _sglang_words(model, pool, address, port), dict[str, str]()
    else:
        # The image's program counts, so that none of this machine is looked for; and ports are the container's own.
        own = {"PATH": "", "PYTHONPATH": "", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(NIXL_PORT)}
        started = msgspec.structs.replace(pool, env={**pool.env, **own}, command=None)
        launch = launch_of(name, model, started, port=port, gpus=gpus, host=address)
        argv = ["python", *launch.argv[1:]] if pool.engine == "sim" else list(launch.argv)
        handoff = any(key.startswith("VLLM_NIXL") for key in launch.env if key not in own)
        inner = {"PATH", "PYTHONPATH", STATS_ENV, "CUDA_VISIBLE_DEVICES", *(() if handoff else own)}
        env = {key: value for key, value in launch.env.items() if key not in inner}
    service: dict[str, object] = {"image": IMAGES[pool.engine]}
    service |= {"entrypoint": _escaped_words(argv[:1]), "command": _escaped_words(argv[1:])}
    if env:
        service["environment"] = {key: value.replace("$", "$$") for key, value in env.items()}
    volumes = [f"{path}:{path}:ro" for path in _mounted_files(pool)]
    if gpus:
        volumes.append(CACHE)
        device = {"driver": "nvidia", "device_ids": [str(gpu) for gpu in gpus], "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
        service["ipc"] = "host"  # processes of one engine share memory beyond a container's 64 MB
    if volumes:
        service["volumes"] = volumes
    probe = f"import urllib.request; urllib.request.urlopen('http://{address}:{port}/health', timeout=5)"
    python = "python3" if gpus else "python"
    service |= {
        "networks": {"cluster": {"ipv4_address": address}},
        "restart": "unless-stopped",
        "stop_grace_period": "30s",
        "healthcheck": {
            "test": ["CMD", python, "-c", probe],
            "interval": "5s",
            "timeout": "6s",
            "retries": 3,
            "start_period": HEALTH_START if gpus else "60s",
        },
    }
    return service


def _sglang_words(model: str, pool: PoolSettings, address: str, port: int) -> list[str]:
    words = ["python3", "-m", "sglang.launch_server", "--model-path", pool.model_path or model]
    words += ["--served-model-name", model, "--host", address, "--port", str(port), "--enable-cache-report"]
    words += ["--page-size", str(pool.block_size or 16)]
    words += ["--kv-events-config", f'{{"publisher": "zmq", "endpoint": "tcp://*:{EVENTS_PORT}"}}']
    if pool.role in ("prefill", "decode"):
        words += ["--disaggregation-mode", pool.role]
    return [*words, *pool.args]


def _mounted_files(pool: PoolSettings) -> list[str]:
    """Return the files of this host that an engine reads, at the same paths in its container."""
    named = timing_files(pool.sim.timing).values() if pool.engine == "sim" else [pool.model_path or ""]
    return [str(Path(path).resolve()) for path in named if path and Path(path).exists()]


def _frontend_service(settings: ClusterSettings, urls: Mapping[str, str]) -> Mapping[str, Any]:
    tokenizers = [model.tokenizer for model in settings.models.values() if model.tokenizer]
    folders = [str(Path(path).resolve()) for path in tokenizers if Path(path).exists()]
    return {
        "image": IMAGES["sim"],
        "build": {"context": "${PENSTOCK_SOURCE:-.}", "dockerfile_inline": DOCKERFILE},
        "command": ["up", CONFIG_PATH],
        "configs": [{"source": "cluster", "target": CONFIG_PATH}],
        # Only this host reaches it: whoever opens it to others sets API keys first.
        "ports": [f"127.0.0.1:{settings.frontend.port or PORT}:{PORT}"],
        "environment": ["PENSTOCK_FRONTEND__SECURITY__API_KEYS"],
        "volumes": [f"runs:{RUNS}", *(f"{folder}:{folder}:ro" for folder in folders)],
        "networks": {"cluster": {}},
        "depends_on": {name: {"condition": "service_healthy"} for name in urls},
        "restart": "unless-stopped",
        "stop_grace_period": "70s",
    }


def _with_urls(settings: ClusterSettings, urls: Mapping[str, str]) -> ClusterSettings:
    """Return the settings of a frontend whose engines are services already."""
    replace = msgspec.structs.replace
    models: dict[str, ModelSettings] = {}
    for model, entry in settings.models.items():
        pools = {}
        for pool_name, pool in entry.pools.items():
            prefix = f"{pool_prefix(model, len(settings.models))}{pool_name}-"
            own = tuple(
                url for name, url in urls.items() if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
            )
            events = tuple(f"{url}=tcp://{urlsplit(url).hostname}:{EVENTS_PORT}" for url in own)
            if own:
                # What only a start reads stays out: the engines have it, and its files are in their containers.
                pool = replace(pool, urls=own, args=(), gpus=None, command=None, sim=SimSettings())
            if own and pool.engine == "sglang":
                pool = replace(pool, events=events)
            pools[pool_name] = pool
        models[model] = replace(entry, pools=pools)
    security = replace(settings.frontend.security, insecure=True)  # in the container; the port is the host's loopback
    front = replace(settings.frontend, host="0.0.0.0", port=PORT, security=security)
    return replace(settings, models=models, frontend=front, runs=replace(settings.runs, dir=RUNS))


def _escaped_words(words: Sequence[str]) -> list[str]:
    """Return words in which Compose sees no variable."""
    return [word.replace("$", "$$") for word in words]
