"""Usage table: tokens and requests of each tenant and key, summed from the records of a run."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from penstock.kernel.request_record import RequestRecord
from penstock.runtime.records import segments


class UsageRow(msgspec.Struct, kw_only=True):
    """What one key took. ``tenant`` and ``key`` are None where requests came without; tokens of ended requests.

    ``requests``: all that ended, ``ok`` of which in full. ``cached_tokens`` are part of ``prompt_tokens``, as far as
    engines report them.
    """

    tenant: str | None
    key: str | None
    requests: int = 0
    ok: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class UsageTable(msgspec.Struct, frozen=True, kw_only=True):
    """``start``: seconds from the start of the run; records before it are not in. ``dropped``: segments of records that
    were deleted since the run began, so that what was in them is not in either."""

    rows: list[UsageRow]
    start: float = 0.0
    dropped: int = 0


class UsageFields(msgspec.Struct, kw_only=True):
    """What is read of a record."""

    arrival: float
    outcome: str
    prompt: int | None = msgspec.field(default=None, name="isl")
    osl: int = 0
    cached: int | None = None
    legs: list[msgspec.Raw] = []
    tenant: str | None = None
    key: str | None = None


_decode = msgspec.json.Decoder(UsageFields).decode


def tokens_of(record: RequestRecord) -> tuple[int, int, int]:
    """Return the prompt, cached and output tokens that a request took; none where no engine had it."""
    return _served_tokens(bool(record.legs), record.isl, record.cached, record.osl)


def _served_tokens(sent: bool, prompt: int | None, cached: int | None, output: int) -> tuple[int, int, int]:
    return (prompt or 0, cached or 0, output) if sent else (0, 0, 0)


def summed(lines: Iterable[bytes], start: float = 0.0) -> list[UsageRow]:
    """Return the rows of records, those that took most first; what is no record is left out."""
    rows: dict[tuple[str | None, str | None], UsageRow] = {}
    for line in lines:
        try:
            record = _decode(line)
        except msgspec.DecodeError:
            continue  # two processes append: a line that a crash cut off may be followed by others
        if record.arrival < start:
            continue
        name = record.tenant, record.key
        row = rows.get(name)
        if row is None:
            row = rows[name] = UsageRow(tenant=record.tenant, key=record.key)
        prompt, cached, output = _served_tokens(bool(record.legs), record.prompt, record.cached, record.osl)
        row.requests += 1
        row.ok += record.outcome == "ok"
        row.prompt_tokens += prompt
        row.cached_tokens += cached
        row.output_tokens += output
    return sorted(
        rows.values(), key=lambda row: (-row.prompt_tokens - row.output_tokens, row.tenant or "", row.key or "")
    )


def usage_of(run: Path, start: float = 0.0) -> UsageTable:
    """Return the usage of a run from ``start``, seconds after its own; blocks."""
    path = run / "requests.jsonl"
    return UsageTable(rows=summed(segments.lines(path), start), start=start, dropped=segments.dropped(path))
