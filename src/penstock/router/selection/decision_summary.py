"""Decisions as they are written down: a summary of at most 2 KB whatever the fleet's size, or all of it, packed.

A share of them is written whole: what a run folder has of those, `whole` makes decisions of again.
"""

import base64
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import xxhash

from penstock.kernel.machine import SECOND, Nanos
from penstock.kernel.values import Target, plain
from penstock.router.events import Cost, Decision, Excluded
from penstock.router.selection.cost import cheapest_of, most_cached, place_of, ranked

_TABLE, _NO_TABLE = b'"table":"', b'"table":""'

_encode = msgspec.json.Encoder(enc_hook=plain).encode
_decode = msgspec.json.Decoder(Decision).decode
_columns = msgspec.json.Decoder(dict[str, list[Any]]).decode


def whole(line: bytes) -> bytes:
    """Return a line of ``decisions.jsonl`` with all candidates and exclusions that it was written with."""
    return _encode(restored(_decode(line))) if _TABLE in line and _NO_TABLE not in line else line


def restored(decision: Decision) -> Decision:
    """Return a decision with what its table holds; as it is where it was written without one."""
    if not decision.table:
        return decision
    rows = _columns(zlib.decompress(base64.b85decode(decision.table)))
    excluded = [Excluded(target=msgspec.convert(target, Target), reason=why) for target, why in rows.pop("excluded")]
    fields = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    return msgspec.structs.replace(
        decision, candidates=msgspec.convert(fields, list[Cost]), excluded=excluded, left_out=0, table=""
    )


def packed(decision: Decision) -> str:
    """Return all candidates and exclusions of a decision as text that JSON need not escape."""
    rows = list(decision.candidates)
    names = [name for name in Cost.__struct_fields__ if not rows or getattr(rows[0], name) is not msgspec.UNSET]
    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in names}
    columns["excluded"] = [(one.target, one.reason) for one in decision.excluded]
    return base64.b85encode(zlib.compress(_encode(columns))).decode()  # its alphabet needs no escapes in JSON


ROWS_MAX = 4
"""Candidates that a summary has at most: the chosen one, the one with most of the prompt, and the cheapest."""
REASONS_MAX = 4
"""Reasons for which workers were no candidates that a summary has; each names one worker and counts the others."""
BYTES_MAX = 2048
REASON_MAX = 400
"""Bytes of a summary, and characters of a reason in one that is too long otherwise."""
WHOLE_EVERY: Nanos = SECOND // 500
"""Time for each candidate, and a second at least, after which the next decision of a model is written whole, so that a
run's pages know the workers' loads."""


class DecisionSummaries:
    """Writes decisions down, each as a line of JSON.

    Args:
        share: returns the share of the requests whose decisions are written whole, from 0 to 1.
    """

    def __init__(self, share: Callable[[], float] = lambda: 0.0) -> None:
        self._share = share
        self._whole: dict[str, Nanos] = {}
        """When a model's last whole decision was made."""

    def lines(self, decision: Decision) -> tuple[bytes, bytes, bool]:
        """Return a decision as JSON of at most `BYTES_MAX` bytes, its line of the run folder, and whether it was cut.

        The line has the table of its candidates where it is its turn; one that was cut leaves some of them out, or
        some of what excluded others.
        """
        if len(decision.candidates) <= ROWS_MAX and len(decision.excluded) <= REASONS_MAX:
            line = _encode(decision)
            if len(line) <= BYTES_MAX:
                return line, line, False
        short, line = _summary_within_bytes(summary(decision))
        last = self._whole.get(decision.model)
        drawn = xxhash.xxh3_64_intdigest(decision.request.encode()) < self._share() * 2.0**64
        apart = max(SECOND, WHOLE_EVERY * len(decision.candidates))
        if last is not None and 0 <= decision.at - last < apart and not drawn:
            return line, line, True
        if not drawn:
            self._whole[decision.model] = decision.at
        return line, _encode(msgspec.structs.replace(short, table=packed(decision))), True


def summary(decision: Decision) -> Decision:
    """Return a decision with the best of its candidates, and one line for each reason why others were none.

    The candidates are the chosen one, the next cheapest and those with most of the prompt.
    """
    costs, excluded = decision.candidates, decision.excluded
    rows = costs if len(costs) <= ROWS_MAX else [costs[place] for place in _summary_places(decision)]
    return msgspec.structs.replace(
        decision,
        candidates=rows,
        left_out=len(costs) - len(rows),
        excluded=_by_reason(excluded) if len(excluded) > REASONS_MAX else excluded,
    )


def _summary_places(decision: Decision) -> list[int]:
    """Return the places of the candidates that a summary has, the most telling first."""
    costs = decision.candidates
    cheap, chosen = ranked(costs, ROWS_MAX), place_of(costs, decision.chosen)
    best = [place for place in cheap if place != chosen][:1]
    if len(cheapest_of(costs)) >= ROWS_MAX:
        cheap = best  # more of so many equal ones would tell nothing
    order = dict.fromkeys([*([] if chosen is None else [chosen]), *best, most_cached(costs), *cheap])
    return list(order)[:ROWS_MAX]


def _by_reason(excluded: Sequence[Excluded]) -> list[Excluded]:
    """Return one for each of the commonest reasons, with the count of the others; the rest together as the last."""
    groups: dict[str, list[Target]] = {}
    for one in excluded:
        groups.setdefault(one.reason, []).append(one.target)
    common = sorted(groups.items(), key=lambda group: -len(group[1]))
    most = REASONS_MAX if len(common) <= REASONS_MAX else REASONS_MAX - 1
    found = [Excluded(target=who[0], reason=reason, others=len(who) - 1) for reason, who in common[:most]]
    if rest := common[most:]:
        count = sum(len(who) for _, who in rest)
        found.append(Excluded(target=rest[0][1][0], reason=f"for one of {len(rest)} other reasons", others=count - 1))
    return found


def _summary_within_bytes(short: Decision) -> tuple[Decision, bytes]:
    """Return a summary that has at most `BYTES_MAX` bytes as JSON, and that JSON."""
    line = _encode(short)
    while len(line) > BYTES_MAX and len(short.candidates) > 2:
        rows = short.candidates[:-1]
        short = msgspec.structs.replace(short, candidates=rows, left_out=short.left_out + 1)
        line = _encode(short)
    if len(line) > BYTES_MAX:
        excluded = [msgspec.structs.replace(one, reason=one.reason[: REASON_MAX // 4]) for one in short.excluded]
        short = msgspec.structs.replace(short, reason=short.reason[:REASON_MAX], excluded=excluded)
        line = _encode(short)
    return short, line
