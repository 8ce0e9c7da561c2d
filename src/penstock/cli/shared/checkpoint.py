"""Resolves a model named on the command line: a folder of this machine, or a hub id whose files may be cached here."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as the engine gets it, its name for clients, and its tokenizer's folder, if it is on this machine."""

    model: str
    name: str
    tokenizer: str | None


def checkpoint_of(text: str, env: Mapping[str, str] = os.environ) -> Checkpoint:
    """Return the model that a folder's path or a hub id names.

    Raises:
        click.BadParameter: it looks like a path, and there is no such folder.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        folder = path.resolve()
        return Checkpoint(str(folder), folder.name, tokenizer_in(folder))
    if text.startswith((".", "/", "~")):
        raise click.BadParameter(f"there is no folder {text}", param_hint="MODEL")
    return Checkpoint(text, text, next(filter(None, map(tokenizer_in, _cached(text, env))), None))


def tokenizer_in(folder: Path) -> str | None:
    """Return a folder's path where it has a tokenizer that we can read."""
    return str(folder) if (folder / "tokenizer.json").is_file() else None


def _cached(model: str, env: Mapping[str, str]) -> list[Path]:
    """Return the snapshots of a hub model that are already downloaded, the newest first. Downloads nothing."""
    home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface")
    hub = Path(env.get("HF_HUB_CACHE") or home / "hub").expanduser()
    snapshots = hub / f"models--{model.replace('/', '--')}" / "snapshots"
    if not snapshots.is_dir():
        return []
    return sorted((p for p in snapshots.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime, reverse=True)
