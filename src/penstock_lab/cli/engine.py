"""Command ``penstock engine sim``: one engine process started by hand; the supervisor starts the same module."""

import importlib

import click


@click.group("engine", hidden=True)
def command() -> None:
    """Run one engine process."""


@command.command(
    "sim",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Run one simulated engine.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def sim(arguments: tuple[str, ...]) -> int:
    """Run one simulated engine; its arguments are those of its own module."""
    process = importlib.import_module("penstock_lab.sim.sim_process")
    return process.main(list(arguments)) or 0
