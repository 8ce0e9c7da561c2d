"""Summary of a run's `RequestRecord`s: latencies, goodput by the SLO that judges it, hit rate, each worker's share."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from penstock.config.reading.load import load_resolved
from penstock.kernel.request_record import RecordOutcome, RequestRecord
from penstock.kernel.statistics import percentile, weighted_percentile
from penstock.kernel.values import Slo, SloClass
from penstock_lab.report.run.run_files import json_of

USUAL = Slo(ttft=2.0, itl=0.025)
"""By which ``penstock bench`` and ``penstock simulate`` judge what is not promised: TTFT and mean ITL, seconds."""


def judged_by(slo: Slo) -> Slo:
    """Return the SLO that requests are judged by: the promised one, with the usual target where there is none."""
    return slo.otherwise(slo.ttft or USUAL.ttft, slo.itl or USUAL.itl)


def slo_json(slo: Slo) -> dict[str, Any]:
    """Return an SLO as results name it; seconds, null is no target."""
    named = {name: {"ttft_s": own.ttft, "itl_mean_s": own.itl} for name, own in slo.classes.items()}
    return {"ttft_s": slo.ttft, "itl_mean_s": slo.itl, **({"classes": named} if named else {})}


def slo_of(folder: Path) -> Slo:
    """Return the SLO of a finished run: that of its results, else that of its config.

    Raises:
        ConfigError: a file of the run folder is damaged.
    """
    judged = (json_of(folder / "simulate.json") or json_of(folder / "bench.json")).get("slo")
    if judged is not None:
        named = {
            name: SloClass(ttft=own["ttft_s"], itl=own["itl_mean_s"]) for name, own in judged.get("classes", {}).items()
        }
        return Slo(ttft=judged["ttft_s"], itl=judged["itl_mean_s"], classes=named)
    path = folder / "config.yaml"
    return load_resolved(path, {}).slo if path.exists() and path.read_text().strip() else Slo()


class LatencySpread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and percentiles of one quantity, in seconds; ``count`` values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class WorkerShare(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of one worker: ``share`` of all answers; ``hit_rate`` is None where it reports no cached tokens."""

    requests: int
    share: float
    prompt_tokens: int
    output_tokens: int
    hit_rate: float | None


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers. A figure that could not be measured is None.

    ``in_slo``: answered in full, TTFT within and mean ITL within; ``goodput_share``: its share of all submitted but
    those that the client cancelled. ``hit_rate``: cached over prompt tokens of answered requests that report both.
    ``cached_by_tier``: cached tokens that came from tiers below the engines' memory; empty where there are none.
    """

    submitted: int
    ok: int
    rejected: int
    failed: int
    expired: int
    cancelled: int
    unsent: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    cached_by_tier: dict[str, int]
    hit_rate: float | None
    short_outputs: int
    in_slo: int
    goodput_share: float | None
    ttft: LatencySpread | None
    itl: LatencySpread | None
    itl_mean: LatencySpread | None
    tpot: LatencySpread | None
    e2e: LatencySpread | None
    queued: LatencySpread | None
    lateness: LatencySpread | None
    arrivals_span: float
    duration: float
    workers: dict[str, WorkerShare]


class RunTally:
    """Sums and columns of a run's records, which are not kept: some 60 bytes for each request."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._outcomes: Counter[RecordOutcome] = Counter()
        self._in_slo = 0
        self._output = self._short = 0
        self._first, self._last, self._end = inf, -inf, -inf
        self._ttft, self._itl_mean, self._tpot, self._e2e, self._queued, self._lateness = (array("d") for _ in range(6))
        self._workers: dict[str, _WorkerSums] = {}
        self._tiers = Counter[str]()

    def add(self, records: Sequence[RequestRecord]) -> None:
        """Take more records; many at once cost less than one by one."""
        if not records:
            return
        ok = [record for record in records if record.outcome == "ok"]
        arrivals = [record.arrival for record in records]
        self._outcomes.update([record.outcome for record in records])
        self._output += sum([record.osl for record in records])
        self._first, self._last = min(self._first, min(arrivals)), max(self._last, max(arrivals))
        self._end = max([self._end, *(record.arrival + record.e2e for record in records if record.e2e is not None)])
        self._short += sum([record.osl_requested is not None and record.osl != record.osl_requested for record in ok])
        self._in_slo += sum([record.within(self._slo) for record in ok])
        for column, values in (
            (self._ttft, [record.ttft for record in ok]),
            (self._itl_mean, [None if record.itl is None else record.itl.mean for record in ok]),
            (self._tpot, [record.tpot for record in ok]),
            (self._e2e, [record.e2e for record in ok]),
            (self._queued, [record.queued for record in ok]),
            (self._lateness, [record.lateness for record in records if record.outcome != "unsent"]),
        ):
            column.extend([value for value in values if value is not None])
        for record in ok:
            worker = self._workers.setdefault(record.worker or "unknown", _WorkerSums())
            worker.requests += 1
            worker.output += record.osl
            worker.prompt += record.isl or 0
            if record.cached_by_tier:
                self._tiers.update(record.cached_by_tier)
            if record.cached is not None and record.isl:
                worker.known += record.isl
                worker.cached += record.cached

    def summary(self, gaps: Iterable[tuple[float, int]] = ()) -> RunSummary:
        """Return the run in numbers; ``gaps`` as in `summarise`."""
        outcomes, workers = self._outcomes, self._workers.values()
        ok, known = outcomes["ok"], sum(worker.known for worker in workers)
        cached = sum(worker.cached for worker in workers) if known else None
        submitted = outcomes.total()
        judged = submitted - outcomes["cancelled"]
        return RunSummary(
            submitted=submitted,
            ok=ok,
            rejected=outcomes["rejected"],
            failed=outcomes["failed"],
            expired=outcomes["expired"],
            cancelled=outcomes["cancelled"],
            unsent=outcomes["unsent"],
            prompt_tokens=sum(worker.prompt for worker in workers),
            output_tokens=self._output,
            cached_tokens=cached,
            cached_by_tier=dict(sorted(self._tiers.items())),
            hit_rate=None if cached is None else cached / known,
            short_outputs=self._short,
            in_slo=self._in_slo,
            goodput_share=self._in_slo / judged if judged else None,
            ttft=spread(self._ttft),
            itl=weighted_spread(gaps),
            itl_mean=spread(self._itl_mean),
            tpot=spread(self._tpot),
            e2e=spread(self._e2e),
            queued=spread(self._queued),
            lateness=spread(self._lateness),
            arrivals_span=self._last - self._first if submitted else 0.0,
            duration=max(self._end, self._last) - self._first if submitted else 0.0,
            workers={name: worker.share(ok) for name, worker in sorted(self._workers.items())},
        )


@dataclass(slots=True)
class _WorkerSums:
    """Sums of one worker's answers; ``known``: prompt tokens of those that report cached ones."""

    requests: int = 0
    prompt: int = 0
    output: int = 0
    known: int = 0
    cached: int = 0

    def share(self, ok: int) -> WorkerShare:
        return WorkerShare(
            requests=self.requests,
            share=self.requests / ok,
            prompt_tokens=self.prompt,
            output_tokens=self.output,
            hit_rate=self.cached / self.known if self.known else None,
        )


def summarise(
    records: Sequence[RequestRecord],
    slo: Slo,
    gaps: Iterable[tuple[float, int]] = (),
) -> RunSummary:
    """Summarise a run.

    Args:
        slo: by which requests are judged; a target that is not set leaves that part out.
        gaps: (gap in seconds, count) of all output tokens, where they were kept; without them ``itl`` is None and
            only ``itl_mean``, the spread of the requests' own mean gaps, is there.
    """
    tally = RunTally(slo)
    tally.add(records)
    return tally.summary(gaps)


def spread(values: Iterable[float]) -> LatencySpread | None:
    """Return mean and percentiles of values; None where there is none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return LatencySpread(
        count=len(ordered),
        mean=sum(ordered) / len(ordered),
        p50=percentile(ordered, 0.50),
        p90=percentile(ordered, 0.90),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
    )


def weighted_spread(pairs: Iterable[tuple[float, int]]) -> LatencySpread | None:
    """Return the same of (value, count) pairs."""
    ordered = sorted(pairs)
    total = sum(count for _, count in ordered)
    if not total:
        return None
    return LatencySpread(
        count=total,
        mean=sum(value * count for value, count in ordered) / total,
        p50=weighted_percentile(ordered, 0.50),
        p90=weighted_percentile(ordered, 0.90),
        p95=weighted_percentile(ordered, 0.95),
        p99=weighted_percentile(ordered, 0.99),
        max=ordered[-1][0],
    )
