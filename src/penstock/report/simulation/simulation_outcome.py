"""Outcome of a simulation: its variants side by side, as a table and as JSON with stable keys."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.kernel.plurals import counted
from penstock.kernel.values import Slo
from penstock.page.page_schema import Axis, Chart, Page, Section, Series, Unit, text_table
from penstock.report.run.judged_slo import slo_json
from penstock.report.run.run_summary import LatencySpread, RunSummary

POINTS = ("mean", "p50", "p90", "p95", "p99", "max")
SPREADS = ("ttft", "itl", "itl_mean", "tpot", "e2e", "queued")
WIDE = 400
"""Columns of text where the output is no terminal."""


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


def as_json(outcomes: Sequence[SimulationOutcome]) -> str:
    """Return indented JSON; values that depend on this machine's clock have keys that begin with wall."""
    return json.dumps({"schema": 1, "variants": [as_dict(outcome) for outcome in outcomes]}, indent=2) + "\n"


def as_dict(outcome: SimulationOutcome) -> dict[str, Any]:
    """Return one outcome as plain data; times in seconds, shares 0..1, null for unknown."""
    summary = outcome.summary
    return {
        "variant": outcome.name,
        "valid": True,
        "seed": outcome.seed,
        "slo": slo_json(outcome.slo),
        "requests": {
            name: getattr(summary, name) for name in ("submitted", "ok", "rejected", "failed", "expired", "cancelled")
        },
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
        **{
            f"{name}_{point}_s": None if spread is None else getattr(spread, point)
            for name in SPREADS
            for spread in (getattr(summary, name),)
            for point in POINTS
        },
        "notes": list(outcome.notes),
        "wall_s": outcome.wall,
        "wall_run": outcome.run,
    }


def print_table(outcomes: Sequence[SimulationOutcome], console: Console | None = None) -> None:
    """Print the outcomes side by side, for people."""
    # Without a terminal no width limits it, so every variant's column has its room.
    console = console or Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else WIDE)
    first = outcomes[0].summary
    span = outcomes[0].simulated
    table = Table(title=f"{counted(first.submitted, 'request')}, {span:,.0f} s of service", title_justify="left")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.name, justify="right")
    for row in _rows(outcomes):
        table.add_row(*row)
    console.print(table)
    for outcome in outcomes:
        speed = outcome.simulated / outcome.wall if outcome.wall else 0.0
        console.print(
            f"{outcome.name}: {outcome.wall:.1f} s of computing ({speed:,.0f} times real time), "
            f"run folder {outcome.run}, page {outcome.run}/report.html",
            markup=False,
            soft_wrap=True,
        )
        for note in outcome.notes:
            console.print(f"  note: {note}", markup=False, soft_wrap=True)


def comparison_page(outcomes: Sequence[SimulationOutcome]) -> Page:
    """Return the page that sets the outcomes of several variants side by side."""
    figures: list[tuple[str, Unit, list[float | None]]] = [
        ("in SLO, of all submitted", "share", [outcome.summary.goodput_share for outcome in outcomes]),
        ("GPU-hours", "hours", [outcome.gpu_hours for outcome in outcomes]),
    ]
    for label, name in (("TTFT p95", "ttft"), ("ITL p95", "itl")):
        spreads: list[LatencySpread | None] = [getattr(outcome.summary, name) for outcome in outcomes]
        figures.append((label, "seconds", [None if one is None else one.p95 for one in spreads]))
    names = [outcome.name for outcome in outcomes]
    places = [float(place) for place in range(len(outcomes))]
    charts = [
        Chart(label, [Series(label, places, values)], y=Axis(unit=unit), kind="bars", names=names)
        for label, unit, values in figures
    ]
    return Page(
        title="Variants compared",
        about=f"{counted(outcomes[0].summary.submitted, 'request')}, the same for each variant",
        sections=[Section("Side by side", charts=charts, tables=[text_table("", ["", *names], _rows(outcomes))])],
    )


def _rows(outcomes: Sequence[SimulationOutcome]) -> Iterator[list[str]]:
    for label, name in (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("end to end", "e2e")):
        for point in POINTS[:-1]:
            spreads: list[LatencySpread | None] = [getattr(outcome.summary, name) for outcome in outcomes]
            cells = ["-" if one is None else f"{getattr(one, point) * 1e3:,.1f}" for one in spreads]
            yield [f"{label} {point} (ms)", *cells]
    facts: dict[str, Callable[[SimulationOutcome], str]] = {
        "in SLO, of all submitted": lambda o: _percent(o.summary.goodput_share),
        "goodput (requests in SLO per s)": lambda o: "-" if o.goodput is None else f"{o.goodput:,.2f}",
        "hit rate (cached prompt tokens)": lambda o: _percent(o.summary.hit_rate),
        "GPU-hours": lambda o: f"{o.gpu_hours:,.2f}",
        "answered": lambda o: f"{o.summary.ok:,}",
        "rejected": lambda o: f"{o.summary.rejected:,}",
        "failed or expired": lambda o: f"{o.summary.failed + o.summary.expired:,}",
        "tried again, continued elsewhere": lambda o: f"{o.retries:,}, {o.migrations:,}",
        "preemptions": lambda o: f"{o.preemptions:,}",
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
        facts["images encoded, reused, read from the store"] = _media
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
        yield [label, *(tell(outcome) for outcome in outcomes)]


def _media(outcome: SimulationOutcome) -> str:
    return ", ".join(f"{outcome.media.get(name, 0):,}" for name in ("encoded", "reused", "fetched"))


def _from_tier(tier: str, outcome: SimulationOutcome) -> str:
    summary = outcome.summary
    loaded = summary.cached_by_tier.get(tier, 0)
    if not summary.cached_tokens or summary.hit_rate is None:
        return "-"
    return _percent(summary.hit_rate * loaded / summary.cached_tokens)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
