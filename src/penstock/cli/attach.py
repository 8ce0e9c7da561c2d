"""What does ``penstock attach`` do? Puts a frontend before servers that somebody else started."""

import json
from typing import Any

import click

from penstock.cli.client import Client, Refused, Unreachable
from penstock.cli.settings import SettingsCommand, load_to_start, settings_options
from penstock.kernel.errors import EngineError

EPILOG = """\b
Examples:
  penstock attach http://gpu1:8000 http://gpu2:8000
  penstock attach http://gpu1:8000 --tokenizer ./my-model --frontend.port 9000
  penstock attach http://gpu1:8000 --model my-model --block-size 16

Without --tokenizer prompts are routed by hashed blocks of text, which match the engines' caches less well.
"""


@click.command(
    "attach", cls=SettingsCommand, epilog=EPILOG, short_help="Put a frontend before servers that already run."
)
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option("--model", help="Model that all of them serve; unset asks each server.")
@click.option(
    "--engine", type=click.Choice(["openai", "vllm", "sim"]), default="openai", show_default=True, help="Kind."
)
@click.option("--tokenizer", help="Folder or tokenizer.json of the model.")
@click.option("--block-size", type=click.IntRange(1), help="Tokens per KV block, where a server does not tell it.")
@settings_options
def command(
    urls: tuple[str, ...],
    model: str | None,
    engine: str,
    tokenizer: str | None,
    block_size: int | None,
    overrides: tuple[str, ...],
) -> int:
    """Put a frontend before OpenAI-compatible servers that already run at URL..., grouped by the model they serve."""
    by_model: dict[str, list[str]] = {}
    for url in urls:
        base = url.rstrip("/").removesuffix("/v1")
        by_model.setdefault(model or _model_of(base), []).append(base)
    models: dict[str, Any] = {}
    for name, members in by_model.items():
        pool = {"engine": engine, "urls": members, "block_size": block_size}
        models[name] = {"tokenizer": tokenizer, "pools": {"attached": pool}}
    loaded = load_to_start(None, [f"models={json.dumps(models)}", *overrides])
    from penstock.cli.running import run_cluster

    return run_cluster(loaded, "attach")


def _model_of(url: str) -> str:
    """Ask a server which model it serves; LoRA adapters, which have a parent, are not meant."""
    try:
        listing = Client(url, timeout=5.0).get("/v1/models")
    except (Unreachable, Refused) as error:
        reason = error.reason if isinstance(error, Unreachable) else error.message
        raise EngineError(
            f"no model list comes from {url}/v1/models: {reason}", hint="start the server, or name its --model"
        ) from error
    entries = listing.get("data", []) if isinstance(listing, dict) else []
    names = [e["id"] for e in entries if isinstance(e, dict) and "id" in e and e.get("parent") is None]
    if not names:
        raise EngineError(f"{url} lists no model", hint="has it loaded one? name it with --model")
    return str(names[0])
