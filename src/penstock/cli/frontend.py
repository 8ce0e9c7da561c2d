"""Command ``penstock frontend``: one frontend process started by hand; the supervisor starts the same module."""

import importlib

import click


@click.command(
    "frontend",
    hidden=True,
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Run one frontend process.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> int:
    """Run one frontend process; its arguments are those of its own module."""
    process = importlib.import_module("penstock.frontend.frontend_process")
    return process.main(list(arguments)) or 0
