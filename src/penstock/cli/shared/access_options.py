"""Access options: the key, headers and certificates that attached engines ask for, as curl has them."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from penstock.config.settings.pool_access_settings import PoolAccessSettings

FILE = click.Path(exists=True, dir_okay=False, resolve_path=True)


def access_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options; the command gets them as ``access``."""

    @functools.wraps(command)
    def with_access(*, header: tuple[str, ...], **others: Any) -> int:
        given = {name: others.pop(name) for name in ("api_key_file", "api_key_env", "ca", "cert", "cert_key")}
        headers = {}
        for text in header:
            name, colon, value = text.partition(":")
            value = value.strip()
            if not colon or not value:
                raise click.UsageError(f"--header {name!r}: write it as 'NAME: VALUE'")
            headers[name.strip()] = f"file:{Path(value[5:]).absolute()}" if value.startswith("file:") else value
        return command(access=PoolAccessSettings(headers=headers, **given), **others)

    options: Callable[..., int] = with_access
    for name, settings in (
        ("--api-key-file", {"type": FILE, "help": "File with the API key that the servers ask for."}),
        ("--api-key-env", {"metavar": "NAME", "help": "Name of the environment variable that has that key."}),
        (
            "--header",
            {"multiple": True, "metavar": "'NAME: VALUE'", "help": "Header; VALUE may be file:PATH, env:NAME."},
        ),
        ("--cacert", {"type": FILE, "help": "Certificates that sign the servers'; unset trusts the system's."}),
        ("--cert", {"type": FILE, "help": "Own certificate, for servers that ask for one."}),
        ("--cert-key", {"type": FILE, "help": "Its private key, where that is in another file."}),
    ):
        words = (name, "ca") if name == "--cacert" else (name,)
        options = click.option(*words, **settings)(options)  # type: ignore[arg-type]
    return options
