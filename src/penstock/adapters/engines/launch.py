"""Launch of one engine process: its command line, its environment, and the card fields known beforehand."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock import extension
from penstock.adapters.engines.dialects.kv_transfer_protocol import (
    LEASE,
    LEASE_STARTED,
    LEASE_USUAL,
    configured_lease,
)
from penstock.adapters.engines.pool_overrides import overrides_of, parses_itself, takes_priority, template_flag
from penstock.adapters.engines.sleep_mode import SLEEP_ENV, SLEEP_FLAG
from penstock.adapters.engines.start_log import StartLog, start_log_of
from penstock.adapters.engines.vllm_embeddings import ec_transfer_config
from penstock.adapters.listen_address import free_port
from penstock.config.derived.engine_flags import PP_SIZE, TP_SIZE, flag_value, flags_given, plain_flag
from penstock.config.settings.cluster_settings import START_TIMEOUT, PoolSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.pass_report import STATS_ENV
from penstock.kernel.values import JsonObject

SERVER_START_TIMEOUT = 600.0
"""Seconds that a server may take to start: large checkpoints take minutes."""
SHUTDOWN_TIMEOUT = "20"
"""Seconds for which vLLM's running requests may go on once it was told to end; it refuses new ones."""
HANDOFF_PORT = 5600
"""Where an engine in a pod meets those that fetch its KV: vLLM's own default."""
EVENTS_PORT, REPLAY_PORT = 5557, 5558
"""Where an SGLang in a pod publishes; elsewhere it takes free ports."""
ENTRY_POINTS = "vllm.stat_logger_plugins"

KV_CONNECTORS = {"completed": "NixlConnector", "push": "NixlPushConnector"}
"""Hand-off protocol -> vLLM's connector for it."""


class EngineAddition(msgspec.Struct, frozen=True, kw_only=True):
    """What a process beside a vLLM needs of that one's start: flags, environment, labels of its card.

    ``transfer``: a KV connector, as ``--kv-transfer-config`` has it.
    """

    flags: dict[str, str | None] = {}
    env: dict[str, str] = {}
    labels: dict[str, str] = {}
    transfer: JsonObject | None = None


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one engine process.

    All that it prints goes to its log. It is ready when its first line on standard output is JSON with a ``url``, or,
    where ``url`` is known beforehand, when that answers (`penstock.adapters.engines.describe.ready`).
    """

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    """Added to the starter's own environment, and winning over it."""
    url: str | None = None
    start_timeout: float = START_TIMEOUT
    """Seconds, where supervise.start_timeout is not set."""
    card: dict[str, Any] = {}
    """Fields of the `WorkerCard` that its starter knows better than the server."""

    def differences(self, command: Sequence[str]) -> list[str]:
        """Return the flags in which an engine that a command started is not what this one starts.

        Another interpreter, which another environment of Penstock has, does not count, nor do settings of a simulated
        engine that an earlier or later release did not have, as long as they are at their defaults.
        """
        before, now = _flags(command), _flags(self.argv)
        return [name for name in dict.fromkeys((*now, *before)) if before.get(name, ()) != now.get(name, ())]

    def start_log(self) -> StartLog:
        """Return a reader of what one start of it prints."""
        return start_log_of(self.card.get("engine", ""))


def launch_of(
    worker: str,
    model: str,
    pool: PoolSettings,
    *,
    port: int,
    gpus: Sequence[int] = (),
    host: str = "127.0.0.1",
    additions: Sequence[EngineAddition] = (),
    in_pod: bool = False,
) -> Launch:
    """Return how to start one engine of a pool.

    Args:
        worker: its id; it appears in the topic of its events.
        model: the name under which it serves.
        port: where it listens; a simulated engine also takes 0, any free one.
        gpus: indices of the GPUs that it may use; empty leaves that to the environment.
        host: address of this machine on which it listens, with its events and statistics.
        additions: of the processes beside it.
        in_pod: it runs with ports and files of its own, so that nothing is looked for on this machine.
    Raises:
        ConfigError: engines of this kind are not started here.
    """
    if pool.engine == "vllm":
        return _vllm(worker, model, pool, port, gpus, host, additions, in_pod)
    if pool.engine == "sglang":
        return _sglang(worker, model, pool, port, gpus, host, in_pod)
    if pool.engine == "llamacpp":
        return _llamacpp(model, pool, port, gpus, host)
    if extension.offers("engine", pool.engine):
        started: Launch = extension.entry("engine", pool.engine)(model, pool, port, host)
        return started
    raise ConfigError(
        f"engines of kind {pool.engine} are not started here", hint="start the server yourself and give its URL"
    )


def _vllm(
    worker: str,
    model: str,
    pool: PoolSettings,
    port: int,
    gpus: Sequence[int],
    host: str,
    additions: Sequence[EngineAddition],
    in_pod: bool,
) -> Launch:
    if port == 0:
        raise ConfigError("vLLM does not say which port it took", hint="give it a free port")
    flags: dict[str, str | None] = {
        "--host": host,
        "--port": str(port),
        "--served-model-name": model,
        "--enable-prefix-caching": None,
        "--enable-prompt-tokens-details": None,  # usage then reports the cached tokens
        "--enable-request-id-headers": None,
        "--enable-server-load-tracking": None,
        "--shutdown-timeout": SHUTDOWN_TIMEOUT,
    }
    env = {"VLLM_HOST_IP": host}  # its event sockets then bind to that address only
    card: dict[str, Any] = {**overrides_of(pool), "engine": "vllm"}
    if takes_priority(pool):
        flags["--scheduling-policy"] = "priority"  # as first come, first served where no request has one
    for flag, number in (
        ("--block-size", pool.block_size),
        ("--num-gpu-blocks-override", pool.kv_blocks),
        ("--max-model-len", pool.max_model_len),
        ("--max-num-batched-tokens", pool.max_num_batched_tokens),
    ):
        if number is not None:
            flags[flag] = str(number)
    # The star makes it bind; an address would make it connect. With port 0 it takes free ports, one more for each
    # data-parallel rank, and lists them at /kv_event_sources.
    flags["--kv-events-config"] = json.dumps(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:0",
            "replay_endpoint": "tcp://*:0",
            "topic": f"kv@{worker}",
        }
    )
    if pool.max_cpu_loras is not None:
        flags |= {
            "--enable-lora": None,
            "--max-loras": str(min(pool.max_loras, pool.max_cpu_loras)),
            "--max-cpu-loras": str(pool.max_cpu_loras),
            "--max-lora-rank": str(pool.max_lora_rank),
        }
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if pool.tool_parser is not None and parses_itself(pool, pool.tool_parser):
        flags |= {"--enable-auto-tool-choice": None, "--tool-call-parser": pool.tool_parser}
    if pool.reasoning_parser is not None and parses_itself(pool, pool.reasoning_parser):
        flags["--reasoning-parser"] = pool.reasoning_parser
    if pool.sleeping:
        flags[SLEEP_FLAG] = None
        env |= SLEEP_ENV
    flags |= template_flag(pool)
    transfer: dict[str, object] = {}
    for addition in additions:
        flags |= addition.flags
        env |= addition.env
        if addition.labels:
            card["labels"] = {**card.get("labels", {}), **addition.labels}
        transfer = joined_transfers(transfer, addition.transfer) if addition.transfer is not None else transfer
    if pool.role == "encode":
        del flags["--enable-prefix-caching"]  # it computes no KV
        flags["--no-enable-prefix-caching"] = None
    if pool.embeddings is not None:
        own = not in_pod and plugin_installed(pool.program, {**os.environ, **pool.env})
        encoder_cache = ec_transfer_config(pool.role, pool.embeddings, pool.embeddings_max, own=own)
        flags["--ec-transfer-config"] = json.dumps(encoder_cache)
    if pool.role in ("prefill", "decode") or pool.handoff is not None:
        # Both roles: `penstock flip` changes what it does while it runs.
        handoff: dict[str, object] = {
            "kv_connector": KV_CONNECTORS[pool.handoff or "completed"],
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_STARTED},
        }
        card["labels"] = {**card.get("labels", {}), LEASE: str(LEASE_STARTED)}
        transfer = joined_transfers(handoff, transfer)
        # Other engines fetch KV from here; it also takes the ports behind it, one for each further rank.
        env |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(HANDOFF_PORT if in_pod else free_port()),
        }
        card["bootstrap"] = f"{host}:{env['VLLM_NIXL_SIDE_CHANNEL_PORT']}"
    scheme = "http" if flag_value(pool.args, "ssl-certfile") is None else "https"
    if transfer:
        flags["--kv-transfer-config"] = json.dumps(transfer)
    if not in_pod and plugin_installed(pool.program, {**os.environ, **pool.env}):
        flags["--enable-logging-iteration-details"] = None
        env[STATS_ENV] = f"tcp://{host}:{free_port()}"
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
        if len(gpus) > 1:
            flags["--tensor-parallel-size"] = str(len(gpus))
    env.update(pool.env)
    if env.get(STATS_ENV):
        card["stats"] = env[STATS_ENV]
    given = {plain_flag(arg.partition("=")[0]) for arg in pool.args if arg.startswith("-")}
    labels = dict(card.get("labels", {}))
    if "kv-transfer-config" in given:
        labels[LEASE] = pool.labels.get(LEASE, str(_own_lease(pool.args)))
    if "scheduling-policy" in given:
        labels.pop("priority", None)  # the operator decides now whether it schedules by priority
    seqs = flag_value(pool.args, "max-num-seqs")
    if seqs is not None and seqs.isdecimal():
        card["max_num_seqs"] = int(seqs)  # the server itself does not report it
    for label, flag in ((TP_SIZE, "tensor-parallel-size"), (PP_SIZE, "pipeline-parallel-size")):
        size = flag_value(pool.args, flag) or flags.get(f"--{flag}")
        if size is not None and size != "1":
            labels.setdefault(label, size)
    if labels or "labels" in card:
        card["labels"] = labels
    return Launch(
        argv=(pool.program, "serve", pool.model_path or model, *_flag_arguments(flags, pool.args), *pool.args),
        env=env,
        url=f"{scheme}://{host}:{port}",
        start_timeout=SERVER_START_TIMEOUT,
        card=card,
    )


def joined_transfers(first: JsonObject, second: JsonObject) -> JsonObject:
    """Return one transfer configuration of two, such as of a hand-off and of tiers; the first is asked first."""
    if not first or not second:
        return first or second
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [first, second]},
    }


def _sglang(
    worker: str, model: str, pool: PoolSettings, port: int, gpus: Sequence[int], host: str, in_pod: bool
) -> Launch:
    if port == 0:
        raise ConfigError("SGLang does not say which port it took", hint="give it a free port")
    events, replay = (EVENTS_PORT, REPLAY_PORT) if in_pod else (free_port(), free_port())
    # A star makes it bind. Without replay, what it cached before we listen would stay unknown.
    published = {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": f"kv@{worker}",
    }
    flags: dict[str, str | None] = {
        "--model-path": pool.model_path or model,
        "--served-model-name": model,
        "--host": host,
        "--port": str(port),
        "--kv-events-config": json.dumps(published),
        "--enable-metrics": None,
        "--enable-cache-report": None,  # usage then reports the cached tokens
    }
    for flag, value in (
        ("--tensor-parallel-size", len(gpus) if len(gpus) > 1 else None),
        ("--page-size", pool.block_size),
        ("--context-length", pool.max_model_len),
        ("--chunked-prefill-size", pool.max_num_batched_tokens),
        ("--tool-call-parser", pool.tool_parser if parses_itself(pool, pool.tool_parser) else None),
        ("--reasoning-parser", pool.reasoning_parser if parses_itself(pool, pool.reasoning_parser) else None),
        ("--disaggregation-mode", pool.role if pool.role in ("prefill", "decode") else None),
        ("--disaggregation-bootstrap-port", free_port() if pool.role == "prefill" and not in_pod else None),
    ):
        if value is not None:
            flags[flag] = str(value)
    if takes_priority(pool):
        flags["--enable-priority-scheduling"] = None
    if pool.max_cpu_loras is not None:
        flags |= {
            "--enable-lora": None,
            "--max-loras-per-batch": str(min(pool.max_loras, pool.max_cpu_loras)),
            "--max-loaded-loras": str(pool.max_cpu_loras),
            "--max-lora-rank": str(pool.max_lora_rank),
            "--lora-target-modules": "all",  # it must know before the first one comes
        }
    flags |= template_flag(pool)
    card: JsonObject = {**overrides_of(pool), "engine": "sglang"}
    if len(gpus) > 1:
        card["labels"] = {TP_SIZE: str(len(gpus)), **card.get("labels", {})}
    env = {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus)} if gpus else {}
    return Launch(
        argv=(pool.program, "-m", "sglang.launch_server", *_flag_arguments(flags, pool.args), *pool.args),
        env={**env, **pool.env},
        url=f"http://{host}:{port}",
        start_timeout=SERVER_START_TIMEOUT,
        card=card,
    )


def _llamacpp(model: str, pool: PoolSettings, port: int, gpus: Sequence[int], host: str) -> Launch:
    if port == 0:
        raise ConfigError("llama.cpp does not say which port it took", hint="give it a free port")
    file = str(Path(pool.model_path or "").expanduser())
    flags: dict[str, str | None] = {"--host": host, "--port": str(port), "--model": file}
    card: dict[str, Any] = {**overrides_of(pool), "engine": "llamacpp"}
    if Path(pool.program).name.startswith("llama-server"):
        argv: tuple[str, ...] = (pool.program,)
        flags |= {"--alias": model, "--metrics": None, "--slots": None, **template_flag(pool)}
        context = {"--ctx-size": pool.max_model_len}
        if parses_itself(pool, pool.tool_parser) or template_flag(pool):
            flags["--jinja"] = None  # it then reads calls by the model's own template, whatever the format
        if parses_itself(pool, pool.reasoning_parser):
            flags["--reasoning-format"] = "deepseek"  # its name for reasoning in a field of its own
    else:  # the server of the Python package
        argv = (pool.program, "-m", "llama_cpp.server")
        # It serves one request at a time, and by default drops the running one when the next one comes.
        flags |= {"--model_alias": model, "--interrupt_requests": "false"}
        context = {"--n_ctx": pool.max_model_len or 0}  # 0 is the model's own
        card["max_num_seqs"] = 1
    flags |= {flag: str(number) for flag, number in context.items() if number is not None}
    env = {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus)} if gpus else {}
    return Launch(
        argv=(*argv, *_flag_arguments(flags, pool.args), *pool.args),
        env={**env, **pool.env},
        url=f"http://{host}:{port}",
        start_timeout=SERVER_START_TIMEOUT,
        card=card,
    )


def _flag_arguments(flags: Mapping[str, str | None], args: Sequence[str]) -> list[str]:
    """Return flags as words, without those that the operator gives as well."""
    given = {plain_flag(arg.partition("=")[0]) for arg in args if arg.startswith("-")}
    words: list[str] = []
    for flag, value in flags.items():
        if plain_flag(flag) not in given:
            words += [flag] if value is None else [flag, value]
    return words


def plugin_installed(command: str, env: Mapping[str, str], group: str = ENTRY_POINTS) -> bool:
    """Return whether the environment of a program has a plug-in of Penstock, without running it.

    Without that for statistics, vLLM must not be asked for the details of its passes: it would log a line for each.
    """
    program = shutil.which(command, path=env.get("PATH"))
    folders = [Path(entry) for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if program is not None:
        # Not resolved: the program of a virtual environment may be a link, and its folder is what counts.
        folders += sorted(Path(program).absolute().parent.parent.glob("lib/python3*/site-packages"))
    for folder in folders:
        for entry_points in folder.glob("penstock-*.dist-info/entry_points.txt"):
            try:
                if group in entry_points.read_text():
                    return True
            except OSError:
                continue
    return False


def _flags(argv: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return a command's flags with their words, and what stands before them as its program."""
    flags: dict[str, tuple[str, ...]] = {}
    name = "the program"
    for word in argv[1:] if argv[1:2] == ["-m"] or argv[1:2] == ("-m",) else argv:
        if word.startswith("-"):
            name = word
            flags[name] = (*flags.get(name, ()), "")
        elif name == "--settings":
            flags |= {f"--settings {knob}": (value,) for knob, value in _sim_settings(word)}
        else:
            flags[name] = (*flags.get(name, ()), word)
    return flags


def _sim_settings(text: str) -> Iterator[tuple[str, str]]:
    """Yield every knob of a simulated engine's settings, as this release has them."""
    try:
        left = [("", msgspec.to_builtins(msgspec.json.decode(text, type=extension.settings_group("sim"))))]
    except msgspec.DecodeError:
        left = [("", text)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{path}.{name}" if path else name, part) for name, part in value.items()]
        else:
            yield path, str(value)


def _own_lease(args: Sequence[str]) -> int:
    """Return the lease that a command line of vLLM's gives its hand-offs, as JSON or by a flag of its own."""
    config: str | None = None
    for name, value in flags_given(args):
        if plain_flag(name) == "kv-transfer-config" and "." not in name:
            config = value or ""
        elif plain_flag(name) == "kv-transfer-config" and name.replace("-", "_").endswith("kv_lease_duration"):
            return configured_lease(json.dumps({"kv_connector_extra_config": {"kv_lease_duration": value}}))
    return LEASE_USUAL if config is None else configured_lease(config)
