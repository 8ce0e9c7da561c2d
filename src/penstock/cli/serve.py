"""Command ``penstock serve``: serves one model with engines of this machine, without a config file."""

import json
from pathlib import Path
from typing import Any

import click

from penstock.cli.shared.option_values import Amount
from penstock.cli.shared.settings_flags import SettingsCommand, load_to_start, pool_overrides, settings_options

EPILOG = """\b
Examples:
  penstock serve sim --replicas 2
  penstock serve my-model --replicas 8 --sim.kv_blocks 4096 --sim.timing.speed_up 10
  penstock serve ./my-model --engine vllm
  penstock serve org/my-model --engine vllm --replicas 2 --args='--dtype,bfloat16'
  penstock serve org/my-model --engine vllm --tools hermes --reasoning qwen3
  penstock serve ./my-model --engine vllm --adapters ./adapters
  penstock serve org/my-model --engine vllm --host-cache 64GiB --disk-cache /mnt/kv
  penstock serve ./my-model --engine sglang --command ~/sglang/bin/python
  penstock serve my-model.gguf --engine llamacpp --command ~/llama.cpp/llama-server

Servers of other engines that run already are taken in with 'penstock attach'.
"""
BYTES = Amount("bytes")
DISK_SHARE = 4
"""Disk for KV blocks, in times of the host memory for them: a tier below that is no larger holds nothing more."""
REPLICAS = {"sim": 4, "vllm": 1, "sglang": 1, "llamacpp": 1}
"""Engines to start where no number is given."""


@click.command(
    "serve", cls=SettingsCommand, pool=True, epilog=EPILOG, short_help="Serve one model with engines of this machine."
)
@click.argument("model")
@click.option("--engine", type=click.Choice(sorted(REPLICAS)), default="sim", show_default=True, help="What to start.")
@click.option("--served-name", "served", help="Name that clients ask for; by default MODEL, or its folder's name.")
@click.option("--replicas", type=click.IntRange(1, 1024), help="Engines to start.  [default: 4 of sim, 1 of others]")
@click.option("--host-cache", type=BYTES, help="Host memory of each engine for KV blocks, such as 64GiB.")
@click.option(
    "--disk-cache",
    "disk_dirs",
    multiple=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for KV blocks below host memory; once for each disk.",
)
@click.option(
    "--disk-cache-bytes",
    type=BYTES,
    help=f"Disk of each engine for KV blocks.  [default: {DISK_SHARE} times the host memory]",
)
@click.option(
    "--adapters",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder whose subfolders are LoRA adapters, by name.",
)
@click.option("--tools", "tool_parser", help="Format of the model's tool calls, such as hermes.")
@click.option("--reasoning", "reasoning_parser", help="Format of the model's reasoning, such as qwen3.")
@click.option("--tokenizer", help="Folder or tokenizer.json of the model.  [default: the model's own]")
@settings_options
def command(
    model: str,
    engine: str,
    served: str | None,
    replicas: int | None,
    host_cache: float | None,
    disk_dirs: tuple[Path, ...],
    disk_cache_bytes: float | None,
    adapters: Path | None,
    tool_parser: str | None,
    reasoning_parser: str | None,
    tokenizer: str | None,
    overrides: tuple[str, ...],
) -> int:
    """Serve MODEL with engines of this machine: for vllm and sglang the folder or the hub id of a checkpoint, for
    llamacpp a GGUF file."""
    pool: dict[str, Any] = {"engine": engine, "replicas": replicas or REPLICAS[engine]}
    if host_cache is not None or disk_dirs:
        pool["cache"] = {"host": int(host_cache or 0), "disk_dirs": [str(folder.resolve()) for folder in disk_dirs]}
        if disk_dirs:
            pool["cache"]["disk"] = int(disk_cache_bytes or DISK_SHARE * (host_cache or 0))
    pool |= {"tool_parser": tool_parser} if tool_parser is not None else {}
    pool |= {"reasoning_parser": reasoning_parser} if reasoning_parser is not None else {}
    name = model
    if engine in ("vllm", "sglang"):
        from penstock.cli.shared.checkpoint import checkpoint_of

        checkpoint = checkpoint_of(model)
        name, tokenizer = checkpoint.name, tokenizer or checkpoint.tokenizer
        pool["model_path"] = checkpoint.model
    elif engine == "llamacpp":
        pool["model_path"] = str(Path(model).expanduser().resolve())
        name = Path(model).stem
    name = served or name
    served_model: dict[str, object] = {
        "tokenizer": tokenizer or ("builtin:sim" if engine == "sim" else None),
        "pools": {"main": pool},
    }
    if adapters is not None:
        served_model["adapter_folder"] = str(adapters.resolve())
    models = {name: served_model}
    loaded = load_to_start(None, [f"models={json.dumps(models)}", *pool_overrides(overrides, name)])
    from penstock.cli.shared.cluster_run import check_engine_parsers, run_cluster

    check_engine_parsers(loaded.settings)

    return run_cluster(loaded, "serve")
