"""Outcome of a simulation: its variants side by side, as a table and as JSON with stable keys."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from penstock.kernel.plurals import counted
from penstock.kernel.values import Slo
from penstock.page.page_schema import Axis, Page, Section, Unit, bars, text_table
from penstock_lab.report.outcome import POINTS, print_outcome, spread_fields
from penstock_lab.report.run.run_page import place_of
from penstock_lab.report.run.run_summary import LatencySpread, RunSummary, slo_json

SPREADS = ("ttft", "itl", "itl_mean", "tpot", "e2e", "queued")
ENDS = ("submitted", "ok", "rejected", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOutcome:
    """Result of one variant. ``wall``: seconds that the run took; ``simulated``: seconds that it covered."""

    name: str
    summary: RunSummary
    slo: Slo
    seed: int
    gpu_hours: float
    asleep_hours: float
    """Of replicas that slept, in host memory and without GPUs."""
    preemptions: int
    prefetched: Mapping[str, int]
    """Blocks that tiers brought up ahead, and how many of them were used and wasted; empty without tiers."""
    retries: int
    migrations: int
    handoffs: Mapping[str, int]
    """Outcomes of prefills on separate workers; empty where the model has no such workers."""
    media: Mapping[str, int]
    """What became of images, over the engines that were there at the end."""
    adapters: Mapping[str, int]
    """Requests by what they found of their LoRA adapter, and adapters that were unloaded; empty without adapters."""
    bytes_handed: int
    events: int
    simulated: float
    wall: float
    run: str
    notes: Sequence[str]

    @property
    def goodput(self) -> float | None:
        """Requests in SLO per second of the run."""
        return self.summary.in_slo / self.simulated if self.simulated else None


def all_as_dict(outcomes: Sequence[SimulationOutcome]) -> dict[str, Any]:
    """Return what a command that ran variants prints for scripts."""
    return {"schema": 1, "variants": [as_dict(outcome) for outcome in outcomes]}


def as_dict(outcome: SimulationOutcome) -> dict[str, Any]:
    """Return one outcome as plain data; times in seconds, shares 0..1, null for unknown.

    Values that depend on this machine's clock have keys that begin with ``wall``.
    """
    summary = outcome.summary
    return {
        "variant": outcome.name,
        "valid": True,
        "seed": outcome.seed,
        "slo": slo_json(outcome.slo),
        "requests": {name: getattr(summary, name) for name in ENDS},
        "tokens": {
            "prompt": summary.prompt_tokens,
            "output": summary.output_tokens,
            "cached": summary.cached_tokens,
            "cached_by_tier": summary.cached_by_tier,
        },
        "hit_rate": summary.hit_rate,
        "in_slo": summary.in_slo,
        "slo_attainment": summary.goodput_share,
        "goodput_per_s": outcome.goodput,
        "gpu_hours": outcome.gpu_hours,
        "asleep_hours": outcome.asleep_hours,
        "preemptions": outcome.preemptions,
        "prefetched": dict(outcome.prefetched),
        "retries": outcome.retries,
        "migrations": outcome.migrations,
        "handoffs": dict(outcome.handoffs),
        "media": dict(outcome.media),
        "adapters": dict(outcome.adapters),
        "bytes_handed": outcome.bytes_handed,
        "simulated_s": outcome.simulated,
        "events": outcome.events,
        "workers": {
            name: {"requests": share.requests, "share": share.share, "hit_rate": share.hit_rate}
            for name, share in summary.workers.items()
        },
        **spread_fields(summary, SPREADS),
        "notes": list(outcome.notes),
        "wall_s": outcome.wall,
        "wall_run": outcome.run,
    }


def print_table(outcomes: Sequence[SimulationOutcome]) -> None:
    """Print the outcomes side by side, for people."""
    title = f"{counted(outcomes[0].summary.submitted, 'request')}, {outcomes[0].simulated:,.0f} s of service"
    rows = [(fact.label, *fact.cells) for fact in compared(outcomes)]
    print_outcome(title, ["", *(outcome.name for outcome in outcomes)], rows, _sentences_of_variants(outcomes))


def _sentences_of_variants(outcomes: Sequence[SimulationOutcome]) -> Iterator[str]:
    for outcome in outcomes:
        speed = times_of(outcome.simulated / outcome.wall if outcome.wall else 0.0)
        yield f"{outcome.name}: {outcome.wall:.1f} s of computing ({speed} real time), {place_of(outcome.run)}"
        yield from (f"  note: {note}" for note in outcome.notes)


def times_of(speed: float) -> str:
    """Write a speed; one below 10 with two digits, so that a slow run is told from one that stands still."""
    return f"{speed:,.0f} times" if speed >= 9.95 else f"{speed:#.2g} times"


def comparison_page(outcomes: Sequence[SimulationOutcome]) -> Page:
    """Return the page that sets the outcomes of several variants side by side."""
    names = [outcome.name for outcome in outcomes]
    charts = [
        bars(
            fact.label,
            fact.label,
            [f"{name}: {cell}" for name, cell in zip(names, fact.cells, strict=True)],
            [None if each is None else each / fact.scale for each in fact.values],
            f"best: {fact.winner}" if fact.winner else "",
            y=Axis(unit=fact.unit),
        )
        for fact in compared(outcomes)
        if fact.drawn
    ]
    rows = [[fact.label, *fact.with_ratios(), fact.winner or "-"] for fact in compared(outcomes)]
    text = f"In brackets: the value over that of {names[0]}. A best one is named where it is better by what is shown."
    return Page(
        title="Variants compared",
        about=f"{counted(outcomes[0].summary.submitted, 'request')}, the same for each variant",
        sections=[Section("Side by side", [text], charts=charts, tables=[text_table("", ["", *names, "best"], rows)])],
    )


class ComparedFact(NamedTuple):
    """One fact of several variants.

    Args:
        cells, values: of each variant; a value is None where it is unknown, or the fact is no single number.
        better: which value is; None where neither is.
        drawn: as a chart too; ``unit``: of its values, each divided by ``scale``.
    """

    label: str
    names: Sequence[str]
    cells: Sequence[str]
    values: Sequence[float | None]
    better: Literal["low", "high"] | None = None
    drawn: bool = False
    unit: Unit = "count"
    scale: float = 1.0

    @property
    def winner(self) -> str | None:
        """The variant with the best value; None where others show the same, or one is unknown."""
        if self.better is None or any(value is None for value in self.values):
            return None
        known = [value for value in self.values if value is not None]
        best = (min if self.better == "low" else max)(range(len(known)), key=known.__getitem__)
        return self.names[best] if [*self.cells].count(self.cells[best]) == 1 else None

    def with_ratios(self) -> list[str]:
        """Return the cells, those of later variants with their value over the first one's."""
        first, *others = self.values
        ratios = [f" (x{value / first:.2f})" if value is not None and first else "" for value in others]
        return [self.cells[0], *(cell + ratio for cell, ratio in zip(self.cells[1:], ratios, strict=True))]


def compared(outcomes: Sequence[SimulationOutcome]) -> Iterator[ComparedFact]:
    """Yield what the variants are compared by."""
    names = [outcome.name for outcome in outcomes]
    for label, name in (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("end to end", "e2e")):
        for point in POINTS[:-1]:
            spreads: list[LatencySpread | None] = [getattr(outcome.summary, name) for outcome in outcomes]
            values = [None if one is None else getattr(one, point) * 1e3 for one in spreads]
            cells = ["-" if value is None else f"{value:,.1f}" for value in values]
            drawn = point == "p95" and name in ("ttft", "itl")
            yield ComparedFact(f"{label} {point} (ms)", names, cells, values, "low", drawn, "seconds", 1e3)
    judged: tuple[tuple[str, Literal["low", "high"], Unit, Callable[[SimulationOutcome], float | None], str], ...] = (
        ("in SLO, of all submitted", "high", "share", lambda o: o.summary.goodput_share, "{:.1%}"),
        ("goodput (requests in SLO per s)", "high", "rate", lambda o: o.goodput, "{:,.2f}"),
        ("hit rate (cached prompt tokens)", "high", "share", lambda o: o.summary.hit_rate, "{:.1%}"),
        ("GPU-hours", "low", "hours", lambda o: o.gpu_hours, "{:,.2f}"),
        ("answered", "high", "count", lambda o: o.summary.ok, "{:,}"),
        ("rejected", "low", "count", lambda o: o.summary.rejected, "{:,}"),
        ("failed or expired", "low", "count", lambda o: o.summary.failed + o.summary.expired, "{:,}"),
        ("preemptions", "low", "count", lambda o: o.preemptions, "{:,}"),
    )
    for label, better, unit, value_of, form in judged:
        values = [value_of(outcome) for outcome in outcomes]
        cells = ["-" if value is None else form.format(value) for value in values]
        yield ComparedFact(
            label, names, cells, values, better, label in ("in SLO, of all submitted", "GPU-hours"), unit
        )
    facts: dict[str, Callable[[SimulationOutcome], str]] = {
        "tried again, continued elsewhere": lambda o: f"{o.retries:,}, {o.migrations:,}",
    }
    if any(outcome.asleep_hours for outcome in outcomes):
        facts = {**facts, "hours asleep, without GPUs": lambda o: f"{o.asleep_hours:,.2f}"}
    if any(outcome.handoffs for outcome in outcomes):
        facts = {
            **facts,
            "handed over, prefilled locally": lambda o: "{:,}, {:,}".format(
                o.handoffs.get("done", 0), o.handoffs.get("local", 0)
            ),
            "prefills that failed, fell back": lambda o: "{:,}, {:,}".format(
                o.handoffs.get("failed", 0), o.handoffs.get("fallback", 0)
            ),
            "KV handed over (GB)": lambda o: f"{o.bytes_handed / 1e9:,.1f}",
        }
    if any(any(outcome.media.values()) for outcome in outcomes):
        facts["images encoded, reused, read from the store"] = _media_text
    if any(outcome.adapters for outcome in outcomes):
        facts = {
            **facts,
            "adapter resident, on its way, loaded": lambda o: ", ".join(
                f"{o.adapters.get(name, 0):,}" for name in ("hit", "wait", "load")
            ),
            "adapters unloaded for others": lambda o: f"{o.adapters.get('unload', 0):,}",
        }
    if any(outcome.prefetched.get("brought") for outcome in outcomes):
        facts = {
            **facts,
            "blocks brought up ahead, used, wasted": lambda o: ", ".join(
                f"{o.prefetched.get(name, 0):,}" for name in ("brought", "used", "wasted")
            ),
        }
    for tier in sorted({tier for outcome in outcomes for tier in outcome.summary.cached_by_tier}):
        facts = {**facts, f"of that, loaded from {tier}": partial(_from_tier, tier)}
    for label, tell in facts.items():
        yield ComparedFact(label, names, [tell(outcome) for outcome in outcomes], [None] * len(outcomes))


def _media_text(outcome: SimulationOutcome) -> str:
    return ", ".join(f"{outcome.media.get(name, 0):,}" for name in ("encoded", "reused", "fetched"))


def _from_tier(tier: str, outcome: SimulationOutcome) -> str:
    summary = outcome.summary
    loaded = summary.cached_by_tier.get(tier, 0)
    if not summary.cached_tokens or summary.hit_rate is None:
        return "-"
    return _percent_text(summary.hit_rate * loaded / summary.cached_tokens)


def _percent_text(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
