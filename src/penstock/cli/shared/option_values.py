"""Option values: numbers with a unit, such as ``2m``, as a type of click, and addresses."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    _FloatType = click.ParamType[float]  # newer versions of click type it so; older ones can't subscript it
else:
    _FloatType = click.ParamType


class Amount(_FloatType):
    """A number with a unit, such as ``2m``, in the base unit."""

    def __init__(self, unit: Any) -> None:
        self.unit = unit
        self.name = {"s": "duration", "bytes": "size"}.get(unit, "number")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        from penstock.config.reading.units import UnreadableNumber, parse_number

        try:
            return float(parse_number(value, self.unit))
        except UnreadableNumber as error:
            self.fail(f"{value!r} {error}", param, ctx)


SECONDS = Amount("s")
BYTES = Amount("bytes")


def address_of(text: str) -> tuple[str, int]:
    """Return an address.

    Raises:
        UsageError: it is no HOST:PORT.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal():
        raise click.UsageError(f"{text!r} is not HOST:PORT")
    return host, int(port)


out_option = click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Folder of run folders."
)
