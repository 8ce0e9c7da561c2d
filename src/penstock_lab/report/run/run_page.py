"""Page of a run folder: report.html, with the numbers of each chart as CSV beside it.

Needs only ``requests.jsonl`` (and run.json for the title), so live, bench and simulated runs are shown by the same
code. A bench adds bench.json (service level, bound, verdict), a simulation simulate.json, and both add itl.csv (every
gap between tokens).
"""

import errno
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.kernel.errors import ConfigError
from penstock.kernel.request_record import RequestRecord, decode_records
from penstock.page.page_file import write_csv, write_page
from penstock.page.page_schema import (
    Axis,
    Chart,
    Column,
    KeyFigure,
    Mark,
    Page,
    PageNote,
    Row,
    Section,
    Table,
    bars,
    over_time,
    percent,
    series_of,
    text_table,
)
from penstock.runtime.records import segments
from penstock_lab.report.run.run_files import deleted_records, json_of, number_rows
from penstock_lab.report.run.run_summary import LatencySpread, RunSummary, slo_of, summarise

CURVE_POINTS = 400
"""Points of a distribution that are drawn and written: more than can be distinguished on the page."""
TIME_BINS = 40
WORKERS_OPEN = 12
"""Workers up to which their table is open; the chart above it names them all."""

Pairs = list[tuple[float, float]]


def write_report(run: Path | str) -> Path:
    """Write report.html and its CSV files into a run folder; return the page's path.

    Raises:
        ConfigError: the folder has no readable requests.jsonl, or can't be written.
    """
    folder = Path(run)
    try:
        if not segments.there(folder / "requests.jsonl"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        records = decode_records(line for file in segments.opened(folder / "requests.jsonl") for line in file)
    except OSError as error:
        raise ConfigError(f"{folder} has no readable requests.jsonl: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{folder}/requests.jsonl is damaged: {error}") from error
    path = folder / "report.html"
    write_page(path, page_of(folder, records))
    return path


def place_of(run: Path | str) -> str:
    """Return in words where a run's files are, and its page where one was written."""
    page = Path(run) / "report.html"
    return f"run folder {run}, page {page}" if page.exists() else f"run folder {run}"


def page_of(folder: Path, records: Sequence[RequestRecord]) -> Page:
    """Return the page, and write the CSV files that it links to."""
    run, bench = json_of(folder / "run.json"), json_of(folder / "bench.json") or json_of(folder / "simulate.json")
    slo = slo_of(folder)
    gaps = _read_gaps(folder / "itl.csv")
    summary = summarise(records, slo, gaps)
    return Page(
        title=f"{run.get('command', 'run')}: {folder.name}",
        about=_about_text(run, bench),
        notes=[*(PageNote("info", f"{note}.") for note in deleted_records(folder)), *_verdict_notes(bench)],
        figures=_key_figures(summary, bench),
        sections=[
            Section(
                "Latency",
                charts=[_ttft_chart(folder, records, slo.ttft), _itl_chart(folder, records, gaps, slo.itl)],
                tables=[_latency_table(summary)],
            ),
            Section(
                "Over time",
                charts=[_hit_rate_chart(folder, records, bench.get("hit_rate_bound")), *_load_charts(folder)],
                shared=True,
            ),
            _workers_section(folder, summary),
            _outcomes_section(folder, records),
        ],
    )


def cdf(values: Sequence[tuple[float, int]], points: int = CURVE_POINTS) -> Pairs:
    """Return (value, share of the whole at or below it) of (value, count) pairs, thinned to about ``points``."""
    ordered = sorted(values)
    total = sum(count for _, count in ordered)
    out: Pairs = []
    cumulative, next_at = 0, 0.0
    for index, (value, count) in enumerate(ordered):
        cumulative += count
        if cumulative / total >= next_at or index in (0, len(ordered) - 1):
            out.append((value, cumulative / total))
            next_at = cumulative / total + 1.0 / points
    return out


def _ttft_chart(folder: Path, records: Sequence[RequestRecord], limit: float | None) -> Chart:
    curve = cdf([(record.ttft, 1) for record in records if record.outcome == "ok" and record.ttft is not None])
    write_csv(folder / "report-ttft.csv", ("ttft_s", "share"), curve)
    return _curve_chart("Time to first token", "share of answered requests", "TTFT", curve, limit, "report-ttft.csv")


def _itl_chart(
    folder: Path, records: Sequence[RequestRecord], gaps: Sequence[tuple[float, int]], limit: float | None
) -> Chart:
    if gaps:
        title, share = "Time between tokens", "share of gaps between tokens"
        curve = cdf(gaps)
    else:
        title, share = "Mean time between tokens of a request", "share of answered requests"
        curve = cdf([(record.itl.mean, 1) for record in records if record.outcome == "ok" and record.itl is not None])
    write_csv(folder / "report-itl.csv", ("gap_s", "share"), curve)
    return _curve_chart(title, share, "ITL", curve, limit, "report-itl.csv")


def _curve_chart(title: str, share: str, name: str, curve: Pairs, limit: float | None, csv: str) -> Chart:
    return Chart(
        title,
        [series_of(name, curve, "steps")],
        about=share,
        x=Axis(f"{title.lower()} (s, log)", "seconds", log=True),
        y=Axis(unit="share"),
        marks=[] if limit is None else [Mark(f"SLO {limit * 1e3:g} ms", limit, "x")],
        csv=csv,
    )


def _hit_rate_chart(folder: Path, records: Sequence[RequestRecord], bound: float | None) -> Chart:
    reported = [record for record in records if record.outcome == "ok" and record.cached is not None and record.isl]
    rows: list[tuple[float, float, int]] = []
    if reported:
        start = min(record.arrival for record in reported)
        width = (max(record.arrival for record in reported) - start) / TIME_BINS or 1.0
        bins: dict[int, tuple[int, int]] = {}
        for record in reported:
            place = min(int((record.arrival - start) / width), TIME_BINS - 1)
            cached, prompt = bins.get(place, (0, 0))
            bins[place] = (cached + (record.cached or 0), prompt + (record.isl or 0))
        rows = [(start + (i + 0.5) * width, cached / prompt, prompt) for i, (cached, prompt) in sorted(bins.items())]
    write_csv(folder / "report-hits.csv", ("arrival_s", "hit_rate", "prompt_tokens"), rows)
    bounds = [Mark(f"whole run with an infinite cache {bound:.1%}", bound, "y")] if bound is not None and rows else []
    line = series_of("hit rate", [(at, share) for at, share, _ in rows])
    about = "cached share of prompt tokens, by time of arrival"
    return over_time("Hit rate", [line], about, "share", marks=bounds, csv="report-hits.csv")


def _load_charts(folder: Path) -> list[Chart]:
    """Return the running requests and the number of workers over time, from the rows of metrics.csv."""
    rows = number_rows(folder / "metrics.csv")
    charts = []
    for title, about, names in (
        ("Requests under way", "on workers, and waiting for one", ("inflight", "queued")),
        ("Workers", "in the router's roster", ("workers",)),
    ):
        lines = [
            series_of(name, [(row["seconds"], row[name]) for row in rows if "seconds" in row and name in row])
            for name in names
        ]
        if any(len(line.at) > 1 for line in lines):
            charts.append(over_time(title, lines, about, csv="metrics.csv"))
    return charts


def _workers_section(folder: Path, summary: RunSummary) -> Section:
    shares = summary.workers
    rows = [
        (name, share.requests, share.share, share.prompt_tokens, share.output_tokens, share.hit_rate)
        for name, share in shares.items()
    ]
    head = ("worker", "requests", "share", "prompt_tokens", "output_tokens", "hit_rate")
    write_csv(folder / "report-workers.csv", head, rows)
    about, values = "share of answered requests", [share.share for share in shares.values()]
    axis, csv = Axis(unit="share"), "report-workers.csv"
    chart = bars("Requests per worker", "share", [*shares], values, about, y=axis, csv=csv)
    cells = [
        (name, f"{requests:,}", f"{share:.1%}", f"{prompt:,}", f"{output:,}", percent(hits))
        for name, requests, share, prompt, output, hits in rows
    ]
    table = text_table("Workers", [name.replace("_", " ") for name in head], cells, folded=len(cells) > WORKERS_OPEN)
    return Section("Workers", charts=[chart], tables=[table])


def _outcomes_section(folder: Path, records: Sequence[RequestRecord]) -> Section:
    """Write every request's figures as CSV, and list why requests were not answered."""
    head = ("id", "arrival_s", "worker", "isl", "osl", "cached", "ttft_s", "itl_mean_s", "e2e_s", "outcome", "reason")
    rows = (
        (r.id, r.arrival, r.worker, r.isl, r.osl, r.cached, r.ttft, None if r.itl is None else r.itl.mean, r.e2e,
         r.outcome, r.reason)
        for r in records
    )  # fmt: skip
    write_csv(folder / "report-requests.csv", head, rows)
    why = Counter((record.outcome, record.reason[:200]) for record in records if record.outcome != "ok")
    if not why:
        return Section("Requests", ["All were answered."], files=["report-requests.csv"])
    columns = [Column("outcome", "text"), Column("why", "long"), Column("requests")]
    ordered = [Row([*key, f"{count:,}"]) for key, count in why.most_common(20)]
    return Section(
        "Requests that were not answered", tables=[Table("Why", columns, ordered)], files=["report-requests.csv"]
    )


def _key_figures(summary: RunSummary, bench: dict[str, Any]) -> list[KeyFigure]:
    ttft, itl, bound = summary.ttft, summary.itl or summary.itl_mean, bench.get("hit_rate_bound")
    goodput = KeyFigure("goodput", percent(summary.goodput_share), f"{summary.in_slo:,} in SLO, of all submitted")
    names = {"answered": "ok", **{name: name for name in ("rejected", "failed", "expired", "cancelled", "unsent")}}
    counts = {name: getattr(summary, field) for name, field in names.items()}
    ends = [f"{count:,} {name}" for name, count in counts.items() if count or name == "answered"]
    return [
        KeyFigure("requests", f"{summary.submitted:,}", ", ".join(ends)),
        *([goodput] if bench.get("slo") else []),
        KeyFigure("TTFT p50", "unknown" if ttft is None else f"{ttft.p50 * 1e3:,.1f} ms", _tail_text(ttft)),
        KeyFigure("ITL p50", "unknown" if itl is None else f"{itl.p50 * 1e3:,.1f} ms", _tail_text(itl)),
        KeyFigure(
            "hit rate",
            percent(summary.hit_rate),
            "of prompt tokens" if bound is None else f"an infinite cache would reach {bound:.1%}",
        ),
        KeyFigure("output tokens", f"{summary.output_tokens:,}", f"{summary.prompt_tokens:,} prompt tokens"),
        KeyFigure("duration", f"{summary.duration:,.1f} s", "from the first arrival to the last end"),
    ]


def _tail_text(one: LatencySpread | None) -> str:
    return "" if one is None else f"p99 {one.p99 * 1e3:,.1f} ms"


def _latency_table(summary: RunSummary) -> Table:
    rows: list[tuple[str, ...]] = []
    for label, one in (
        ("TTFT (ms)", summary.ttft),
        ("ITL per token (ms)", summary.itl),
        ("mean ITL of a request (ms)", summary.itl_mean),
        ("TPOT (ms)", summary.tpot),
        ("end to end (ms)", summary.e2e),
        ("queued in the router (ms)", summary.queued),
        ("lateness of the generator (ms)", summary.lateness),
    ):
        if one is not None:
            rows.append((label, *(f"{v * 1e3:,.1f}" for v in (one.mean, one.p50, one.p90, one.p95, one.p99, one.max))))
    return text_table("Latencies", ("", "mean", "p50", "p90", "p95", "p99", "max"), rows)


def _verdict_notes(bench: dict[str, Any]) -> list[PageNote]:
    if not bench:
        return []
    if bench.get("valid"):
        return [PageNote("info", note) for note in bench.get("notes") or ()]
    heading = "In doubt" if bench.get("counts") else "Invalid run"
    return [PageNote("error", f"{heading}: {bench.get('verdict')}")]


def _about_text(run: dict[str, Any], bench: dict[str, Any]) -> str:
    parts = [f"penstock {run['penstock']}"] if "penstock" in run else []
    if "seed" in run:
        parts.append(f"seed {run['seed']}")
    if "model" in bench:
        parts.append(f"model {bench['model']}")
    return ", ".join(parts)


def write_gaps(folder: Path, gaps: Sequence[tuple[float, int]]) -> None:
    """Write (seconds between tokens, their count), ascending, in the file that the report reads."""
    lines = [f"{gap:g},{count}\n" for gap, count in gaps]
    (folder / "itl.csv").write_text("gap_s,tokens\n" + "".join(lines))


def _read_gaps(path: Path) -> list[tuple[float, int]]:
    try:
        lines = path.read_text().splitlines()[1:]
    except FileNotFoundError:
        return []
    return [(float(gap), int(count)) for gap, count in (line.split(",") for line in lines)]
