"""Writes a number with its noun in singular or plural, and ordinals, for text that people read."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Write a number with its noun: ``1 worker``, ``2 workers``, ``1,200 processes``.

    Args:
        plural: where it is not the noun with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def ordinal(number: int) -> str:
    """Write 1st, 2nd, 3rd, 4th, 11th, 21st."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"
