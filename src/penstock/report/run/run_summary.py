"""Summary of a run's `RequestRecord`s: latencies, goodput, hit rate and each worker's share."""

from collections.abc import Iterable, Sequence

import msgspec

from penstock.kernel.request_record import RequestRecord, weighted_percentile
from penstock.kernel.statistics import percentile
from penstock.kernel.values import Slo


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
    by_outcome = {
        outcome: [record for record in records if record.outcome == outcome]
        for outcome in ("ok", "rejected", "failed", "expired", "cancelled", "unsent")
    }
    ok = by_outcome["ok"]
    reported = [record for record in ok if record.cached is not None and record.isl]
    known_isl = sum(record.isl or 0 for record in reported)
    cached = sum(record.cached or 0 for record in reported) if reported else None
    in_slo = sum(record.within(slo) for record in ok)
    judged = len(records) - len(by_outcome["cancelled"])
    ends = [record.arrival + record.e2e for record in records if record.e2e is not None]
    arrivals = [record.arrival for record in records]
    return RunSummary(
        submitted=len(records),
        ok=len(ok),
        rejected=len(by_outcome["rejected"]),
        failed=len(by_outcome["failed"]),
        expired=len(by_outcome["expired"]),
        cancelled=len(by_outcome["cancelled"]),
        unsent=len(by_outcome["unsent"]),
        prompt_tokens=sum(record.isl or 0 for record in ok),
        output_tokens=sum(record.osl for record in records),
        cached_tokens=cached,
        hit_rate=None if cached is None or not known_isl else cached / known_isl,
        short_outputs=sum(record.osl_requested is not None and record.osl != record.osl_requested for record in ok),
        in_slo=in_slo,
        goodput_share=in_slo / judged if judged else None,
        ttft=spread(record.ttft for record in ok),
        itl=weighted_spread(gaps),
        itl_mean=spread(record.itl.mean for record in ok if record.itl is not None),
        tpot=spread(record.tpot for record in ok),
        e2e=spread(record.e2e for record in ok),
        queued=spread(record.queued for record in ok),
        lateness=spread(record.lateness for record in records if record.outcome != "unsent"),
        arrivals_span=max(arrivals) - min(arrivals) if arrivals else 0.0,
        duration=max([*ends, *arrivals], default=0.0) - min(arrivals, default=0.0),
        workers=worker_shares(ok),
    )


def worker_shares(ok: Sequence[RequestRecord]) -> dict[str, WorkerShare]:
    """Return the answers of each worker, by name; requests whose worker is unknown count under ``unknown``."""
    by_worker: dict[str, list[RequestRecord]] = {}
    for record in ok:
        by_worker.setdefault(record.worker or "unknown", []).append(record)
    shares: dict[str, WorkerShare] = {}
    for worker, mine in sorted(by_worker.items()):
        reported = [record for record in mine if record.cached is not None and record.isl]
        prompt = sum(record.isl or 0 for record in reported)
        shares[worker] = WorkerShare(
            requests=len(mine),
            share=len(mine) / len(ok),
            prompt_tokens=sum(record.isl or 0 for record in mine),
            output_tokens=sum(record.osl for record in mine),
            hit_rate=sum(record.cached or 0 for record in reported) / prompt if prompt else None,
        )
    return shares


def spread(values: Iterable[float | None]) -> LatencySpread | None:
    """Return mean and percentiles of the known values; None where there is none."""
    ordered = sorted(value for value in values if value is not None)
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
