"""Command ``penstock study disaggregation``: searches the design space, simulates, writes page, CSV and Markdown."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.kernel.errors import ConfigError
from penstock.page.page_file import write_csv, write_page
from penstock.page.page_schema import Axis, Chart, Colour, KeyFigure, Page, Section, Series, table_section
from penstock_lab.engine.timing.gpus import named
from penstock_lab.engine.timing.known_models import model_named
from penstock_lab.profiler.design_space.design_study import (
    DOMAINS,
    FIXED_RATIOS,
    MODELS,
    PREFILL_HEAVY,
    TRAFFIC,
    DesignSpace,
    StudyFinding,
    cases,
    findings,
)
from penstock_lab.profiler.design_space.energy_rows import FILE, energy_section
from penstock_lab.profiler.design_space.rate_matching import Deployments
from penstock_lab.profiler.design_space.simulated_rows import simulated_section
from penstock_lab.report.markdown import as_markdown, write_part

SPEEDS = (20.0, 50.0, 100.0, 150.0)
"""Tokens per second of one user that tables have a row for."""
KINDS: Sequence[tuple[str, Colour]] = (
    ("disaggregated", "s0"),
    ("co-located", "s1"),
    ("co-located, whole prompts", "s2"),
    ("co-located, piggybacked", "s3"),
)
ABOUT = (
    "Tokens per second and GPU against tokens per second of one user, both upwards better. Every point is a steady "
    "state by the roofline, without a queue."
)


def sections_of_study(spaces: Sequence[DesignSpace]) -> list[Section]:
    """Return what is said of all cases; their charts are in `write_study`'s page only."""
    heavy = [space for space in spaces if space.case.traffic == PREFILL_HEAVY]
    parts = [
        _orders_section(findings(spaces)),
        _gains_section(spaces),
        _ratios_section(heavy),
        _link_section(heavy),
        _kv_section(spaces),
    ]
    return [*parts, _layouts_section(spaces)]


def write_study(folder: Path, spaces: Sequence[DesignSpace], sections: Sequence[Section], took: float) -> str:
    """Write page, CSV files and Markdown into a folder, and return the Markdown.

    Args:
        sections: what tables say, those of simulations among them.
        took: seconds of the search.
    Raises:
        ConfigError: a file can't be written.
    """
    case, size = spaces[0].case, sum(space.size for space in spaces)
    about = (
        f"{len(spaces)} searches of {size:,} deployments on {case.gpu.name} with link domains of {case.domain} GPUs; "
        f"the passes of a prompt take at most {case.ttft:g} s"
    )
    charts = [chart for space in spaces for chart in _frontier_charts(space)]
    page = Page(
        "Disaggregation study",
        about,
        [Section("Frontiers", [ABOUT], charts, files=["frontiers.csv", "deployments.csv"]), *sections],
        figures=[KeyFigure("deployments compared", f"{size:,}"), KeyFigure("search", f"{took:.1f} s")],
    )
    write_page(folder / "study.html", page)
    head = ["model", "traffic", "kind", "tokens_per_s_per_user", "tokens_per_s_per_gpu", "context_to_generation_gpus"]
    write_csv(folder / "frontiers.csv", [*head, "layout"], _frontier_rows(spaces))
    for section in sections:
        for table in section.tables:
            name = table.caption.lower().replace(" ", "-").replace(",", "")
            write_csv(folder / f"{name}.csv", [column.name for column in table.head], [row.cells for row in table.rows])
    text = as_markdown([f"{about[0].upper()}{about[1:]}. The search took {took:.1f} s."], sections)
    (folder / "study.md").write_text(f"# Disaggregation study\n\n{text}")
    return text


# --- parts -----------------------------------------------------------------------------------------------------------


def _orders_section(orders: Sequence[StudyFinding]) -> Section:
    text = "What the captions of the published study's figures 6 to 11 say, and whether this search says it, too."
    rows = [[each.name, "yes" if each.holds else "NO", each.numbers] for each in orders]
    return table_section("Orders of the published study", text, ["figure and order", "here", "numbers"], rows)


def _gains_section(spaces: Sequence[DesignSpace]) -> Section:
    text = (
        "Tokens per second and GPU of the best split over those of the best co-located engines at the same speed: the "
        "geometric mean from 20 tokens/s to where either ends, the most and the least of it."
    )
    rows = []
    for space in spaces:
        at, gains = space.speeds(), space.gains()
        if not len(gains):
            rows.append([space.case.model, space.case.traffic, "unknown", "", "", "", ""])
            continue
        most, ends = int(np.argmax(gains)), [float(kind.speed.max()) for kind in (space.disaggregated, space.colocated)]
        figures = [f"{space.gain:.2f}", f"{gains[most]:.2f}", f"{at[most]:.0f}", f"{gains.min():.2f}"]
        rows.append([space.case.model, space.case.traffic, *figures, f"{ends[0]:.0f} / {ends[1]:.0f}"])
    head = ["model", "traffic", "mean gain", "most", "at tokens/s/user", "least", "fastest of both"]
    return table_section("What a split gains", text, head, rows)


def _ratios_section(spaces: Sequence[DesignSpace]) -> Section:
    text = (
        f"GPUs of context per GPU of generation in the best split at {PREFILL_HEAVY}, and what is left of its tokens "
        f"per second and GPU where the ratio is fixed (within a tenth)."
    )
    rows = []
    for space in spaces:
        fixed = {ratio: space.fixed(ratio) for ratio in FIXED_RATIOS}
        for speed in SPEEDS:
            best = float(space.disaggregated.density_at(np.array(speed)))
            if not best:
                continue
            shares = [f"{float(each.density_at(np.array(speed))) / best:.0%}" for each in fixed.values()]
            rows.append([space.case.model, f"{speed:g}", f"{space.ratio_at(speed):.2f}", f"{best:.0f}", *shares])
    head = ["model", "tokens/s/user", "best ratio", "tokens/s/GPU", *(f"at {ratio:g}" for ratio in FIXED_RATIOS)]
    return table_section("The ratio of context to generation", text, head, rows)


def _link_section(spaces: Sequence[DesignSpace]) -> Section:
    text = f"Tokens per second and GPU of the best split at {PREFILL_HEAVY} by the GPUs of a link domain."
    rows = []
    for space in spaces:
        domains = [size for size in DOMAINS if size < space.case.domain]
        wider = [*(DesignSpace(replace(space.case, domain=size)) for size in domains), space]
        for speed in SPEEDS:
            cells = [f"{float(each.disaggregated.density_at(np.array(speed))):.0f}" for each in wider]
            rows.append([space.case.model, f"{speed:g}", *cells, *[""] * (len(DOMAINS) - len(cells))])
        fastest = [float(each.disaggregated.speed.max(initial=0.0)) for each in wider]
        rows.append([space.case.model, "fastest", *(f"{each:.0f} tokens/s/user" for each in fastest)])
    return table_section("Link domains", text, ["model", "tokens/s/user", *(f"{size} GPUs" for size in DOMAINS)], rows)


def _kv_section(spaces: Sequence[DesignSpace]) -> Section:
    text = (
        "GB/s of KV that leave each GPU of context and reach each GPU of generation in the best split at 50 tokens/s; "
        "the network of one GPU gives, one way, what the last column says."
    )
    rows = []
    for space in spaces:
        moved = space.transfer_at(50.0)
        cells = ["", ""] if moved is None else [f"{each / 1e9:.2f}" for each in moved]
        rows.append([space.case.model, space.case.traffic, *cells, f"{space.case.gpu.network_gb_per_s:g}"])
    return table_section("KV transfer", text, ["model", "traffic", "out", "in", "network"], rows)


def _layouts_section(spaces: Sequence[DesignSpace]) -> Section:
    text = (
        "Engines of context, then of generation: TP tensor, DP and EP data and expert parallel, PP pipeline stages, b "
        "prompts or sequences at once, chunk tokens of a prompt in a pass."
    )
    rows = []
    for space in spaces:
        for speed in SPEEDS:
            cells = []
            for kind in (space.disaggregated, space.colocated):
                number = space.at(kind, speed)
                cells += (
                    [space.layout_of(kind, number), f"{kind.density[number]:.0f}"] if number is not None else ["", ""]
                )
            rows.append([space.case.model, space.case.traffic, f"{speed:g}", *cells])
    head = ["model", "traffic", "tokens/s/user", "split", "its tokens/s/GPU", "co-located", "their tokens/s/GPU"]
    return table_section("Deployments", text, head, rows)


def _frontiers_of(space: DesignSpace) -> Sequence[Deployments]:
    """Return the frontiers in the order of `KINDS`."""
    return space.disaggregated, space.colocated, space.without_piggyback, space.with_piggyback


def _frontier_charts(space: DesignSpace) -> Iterator[Chart]:
    series = [
        Series(name, front.speed[::-1].tolist(), front.density[::-1].tolist(), colour=colour)
        for (name, colour), front in zip(KINDS, _frontiers_of(space), strict=True)
        if len(front.speed)
    ]
    title = f"{space.case.model}, {space.case.traffic}"
    axis = Axis("tokens/s of one user", log=True)
    yield Chart(title, series, "tokens/s per GPU", axis, Axis(log=True), csv="frontiers.csv")


def _frontier_rows(spaces: Sequence[DesignSpace]) -> Iterator[Sequence[object]]:
    for space in spaces:
        for (name, _), front in zip(KINDS, _frontiers_of(space), strict=True):
            for number in range(len(front.speed)):
                figures = [float(column[number]) for column in (front.speed, front.density, front.ratio)]
                yield [space.case.model, space.case.traffic, name, *figures, space.layout_of(front, number)]


@dataclass(frozen=True, slots=True)
class DesignOptions:
    """One study. ``models``, ``traffic``: empty is all; ``ttft``: seconds that the passes of a prompt may take;
    ``simulated``: whether the scenarios are simulated as well; ``traces``: folder of public traces and measurements."""

    out: Path
    docs: Path | None
    gpu: str
    models: tuple[str, ...]
    traffic: tuple[str, ...]
    ttft: float
    traces: Path | None
    simulated: bool


def main(options: DesignOptions) -> int:
    """Search, simulate, write; return 0.

    Raises:
        ConfigError: a model, a kind of traffic or the GPU is not known, or a file can't be written.
    """
    for name in options.traffic:
        if name not in TRAFFIC:
            raise ConfigError(f"--traffic {name!r} is not known", hint=f"there are {', '.join(TRAFFIC)}")
    for name in options.models:
        model_named(name)
    began = time.monotonic()
    chosen = cases(
        named(options.gpu, "--gpu"), options.models or MODELS, options.traffic or tuple(TRAFFIC), options.ttft
    )
    spaces = [DesignSpace(case) for case in chosen]
    took = time.monotonic() - began
    sections = [*sections_of_study(spaces), *_beyond_the_study(options)]
    options.out.mkdir(parents=True, exist_ok=True)
    text = write_study(options.out, spaces, sections, took)
    if options.docs is not None:
        write_part(options.docs, text, title="Disaggregation study")
    sys.stdout.write(text)
    return 0


def _beyond_the_study(options: DesignOptions) -> list[Section]:
    """Return what the published study leaves out, as far as it was asked for and can be had."""
    sections = [simulated_section(options.traces)] if options.simulated else []
    measured = None if options.traces is None else options.traces / FILE
    if measured is not None and measured.is_file():
        return [*sections, energy_section(measured)]
    return [*sections, Section("Energy per token", [f"Left out: no {FILE} in --traces, so no measured power."])]
