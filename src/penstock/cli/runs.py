"""Command ``penstock runs``: lists run folders, and deletes those that are not needed."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.shared.option_values import SECONDS, Amount
from penstock.cli.shared.output import json_option, print_json, table

if TYPE_CHECKING:
    from penstock.runtime.records.run_folders import RunFolderInfo

EPILOG = """\b
Examples:
  penstock runs ls
  penstock runs rm runs/RUN
  penstock runs prune --keep-for 7d --keep-bytes 2Gi --dry-run
  penstock runs prune cluster.yaml             by runs.keep_for and runs.keep_bytes of a config

A run that is in use is never deleted. With runs.keep_for or runs.keep_bytes in its config 'penstock up' prunes when
it starts.
"""
BYTES = Amount("bytes")

_DIR = click.option(
    "--dir",
    "root",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder of all runs.",
)


@click.group("runs", epilog=EPILOG, short_help="List and delete run folders.")
def command() -> None:
    """Look after run folders."""


@command.command("ls", epilog=EPILOG)
@_DIR
@json_option
def ls(root: Path, as_json: bool) -> int:
    """List run folders, the oldest first."""
    from penstock.runtime.records.run_folders import runs_of

    runs = runs_of(root)
    if as_json:
        print_json([_run_json_fields(run) for run in runs])
    elif not runs:
        click.echo(f"There is no run folder in {root}.")
    else:
        rows = [
            [run.path.name, run.command, _run_age(run), _size_text(run.size), "in use" if run.live else ""]
            for run in runs
        ]
        click.echo(table(["run", "command", "last written", "size", ""], rows))
        click.echo(f"{len(runs)} in all, {_size_text(sum(run.size for run in runs))}")
    return 0


@command.command("rm", epilog=EPILOG)
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
def rm(folders: tuple[Path, ...]) -> int:
    """Delete FOLDERS, none of which may be in use."""
    from penstock.runtime.records.run_folders import remove, run_of

    for run in [run_of(folder) for folder in folders]:
        remove(run)
        click.echo(f"{run.path} is deleted ({_size_text(run.size)}).")
    return 0


@command.command("prune", epilog=EPILOG)
@click.argument("config", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_DIR
@click.option("--keep-for", type=SECONDS, help="Delete what was last written to longer ago; unset is runs.keep_for.")
@click.option(
    "--keep-bytes", type=BYTES, help="Delete the oldest until all fit into so many bytes; unset is runs.keep_bytes."
)
@click.option("--dry-run", is_flag=True, help="Only say which.")
def prune(config: Path | None, root: Path, keep_for: float | None, keep_bytes: float | None, dry_run: bool) -> int:
    """Delete run folders that are too old, or too much together."""
    from penstock.config.reading.load import load
    from penstock.runtime.records.run_folders import remove, runs_of, spare

    if config is not None:
        settings = load(config, ()).settings.runs
        root = Path(settings.dir)
        keep_for = settings.keep_for if keep_for is None else keep_for
        keep_bytes = settings.keep_bytes if keep_bytes is None else keep_bytes
    if keep_for is None and keep_bytes is None:
        raise click.UsageError("say what to keep: --keep-for, --keep-bytes, or a config with runs.keep_for")
    limit = None if keep_bytes is None else int(keep_bytes)
    deleted = spare(runs_of(root), now=time.time(), keep_for=keep_for, keep_bytes=limit)
    for run in deleted:
        if not dry_run:
            remove(run)
        click.echo(f"{run.path} {'would go' if dry_run else 'is deleted'}: {_run_age(run)} old, {_size_text(run.size)}")
    if not deleted:
        click.echo("Nothing is to be deleted.")
    return 0


def _run_json_fields(run: "RunFolderInfo") -> dict[str, object]:
    return {
        "path": str(run.path),
        "command": run.command,
        "wall_started_s": run.started,
        "wall_written_s": run.written,
        "bytes": run.size,
        "in_use": run.live,
    }


def _run_age(run: "RunFolderInfo") -> str:
    seconds = max(0.0, time.time() - run.written)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size_text(size: int) -> str:
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= length:
            return f"{size / length:.1f} {unit}"
    return f"{size} B"
