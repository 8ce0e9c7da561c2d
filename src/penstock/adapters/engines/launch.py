"""How is one engine process started? Its command line, its environment, and what is known of it beforehand."""

import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.adapters.engines.known import known_of, takes_priority
from penstock.config.cluster import PoolSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.steps import STATS_ENV

ENTRY_POINTS = "vllm.stat_logger_plugins"


KV_CONNECTORS = {"completed": "NixlConnector", "push": "NixlPushConnector"}
"""Hand-off protocol -> vLLM's connector for it."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one engine process.

    All that it prints goes to its log. It is ready when its first line on standard output is JSON with a ``url``, or,
    where ``url`` is known beforehand, when that answers (`penstock.adapters.engines.describe.ready`).
    """

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    """Added to the starter's own environment, and winning over it."""
    url: str | None = None
    start_timeout: float | None = None
    """Seconds; None leaves it to the starter."""
    card: dict[str, Any] = {}
    """Fields of the `WorkerCard` that whoever started it knows better than the server."""


def launch_of(
    worker: str,
    model: str,
    pool: PoolSettings,
    *,
    port: int,
    gpus: Sequence[int] = (),
    host: str = "127.0.0.1",
) -> Launch:
    """Return how to start one engine of a pool.

    Args:
        worker: its id; it appears in the topic of its events.
        model: the name under which it serves.
        port: where it listens; a simulated engine also takes 0, any free one.
        gpus: indices of the GPUs that it may use; empty leaves that to the environment.
        host: address of this machine on which it listens, with its events and statistics.
    Raises:
        ConfigError: engines of this kind are not started here.
    """
    if pool.engine == "sim":
        return _sim(model, pool, port, host)
    if pool.engine == "vllm":
        return _vllm(worker, model, pool, port, gpus, host)
    raise ConfigError(
        f"engines of kind {pool.engine} are not started here", hint="start the server yourself and give its URL"
    )


def _sim(model: str, pool: PoolSettings, port: int, host: str) -> Launch:
    settings = json.dumps(msgspec.to_builtins(pool.sim))
    module = "penstock.adapters.engines.sim.process"
    return Launch(
        argv=(
            *(sys.executable, "-m", module, "--model", model, "--host", host, "--port", str(port)),
            *("--settings", settings),
            *(() if pool.role in ("aggregated", "encode") else ("--role", pool.role)),
        ),
        card={
            **known_of(pool),
            "engine": "sim",
            "max_seqs": pool.sim.max_seqs,
            "max_batched_tokens": pool.sim.max_batched_tokens,
        },
    )


def _vllm(worker: str, model: str, pool: PoolSettings, port: int, gpus: Sequence[int], host: str) -> Launch:
    own = pool.vllm
    if port == 0:
        raise ConfigError("vLLM does not say which port it took", hint="give it a free port")
    flags: dict[str, str | None] = {
        "--host": host,
        "--port": str(port),
        "--served-model-name": model,
        "--enable-prefix-caching": None,
        "--enable-prompt-tokens-details": None,  # usage then tells the cached tokens
        "--enable-request-id-headers": None,
        "--enable-server-load-tracking": None,
        "--shutdown-timeout": str(round(own.shutdown_timeout)),
    }
    env = {"VLLM_HOST_IP": host}  # its event sockets then bind to that address only
    card: dict[str, Any] = {**known_of(pool), "engine": "vllm"}
    if takes_priority(pool):
        flags["--scheduling-policy"] = "priority"  # as first come, first served where no request has one
    for flag, number in (
        ("--block-size", pool.block_size),
        ("--num-gpu-blocks-override", pool.kv_blocks),
        ("--max-model-len", pool.max_len),
        ("--max-num-batched-tokens", pool.max_batched_tokens),
    ):
        if number is not None:
            flags[flag] = str(number)
    if own.kv_events:
        # The star makes it bind; an address would make it connect. With port 0 it takes free ports, one more for each
        # data-parallel rank, and tells them at /kv_event_sources.
        flags["--kv-events-config"] = json.dumps(
            {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": "tcp://*:0",
                "replay_endpoint": "tcp://*:0",
                "topic": f"kv@{worker}",
            }
        )
    if pool.role in ("prefill", "decode") or pool.handoff is not None:
        # Both roles: `penstock flip` changes what it does while it runs.
        flags["--kv-transfer-config"] = json.dumps(
            {"kv_connector": KV_CONNECTORS[pool.handoff or "completed"], "kv_role": "kv_both"}
        )
        # Where the others fetch from; it also takes the ports behind it, one for each further rank.
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        card["bootstrap"] = f"{host}:{env['VLLM_NIXL_SIDE_CHANNEL_PORT']}"
    told = own.iteration_stats
    if told is None:
        told = plugin_installed(own.command, {**os.environ, **own.env})
    if told:
        flags["--enable-logging-iteration-details"] = None
        env[STATS_ENV] = f"tcp://{host}:{free_port()}"
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
        if len(gpus) > 1:
            flags["--tensor-parallel-size"] = str(len(gpus))
    env.update(own.env)
    if env.get(STATS_ENV):
        card["stats"] = env[STATS_ENV]
    given = {_plain(word.partition("=")[0]) for word in own.args if word.startswith("-")}
    if "scheduling-policy" in given:
        card.pop("labels", None)  # whether it schedules by priority is the operator's affair now
    words: list[str] = []
    for flag, value in flags.items():
        if _plain(flag) not in given:
            words += [flag] if value is None else [flag, value]
    return Launch(
        argv=(own.command, "serve", own.model or model, *words, *own.args),
        env=env,
        url=f"http://{host}:{port}",
        start_timeout=own.start_timeout,
        card=card,
    )


def plugin_installed(command: str, env: Mapping[str, str]) -> bool:
    """Tell whether the environment of a program has our statistics plug-in, without running it.

    Where it has not, vLLM must not be asked for the details of its passes: it would log a line for each of them.
    """
    program = shutil.which(command, path=env.get("PATH"))
    folders = [Path(entry) for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if program is not None:
        # Not resolved: the program of a virtual environment may be a link, and its folder is what counts.
        folders += sorted(Path(program).absolute().parent.parent.glob("lib/python3*/site-packages"))
    for folder in folders:
        for entry_points in folder.glob("penstock-*.dist-info/entry_points.txt"):
            try:
                if ENTRY_POINTS in entry_points.read_text():
                    return True
            except OSError:
                continue
    return False


def _plain(flag: str) -> str:
    """Return a flag's name, so that ``--no-enable-x`` and ``--a-b.c`` meet ``--enable-x`` and ``--a-b``."""
    name = flag.lstrip("-").replace("_", "-").partition(".")[0]
    return "tensor-parallel-size" if name == "tp" else name.removeprefix("no-")


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
