"""How is an Azure LLM inference trace read? CSV with a moment and two lengths per request -> `TrafficRequest`s.

Columns: ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``. Timestamps are ``2023-11-16 18:15:46.6805900`` or, since
2024, ``2024-05-10 00:00:00.009930+00:00``. The trace says nothing of shared prefixes, so its prompts share nothing.
Source: Azure/AzurePublicDataset (Splitwise, arXiv 2311.18677; DynamoLLM, arXiv 2408.00741).
"""

from datetime import UTC, datetime
from typing import ClassVar

from penstock.traffic.csv_rows import CsvRows, tokens_cell
from penstock.traffic.request import TrafficRequest
from penstock.traffic.rows import Problem

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = 1_000_000_000
"""Nanoseconds, of which a second has nine decimals."""
_DECIMALS = 9


class AzureTrace(CsvRows):
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
            raise Problem("TIMESTAMP", cells["TIMESTAMP"], "rows come in order of time; this is before the first")
        self._first = first
        if osl == 0:
            self.unanswered += 1
            return None
        if isl == 0:
            raise Problem("ContextTokens", isl, "a prompt that was answered has at least 1 token")
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
        raise Problem("TIMESTAMP", text, "a moment such as 2023-11-16 18:15:46.6805900 is needed") from error
    return (since.days * 86_400 + since.seconds) * _SECOND + int(decimals[:_DECIMALS].ljust(_DECIMALS, "0"))
