"""`RequestRecord`: one request as a line of ``requests.jsonl``, the same for live, bench, simulate and replay.

Hashes and lengths, never text. Times are seconds; ``arrival`` and the legs' times count from the start of the run.
"""

from collections.abc import Iterable, Sequence
from typing import Generic, Literal, TypeVar

import msgspec

from penstock.kernel.machine import Nanos
from penstock.kernel.statistics import percentile, weighted_percentile
from penstock.kernel.values import Slo, Target

D = TypeVar("D")

BlockRange = tuple[int, int]
"""(first, how many): names of blocks that follow one another."""

RecordOutcome = Literal["ok", "rejected", "failed", "cancelled", "expired", "unsent"]
"""How a request ended; ``unsent`` is a load generator's own: it had reached its limit of requests in flight."""
RecordFault = Literal["none", "client", "engine", "overloaded", "deadline"]


class RequestLeg(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a request on one worker; seconds since the start of the run."""

    role: str
    worker: str
    dispatched: float
    first: float | None = None
    last: float | None = None
    failure: str | None = None


class ItlSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The gaps between a request's output tokens, in seconds; ``gaps`` of them, that is output tokens less one.

    A simulated request knows its mean alone: its tokens were not made one by one.
    """

    gaps: int
    mean: float
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request from arrival to its end.

    ``isl``, ``osl``, ``cached``, ``expected_cached``: tokens. What was not measured is None: unknown is not zero.
    ``cached_by_tier``: those of ``cached`` that came from tiers below the engine's memory.
    ``ttft``: first output token less arrival, queueing included. ``e2e``: last output token less arrival.
    ``queued``: seconds it waited for a worker. ``lateness``: how late a load generator sent it against its own plan.
    ``ignored_hints``: its hints that had no effect. ``way``: how an engine answered it by the tokens of a render
    server, or why it did not; empty where its model has none. ``name``: by which the client asked for the model, where
    that is an alias or shared between models. ``tenant``: whose it is; ``key``: the name of the key that it came with,
    by which alone a key may be written down. ``copy_of``: the request of which this is a shadow's
    copy; such records stand in ``copies.jsonl``, since no client waited for them. ``blocks``: names of the prompt's
    full blocks, in order; hashes, or the ranges in which a simulation numbers them.
    """

    id: str
    arrival: float
    model: str
    outcome: RecordOutcome
    fault: RecordFault = "none"
    service_class: str | None = msgspec.field(default=None, name="class")
    isl: int | None = None
    osl: int = 0
    osl_requested: int | None = None
    cached: int | None = None
    expected_cached: int | None = None
    cached_by_tier: dict[str, int] | None = None
    blocks: Sequence[int | BlockRange] | None = None
    legs: list[RequestLeg] = []
    ttft: float | None = None
    e2e: float | None = None
    itl: ItlSummary | None = None
    queued: float | None = None
    status: int | None = None
    reason: str = ""
    attempts: int | None = None
    session: str | None = None
    turn: int | None = None
    program: str | None = None
    lateness: float | None = None
    ignored_hints: tuple[str, ...] = ()
    way: str = ""
    name: str | None = None
    media: int = 0
    """Images and the like in its prompt..."""
    media_cached: int | None = None
    """... and those that were encoded already; None where no worker's role is to encode."""
    tenant: str | None = None
    key: str | None = None
    copy_of: str | None = None

    @property
    def worker(self) -> str | None:
        """The worker that answered, or the last one that was tried."""
        return self.legs[-1].worker if self.legs else None

    @property
    def block_names(self) -> list[int]:
        """``blocks``, each by its own name. Cost: O(blocks)."""
        names: list[int] = []
        for item in self.blocks or ():
            if isinstance(item, int):
                names.append(item)
            else:
                names += range(item[0], item[0] + item[1])
        return names

    @property
    def tpot(self) -> float | None:
        """(last - first) / (output tokens - 1) in seconds; absent below 2 tokens."""
        if self.osl < 2 or self.ttft is None or self.e2e is None:
            return None
        return (self.e2e - self.ttft) / (self.osl - 1)

    def within(self, slo: Slo) -> bool:
        """Tell whether it was answered in full, with its TTFT and its mean ITL within the targets of its class."""
        targets = slo.of(self.service_class)
        if self.outcome != "ok" or self.ttft is None:
            return False
        if targets.ttft is not None and self.ttft > targets.ttft:
            return False
        return targets.itl is None or self.itl is None or self.itl.mean <= targets.itl


_decode = msgspec.json.Decoder(RequestRecord).decode


def decode_records(lines: Iterable[bytes | str]) -> list[RequestRecord]:
    """Read the lines of ``requests.jsonl``; a last line that was cut off by a crash is left out.

    Raises:
        msgspec.DecodeError: a line before the last is not a record.
    """
    found: list[RequestRecord] = []
    cut: msgspec.DecodeError | None = None
    for line in lines:
        if not line.strip():
            continue
        if cut is not None:
            raise cut
        try:
            found.append(_decode(line))
        except msgspec.DecodeError as error:
            cut = error
    return found


def summarise_gaps(chunks: Sequence[tuple[float, int]]) -> ItlSummary | None:
    """Sum up a stream's gaps between tokens.

    Args:
        chunks: (seconds since the first output token, output tokens in the chunk) in order; the first entry is the
            chunk that brought the first token. A chunk of k tokens counts as k gaps of a k-th each; the first one,
            which has no gap before it, as k - 1 gaps of 0.
    Returns: None below 2 output tokens.
    """
    gaps = gaps_of(chunks)
    total = sum([count for _, count in gaps])
    if not total:
        return None
    gaps.sort()
    if total == len(gaps):  # nearly always: one token in each chunk
        values = [gap for gap, _ in gaps]
        return ItlSummary(
            gaps=total,
            mean=sum(values) / total,
            p50=percentile(values, 0.50),
            p90=percentile(values, 0.90),
            p99=percentile(values, 0.99),
            max=values[-1],
        )
    return ItlSummary(
        gaps=total,
        mean=sum(gap * count for gap, count in gaps) / total,
        p50=weighted_percentile(gaps, 0.50),
        p90=weighted_percentile(gaps, 0.90),
        p99=weighted_percentile(gaps, 0.99),
        max=gaps[-1][0],
    )


def gaps_of(chunks: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Turn a stream's chunks, as `summarise_gaps` takes them, into (gap in seconds, how many of it)."""
    gaps: list[tuple[float, int]] = []
    previous: float | None = None
    for at, tokens in chunks:
        if tokens <= 0:
            continue  # a chunk without a token (role, usage) ends no gap
        if previous is None:
            if tokens > 1:
                gaps.append((0.0, tokens - 1))
        else:
            gaps.append(((at - previous) / tokens, tokens))
        previous = at
    return gaps


class EndedLeg(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of an `RequestEnd`; a recorded one names its target as text."""

    role: str
    target: Target | str
    dispatched: Nanos
    first: Nanos | None = None
    last: Nanos | None = None
    failure: str | None = None


class RequestEnd(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the admin routes show its end: nanoseconds since the start of the run.

    ``queued``: seconds it waited for a worker; ``migrations``: how often another worker went on with its output;
    ``next_turn``: what came of computing its next turn's beginning, where that was asked for; ``way``: that of its
    `RequestRecord`.
    """

    id: str
    model: str
    outcome: RecordOutcome
    fault: RecordFault
    status: int | None
    reason: str
    arrived: Nanos
    closed: Nanos | None
    isl: int | None
    osl: int = 0
    cached: int | None = None
    expected_cached: int | None = None
    queued: float | None = None
    first: Nanos | None = None
    attempts: int | None = None
    migrations: int = 0
    legs: list[EndedLeg] = []
    retry_after: float | None = None
    session: str | None = None
    program: str | None = None
    ignored_hints: tuple[str, ...] = ()
    next_turn: str = ""
    way: str = ""
    name: str | None = None
    copy_of: str | None = None


class Explanation(msgspec.Struct, Generic[D], frozen=True):
    """A request's end, None while it runs, and its decisions, the oldest first.

    Decisions are passed on as the JSON that was recorded; a reader gets `penstock.router.events.Decision`.
    """

    request: RequestEnd | None
    decisions: list[D]
