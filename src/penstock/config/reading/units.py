"""Numbers with units, read from text and written as text: ``200ms``, ``64GiB``, ``8k``, ``80%``, ``10/s``.

k, M, G, T are powers of 1000; Ki, Mi, Gi, Ti powers of 1024, for bytes as for tokens. A number without a unit is in
the knob's own unit.
"""

import math
import re

from penstock.kernel.settings import Unit

_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?)\s*([^\d\s].*)?$")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PREFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    f"{letter}i": 1024.0**power for power, letter in enumerate("KMGT", start=1)
}
_PER = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

EXAMPLES: dict[Unit, str] = {
    "s": "200ms, 5s, 2m or 1h",
    "ms": "200ms or 0.2s",
    "bytes": "512, 8k or 64GiB",
    "bytes/s": "10GB/s or 2GiB/s",
    "1/s": "20000, 10/s or 600/min",
    "ratio": "0.8 or 80%",
    "tokens": "8192 or 8k",
    "blocks": "4096 or 1M",
    "requests": "1024 or 1k",
    "count": "64 or 1k",
}


class UnreadableNumber(ValueError):
    """The text is no number of this unit; the message names valid ones."""


def parse_number(text: str, unit: Unit | None) -> float | int:
    """Return the number in ``unit``; an int where the text has neither point nor exponent and its unit is whole.

    Raises:
        UnreadableNumber: no number, an unknown unit, or not finite.
    """
    found = _NUMBER.match(text.strip())
    if found is None:
        raise UnreadableNumber(f"is not a number{_such_as(unit)}")
    digits, suffix = found.group(1).replace("_", ""), (found.group(2) or "").strip()
    number: float | int = float(digits) if any(c in digits for c in ".eE") else int(digits)
    if not suffix:
        factor = 1.0
    else:
        known = _factor(suffix, unit)
        if known is None:
            raise UnreadableNumber(f"has the unknown unit {suffix!r}{_such_as(unit)}")
        factor = known
    scaled = number * factor if factor != 1.0 else number
    if not math.isfinite(scaled):
        raise UnreadableNumber("is too large")
    if isinstance(number, int) and isinstance(scaled, float) and factor >= 1.0 and factor == int(factor):
        return number * int(factor)  # exact, also beyond 2**53
    return scaled


def format_number(value: float | int, unit: Unit | None) -> str:
    """Return text that `parse_number` reads back to the same number, with a unit where one makes it shorter."""
    if isinstance(value, bool) or unit is None:
        return _number_text(value)
    if unit == "s":
        return _duration_text(value)
    if unit == "ms":
        text = _duration_text(value / 1000)
        return text if parse_number(text, "ms") == value else _number_text(value)
    if unit == "bytes" and isinstance(value, int) and value > 0:
        for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
            if value % 1024**power == 0:
                return f"{value // 1024**power}{letter}iB"
    return _number_text(value)


def _duration_text(seconds: float | int) -> str:
    for suffix, factor in (("h", 3600), ("m", 60)):
        if seconds and seconds % factor == 0:
            return f"{int(seconds // factor)}{suffix}"
    if 0 < abs(seconds) < 1:
        for suffix, factor in (("ms", 1000), ("us", 1_000_000)):
            scaled = round(seconds * factor)
            if parse_number(f"{scaled}{suffix}", "s") == seconds:
                return f"{scaled}{suffix}"
    return f"{_number_text(seconds)}s"


def _number_text(value: float | int) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(value)


def _factor(suffix: str, unit: Unit | None) -> float | None:
    if unit == "s":
        return _SECONDS.get(suffix)
    if unit == "ms":
        found = _SECONDS.get(suffix)
        return None if found is None else found * 1000
    if unit == "ratio":
        return 0.01 if suffix == "%" else None
    if unit == "1/s":
        return _rate_factor(suffix)
    if unit == "bytes":
        return _size_factor(suffix)
    if unit == "bytes/s":
        return _size_factor(suffix.removesuffix("/s")) if suffix.endswith("/s") else _size_factor(suffix)
    if unit in ("tokens", "blocks", "requests", "count"):
        return _PREFIXES.get(suffix)
    return None


def _size_factor(suffix: str) -> float | None:
    return 1.0 if suffix == "B" else _PREFIXES.get(suffix.removesuffix("B"))


def _rate_factor(suffix: str) -> float | None:
    head, slash, per = suffix.partition("/")
    scale = 1.0 if not head.strip() else _PREFIXES.get(head.strip())
    if scale is None:
        return None
    if not slash:
        return scale
    seconds = _PER.get(per.strip())
    return None if seconds is None else scale / seconds


def _such_as(unit: Unit | None) -> str:
    return f", such as {EXAMPLES[unit]}" if unit in EXAMPLES else ""
