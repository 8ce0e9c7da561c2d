"""Command ``penstock weights``: serves a checkpoint out of host memory to siblings that start."""

import asyncio
from pathlib import Path

import click

from penstock.cli.shared.option_values import address_of

EPILOG = """\b
Examples:
  penstock weights serve /models/qwen --socket /run/w.sock --listen 10.0.0.4:7100
  penstock weights serve /models/qwen --socket /run/w.sock --sibling 10.0.0.4:7100

An engine on the second machine then starts with PENSTOCK_WEIGHTS=/run/w.sock and --load-format penstock. With
share_weights in a pool's settings the supervisor does all of this by itself.
"""


@click.group("weights", epilog=EPILOG, short_help="Serve a checkpoint's weights to engines that start.")
def command() -> None:
    """Share the weights of checkpoints between machines, out of host memory."""


@command.command("serve", epilog=EPILOG)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--socket", "path", type=click.Path(path_type=Path), required=True, help="Where engines connect.")
@click.option("--name", help="Name of this process among its siblings.  [default: the socket's]")
@click.option("--listen", metavar="HOST:PORT", help="Where siblings reach this process; without it none do.")
@click.option("--sibling", "siblings", multiple=True, metavar="HOST:PORT", help="Another weight process; repeatable.")
def serve(checkpoint: Path, path: Path, name: str | None, listen: str | None, siblings: tuple[str, ...]) -> int:
    """Run a weight process by hand, until Ctrl-C. It needs PENSTOCK_CLUSTER_SECRET, the same for all."""
    import os

    from penstock.config.cluster_secret_file import SECRET_ENV, secret_of_env
    from penstock.frontend import logs
    from penstock_kv.weights.weight_process import run_weights

    logs.setup("text", "info")
    secret = secret_of_env(os.environ)
    if secret is None and (listen is not None or siblings):
        raise click.UsageError(f"siblings know each other by the cluster's secret: set {SECRET_ENV}")
    others = [address_of(each) for each in siblings]
    listening = None if listen is None else address_of(listen)
    return asyncio.run(run_weights(checkpoint, path, secret, name=name or path.stem, listen=listening, siblings=others))
