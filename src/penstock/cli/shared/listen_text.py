"""Addresses on the command line: HOST:PORT as a pair."""

import click


def address_of(text: str) -> tuple[str, int]:
    """Return an address.

    Raises:
        UsageError: it is no HOST:PORT.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal():
        raise click.UsageError(f"{text!r} is no HOST:PORT")
    return host, int(port)
