"""Writes CSV files of figures beside a page: unknown is an empty cell, never 0."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.kernel.errors import ConfigError


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]], digits: int = 6) -> None:
    """Write rows below a head; ``digits``: significant ones of a number that is not whole.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(head)
            writer.writerows([_cell(cell, digits) for cell in row] for row in rows)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error


def _cell(cell: object, digits: int) -> object:
    if isinstance(cell, float):
        return f"{cell:.{digits}g}"
    return cell.replace("\n", " ") if isinstance(cell, str) else cell
