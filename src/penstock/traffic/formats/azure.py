"""Reads Azure LLM inference traces: CSV with a moment and two lengths per request -> `TrafficRequest`s.

Columns: ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``. Timestamps are ``2023-11-16 18:15:46.6805900`` or, since
2024, ``2024-05-10 00:00:00.009930+00:00``. The trace says nothing of shared prefixes, so its prompts share nothing.
Source: Azure/AzurePublicDataset (Splitwise, arXiv 2311.18677; DynamoLLM, arXiv 2408.00741).
"""

from datetime import UTC, datetime
from typing import ClassVar

from penstock.traffic.formats.csv_rows import CsvTraceRows, tokens_cell
from penstock.traffic.formats.trace_rows import RowProblem
from penstock.traffic.traffic_request import TrafficRequest

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = 1_000_000_000
"""Nanoseconds per second: nine decimals."""
_DECIMALS = 9


class AzureTrace(CsvTraceRows):
    """Iterate over the requests of a trace; ``at`` counts from its first row."""

    format: ClassVar[str] = "azure"
    columns: ClassVar[tuple[str, ...]] = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    _first: int | None = None

    def _request(self, cells: dict[str, str]) -> TrafficRequest | None:
        now = _nanoseconds(cells["TIMESTAMP"])
        isl = tokens_cell(cells, "ContextTokens", least=0)
        osl = tokens_cell(cells, "GeneratedTokens", least=0)
        first = now if self._first is None else self._first
        if now < first:
            raise RowProblem("TIMESTAMP", cells["TIMESTAMP"], "rows come in order of time; this is before the first")
        self._first = first
        if osl == 0:
            self.unanswered += 1
            return None
        if isl == 0:
            raise RowProblem("ContextTokens", isl, "a prompt that was answered has at least 1 token")
        return TrafficRequest(at=(now - first) / _SECOND, isl=isl, osl=osl)


def _nanoseconds(text: str) -> int:
    """Return nanoseconds since 1970; `datetime` alone would drop the seventh decimal."""
    whole, _, rest = text.partition(".")
    zone = rest.lstrip("0123456789")
    decimals = rest.removesuffix(zone)
    try:
        moment = datetime.fromisoformat(whole + zone)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        since = moment - _EPOCH
    except (ValueError, OverflowError) as error:
        raise RowProblem("TIMESTAMP", text, "a moment such as 2023-11-16 18:15:46.6805900 is needed") from error
    return (since.days * 86_400 + since.seconds) * _SECOND + int(decimals[:_DECIMALS].ljust(_DECIMALS, "0"))
