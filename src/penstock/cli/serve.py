"""What does ``penstock serve`` do? Serves one model with engines of this machine, without a config file."""

import json

import click

from penstock.cli.settings import SettingsCommand, load_to_start, pool_overrides, settings_options

EPILOG = """\b
Examples:
  penstock serve sim --replicas 2
  penstock serve my-model --replicas 8 --sim.kv_blocks 4096 --sim.timing.speed_up 10
  penstock serve my-model --frontend.port 9000 --router.mode least_loaded

Servers of other engines that run already are taken in with 'penstock attach'.
"""


@click.command(
    "serve", cls=SettingsCommand, pool=True, epilog=EPILOG, short_help="Serve one model with engines of this machine."
)
@click.argument("model")
@click.option("--engine", type=click.Choice(["sim"]), default="sim", show_default=True, help="Engine to start.")
@click.option("--replicas", type=click.IntRange(1, 1024), default=4, show_default=True, help="Engines to start.")
@click.option("--tokenizer", default="builtin:sim", show_default=True, help="Folder or tokenizer.json of the model.")
@settings_options
def command(model: str, engine: str, replicas: int, tokenizer: str, overrides: tuple[str, ...]) -> int:
    """Serve MODEL, the name that clients ask for, with engines of this machine."""
    pool = {"engine": engine, "replicas": replicas}
    models = {model: {"tokenizer": tokenizer, "pools": {"main": pool}}}
    loaded = load_to_start(None, [f"models={json.dumps(models)}", *pool_overrides(overrides, model)])
    from penstock.cli.running import run_cluster

    return run_cluster(loaded, "serve")
