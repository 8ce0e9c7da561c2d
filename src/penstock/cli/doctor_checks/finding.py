"""Finding of the doctor: the result of one check."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: how bad, what, and the next step."""

    level: Level
    check: str
    text: str
    hint: str | None = None
