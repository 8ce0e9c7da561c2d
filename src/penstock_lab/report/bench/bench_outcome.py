"""Outcome of a bench: as JSON with stable keys, and as a table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.kernel.plurals import counted
from penstock.kernel.values import Slo
from penstock.page.page_schema import percent
from penstock_lab.report.bench.saturation import Reason, reasons
from penstock_lab.report.outcome import POINTS, print_outcome, spread_fields
from penstock_lab.report.run.run_page import place_of
from penstock_lab.report.run.run_summary import LatencySpread, RunSummary, slo_json

SCHEMA = 2
ENDS = ("submitted", "ok", "rejected", "failed", "expired", "cancelled", "unsent", "short_outputs")
SPREADS = ("ttft", "itl", "itl_mean", "tpot", "e2e", "queued", "lateness")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOutcome:
    """One run with its verdict.

    Args:
        invalid: why it does not count; ``doubts``: why its times may be those of a busy machine or generator.
        bound: share of prompt tokens that an infinite shared cache would hit, including tokens cached before the run.
    """

    summary: RunSummary
    invalid: list[tuple[Reason, str]]
    doubts: list[tuple[Reason, str]]
    notes: list[str]
    bound: float | None
    block_size: int | None
    counting: dict[str, int]
    cpu_mean: float | None
    cpu_peak: float | None
    cpu_saturated: float | None
    model: str
    slo: Slo
    speed_up: float
    seed: int
    run: str
    skipped: int = 0

    @property
    def valid(self) -> bool:
        """Whether it counts, and is not in doubt: neither generator nor machine was at its limit."""
        return not self.invalid and not self.doubts

    @property
    def share_of_bound(self) -> float | None:
        """Hit rate over what an infinite cache would reach; None where either is unknown or the bound is 0."""
        if self.summary.hit_rate is None or not self.bound:
            return None
        return self.summary.hit_rate / self.bound


def as_dict(outcome: BenchOutcome) -> dict[str, Any]:
    """Return the outcome as plain data; times in seconds, shares 0..1, null for unknown."""
    summary = outcome.summary
    span = summary.duration or None
    return {
        "schema": SCHEMA,
        "model": outcome.model,
        "seed": outcome.seed,
        "speed_up": outcome.speed_up,
        "counts": not outcome.invalid,
        "valid": outcome.valid,
        "invalid_because": reasons([*outcome.invalid, *outcome.doubts]),
        "requests": {
            **{name: getattr(summary, name) for name in ENDS},
            "trace_rows_skipped": outcome.skipped,
        },
        "tokens": {
            "prompt": summary.prompt_tokens,
            "output": summary.output_tokens,
            "cached": summary.cached_tokens,
            "counted_by": outcome.counting,
        },
        "hit_rate": summary.hit_rate,
        "hit_rate_bound": outcome.bound,
        "hit_rate_share_of_bound": outcome.share_of_bound,
        "block_size": outcome.block_size,
        "slo": slo_json(outcome.slo),
        "workers": {name: msgspec.to_builtins(share) for name, share in summary.workers.items()},
        "run": outcome.run,
        "duration_s": summary.duration,
        "in_slo": summary.in_slo,
        "goodput_share": summary.goodput_share,
        "goodput_per_s": summary.in_slo / span if span else None,
        "requests_per_s": summary.ok / span if span else None,
        "output_tokens_per_s": summary.output_tokens / span if span else None,
        **spread_fields(summary, SPREADS),
        "cpu_mean": outcome.cpu_mean,
        "cpu_peak": outcome.cpu_peak,
        "cpu_saturated_share": outcome.cpu_saturated,
        "verdict": "; ".join(text for _, text in (*outcome.invalid, *outcome.doubts)) or "valid",
        "notes": list(outcome.notes),
    }


def print_table(outcome: BenchOutcome) -> None:
    """Print the outcome for people."""
    summary = outcome.summary
    spreads: dict[str, LatencySpread | None] = {
        "TTFT": summary.ttft,
        "ITL (per token)": summary.itl,
        "TPOT": summary.tpot,
        "end to end": summary.e2e,
        "lateness of sending": summary.lateness,
    }
    rows = [
        [name, *("-" if one is None else f"{getattr(one, point) * 1e3:,.1f}" for point in POINTS)]
        for name, one in spreads.items()
    ]
    title = f"{counted(summary.submitted, 'request')} to {outcome.model}"
    print_outcome(title, ("milliseconds", *POINTS), rows, _sentences_of_bench(outcome))


def _sentences_of_bench(outcome: BenchOutcome) -> Iterator[str]:
    summary = outcome.summary
    slo = " and ".join(
        f"{name} <= {limit * 1e3:g} ms"
        for name, limit in (("TTFT", outcome.slo.ttft), ("mean ITL", outcome.slo.itl))
        if limit is not None
    )
    bound = ""
    if outcome.bound is not None:
        bound = f", {percent(outcome.share_of_bound)} of what an infinite cache would reach ({outcome.bound:.1%})"
    yield (
        f"answered {summary.ok}, rejected {summary.rejected} (429/503), failed {summary.failed}, "
        f"expired {summary.expired}, cancelled {summary.cancelled}, unsent {summary.unsent}"
    )
    yield f"goodput {percent(summary.goodput_share)} of all submitted ({summary.in_slo} with {slo or 'no limit'})"
    yield f"hit rate {percent(summary.hit_rate)} of prompt tokens" + bound
    yield (
        f"throughput {_rate_text(summary.ok, summary.duration)} requests/s, "
        f"{_rate_text(summary.output_tokens, summary.duration)} output tokens/s over {summary.duration:.1f} s"
    )
    for name, share in summary.workers.items():
        yield (
            f"  {name}: {counted(share.requests, 'request')} ({share.share:.0%}), "
            f"{counted(share.prompt_tokens, 'prompt token')}, hit rate {percent(share.hit_rate)}"
        )
    if outcome.cpu_mean is not None and outcome.cpu_peak is not None:
        yield f"CPU of this machine: {outcome.cpu_mean:.0%} busy on average, {outcome.cpu_peak:.0%} at most"
    yield from (f"note: {note}" for note in outcome.notes)
    yield from (f"INVALID: {text}" for _, text in outcome.invalid)
    yield from (f"WARNING: {text}" for _, text in outcome.doubts)
    yield place_of(outcome.run)


def _rate_text(count: int, seconds: float) -> str:
    return f"{count / seconds:,.1f}" if seconds > 0 else "-"
