"""Command ``penstock attach``: puts a frontend before servers that are running already."""

import json
from pathlib import Path
from typing import Any

import click

from penstock.cli.shared.admin_client import AdminClient, ClusterUnreachable, RequestRefused
from penstock.cli.shared.checkpoint import tokenizer_in
from penstock.cli.shared.settings_flags import SettingsCommand, load_to_start, settings_options
from penstock.kernel.errors import EngineError

EPILOG = """\b
Examples:
  penstock attach http://gpu1:8000 http://gpu2:8000
  penstock attach http://gpu1:8000 --tokenizer ./my-model --frontend.port 9000
  penstock attach http://gpu1:8000 --model my-model --block-size 16
  penstock attach http://gpu1:8000 http://gpu2:8000 --events http://gpu1:8000=tcp://gpu1:5557

A server is asked of which kind it is, and where it announces its KV events. Without a tokenizer (--tokenizer, or the
folder that a server on this machine names) prompts are routed by hashed blocks of text, which match the engines' caches
less well.
"""
KINDS = ("openai", "vllm", "sglang", "trtllm", "llamacpp", "sim")


@click.command(
    "attach", cls=SettingsCommand, epilog=EPILOG, short_help="Put a frontend before servers that already run."
)
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option("--model", help="Model that all of them serve; unset asks each server.")
@click.option(
    "--engine", type=click.Choice(KINDS), default="openai", show_default=True, help="Kind; openai asks each server."
)
@click.option("--tokenizer", help="Folder or tokenizer.json of the model.")
@click.option("--block-size", type=click.IntRange(1), help="Tokens per KV block, where a server does not tell it.")
@click.option(
    "--events",
    multiple=True,
    metavar="[URL=]ENDPOINT",
    help="KV event endpoint (ZMQ) of a server that does not tell it; may be repeated, once for each rank.",
)
@click.option("--replay", multiple=True, metavar="[URL=]ENDPOINT", help="Replay endpoint, in the same way.")
@click.option("--topic", help="Topic of those KV events; unset takes every topic.")
@click.option("--stats", multiple=True, metavar="[URL=]ENDPOINT", help="Endpoint of a server's statistics plug-in.")
@settings_options
def command(
    urls: tuple[str, ...],
    model: str | None,
    engine: str,
    tokenizer: str | None,
    block_size: int | None,
    events: tuple[str, ...],
    replay: tuple[str, ...],
    topic: str | None,
    stats: tuple[str, ...],
    overrides: tuple[str, ...],
) -> int:
    """Put a frontend before OpenAI-compatible servers that already run at URL..., grouped by the model they serve."""
    by_model: dict[str, list[str]] = {}
    folders: dict[str, str] = {}
    for url in urls:
        base = _base(url)
        name = model
        if name is None:
            name, root = _model_of(base)
            if root is not None:
                folders.setdefault(name, root)
        by_model.setdefault(name, []).append(base)
    models: dict[str, Any] = {}
    for name, members in by_model.items():
        pool: dict[str, Any] = {"engine": engine, "urls": members, "block_size": block_size, "topic": topic}
        for kind, given in (("events", events), ("replay", replay), ("stats", stats)):
            pool[kind] = [
                _entry(text, members) for text in given if _meant(text, members, everywhere=len(by_model) == 1)
            ]
        models[name] = {"tokenizer": tokenizer or folders.get(name), "pools": {"attached": pool}}
    loaded = load_to_start(None, [f"models={json.dumps(models)}", *overrides])
    from penstock.cli.shared.cluster_run import run_cluster

    return run_cluster(loaded, "attach")


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _meant(text: str, members: list[str], *, everywhere: bool) -> bool:
    """Return whether an endpoint belongs to a pool: it names one of its servers, or no server at all."""
    return everywhere or _base(text.rpartition("=")[0]) in members


def _entry(text: str, members: list[str]) -> str:
    server, equals, endpoint = text.rpartition("=")
    return f"{_base(server)}={endpoint}" if equals else text


def _model_of(url: str) -> tuple[str, str | None]:
    """Ask a server which model it serves, and take the tokenizer in its folder where the server runs on this machine.

    LoRA adapters, which have a parent, don't count.
    """
    try:
        listing = AdminClient(url, timeout=5.0).get("/v1/models", dict)
    except (ClusterUnreachable, RequestRefused) as error:
        reason = error.reason if isinstance(error, ClusterUnreachable) else error.message
        raise EngineError(
            f"no model list comes from {url}/v1/models: {reason}", hint="start the server, or name its --model"
        ) from error
    models = [e for e in listing.get("data", []) if isinstance(e, dict) and "id" in e and e.get("parent") is None]
    if not models:
        raise EngineError(f"{url} lists no model", hint="has it loaded one? name it with --model")
    root = models[0].get("root")
    folder = tokenizer_in(Path(root)) if isinstance(root, str) and root.startswith("/") else None
    return str(models[0]["id"]), folder
