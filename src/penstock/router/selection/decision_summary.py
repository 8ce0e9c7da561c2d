"""Decision summary: a decision in at most 2 KB whatever the fleet's size, and the whole of one for a share of them."""

from collections.abc import Callable, Sequence

import msgspec
import xxhash

from penstock.kernel.machine import SECOND, Nanos
from penstock.kernel.values import Target, plain
from penstock.router.events import Decision, Excluded
from penstock.router.selection.cost_table import most_cached, place_of, ranked
from penstock.router.selection.packed_decision import packed

ROWS_MAX = 4
"""Candidates that a summary has: the chosen one, the one with most of the prompt, and the cheapest."""
REASONS_MAX = 4
"""Reasons for which workers were no candidates that a summary has; each names one worker and counts the others."""
BYTES_MAX = 2048
REASON_MAX = 400
"""Bytes of a summary, and characters of a reason in one that is too long otherwise."""
WHOLE_EVERY: Nanos = SECOND // 500
"""Time for each candidate, and a second at least, after which the next decision of a model is written whole, so that a
run's pages know the workers' loads."""

_encode = msgspec.json.Encoder(enc_hook=plain).encode


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
        short, line = _bounded(summary(decision))
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
    left = len(costs) - ROWS_MAX
    return msgspec.structs.replace(
        decision,
        candidates=[costs[place] for place in _places(decision)] if left > 0 else costs,
        left_out=max(0, left),
        excluded=_by_reason(excluded) if len(excluded) > REASONS_MAX else excluded,
    )


def _places(decision: Decision) -> list[int]:
    """Return the places of the candidates that a summary has, the most telling first."""
    costs = decision.candidates
    cheap, chosen = ranked(costs, ROWS_MAX), place_of(costs, decision.chosen)
    best = [place for place in cheap if place != chosen][:1]
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


def _bounded(short: Decision) -> tuple[Decision, bytes]:
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
