"""Draws report.html from a run folder alone, with each plot's data as CSV beside it.

Needs only ``requests.jsonl`` (and run.json for the title), so live, bench and simulated runs are drawn by the same
code. A bench adds bench.json (service level, bound, verdict), a simulation simulate.json, and both add itl.csv (every
gap between tokens).
"""

import errno
import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.kernel.errors import ConfigError
from penstock.kernel.request_record import RequestRecord, decode_records
from penstock.report.run.chart_svg import SvgAxis, SvgLine, SvgMark, bar_chart, line_chart
from penstock.report.run.judged_slo import slo_of
from penstock.report.run.page_frame import page, table
from penstock.report.run.run_files import deleted_records, json_of, number_rows
from penstock.report.run.run_summary import RunSummary, summarise
from penstock.runtime.records import segments

CURVE_POINTS = 400
"""Points of a distribution that are drawn and written: more than can be distinguished on the page."""
TIME_BINS = 40

Pairs = list[tuple[float, float]]


def write_report(run: Path | str, records: Sequence[RequestRecord] | None = None) -> Path:
    """Write report.html and its CSV files into a run folder; return the page's path.

    Args:
        records: the content of requests.jsonl, where the caller has it already; it is read otherwise.
    Raises:
        ConfigError: the folder has no readable requests.jsonl, or can't be written.
    """
    folder = Path(run)
    try:
        if records is None:
            if not segments.there(folder / "requests.jsonl"):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            records = decode_records(line for file in segments.opened(folder / "requests.jsonl") for line in file)
    except OSError as error:
        raise ConfigError(f"{folder} has no readable requests.jsonl: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{folder}/requests.jsonl is damaged: {error}") from error
    text = draw(folder, records)
    path = folder / "report.html"
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error
    return path


def draw(folder: Path, records: Sequence[RequestRecord]) -> str:
    """Return the page, and write the CSV files that it links to."""
    run, bench = json_of(folder / "run.json"), json_of(folder / "bench.json") or json_of(folder / "simulate.json")
    slo = slo_of(folder)
    gaps = _gaps(folder / "itl.csv")
    summary = summarise(records, slo, gaps)
    sections = [
        *(f"<p>{html.escape(note)}.</p>" for note in deleted_records(folder)),
        _verdict(bench),
        _numbers(summary, bench),
        _ttft(folder, records, slo.ttft),
        _itl(folder, records, gaps, slo.itl),
        _hits(folder, records, bench.get("hit_rate_bound")),
        _load(folder),
        _workers(folder, summary),
        _outcomes(folder, records),
    ]
    return page(f"{run.get('command', 'run')}: {folder.name}", _about(run, bench), sections)


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


def _ttft(folder: Path, records: Sequence[RequestRecord], limit: float | None) -> str:
    curve = cdf([(record.ttft, 1) for record in records if record.outcome == "ok" and record.ttft is not None])
    marks = [] if limit is None else [SvgMark(f"SLO {limit * 1e3:g} ms", limit * 1e3, "x")]
    chart = line_chart(
        "Time to first token",
        SvgAxis("time to first token (ms, log)", "log"),
        SvgAxis("share of answered requests", least=0.0, most=1.0, percent=True),
        [SvgLine("TTFT", [(value * 1e3, share) for value, share in curve], steps=True)],
        marks,
    )
    return _figure(folder, "Time to first token", chart, "report-ttft.csv", ("ttft_s", "share"), curve)


def _itl(folder: Path, records: Sequence[RequestRecord], gaps: Sequence[tuple[float, int]], limit: float | None) -> str:
    if gaps:
        title, share = "Time between tokens", "share of gaps between tokens"
        curve = cdf(gaps)
    else:
        title, share = "Mean time between tokens of a request", "share of answered requests"
        curve = cdf([(record.itl.mean, 1) for record in records if record.outcome == "ok" and record.itl is not None])
    marks = [] if limit is None else [SvgMark(f"SLO {limit * 1e3:g} ms", limit * 1e3, "x")]
    chart = line_chart(
        title,
        SvgAxis("time between tokens (ms, log)", "log"),
        SvgAxis(share, least=0.0, most=1.0, percent=True),
        [SvgLine("ITL", [(value * 1e3, part) for value, part in curve], steps=True)],
        marks,
    )
    return _figure(folder, title, chart, "report-itl.csv", ("gap_s", "share"), curve)


def _hits(folder: Path, records: Sequence[RequestRecord], bound: float | None) -> str:
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
    marks = [] if bound is None else [SvgMark(f"whole run with an infinite cache {bound:.1%}", bound, "y")]
    chart = line_chart(
        "Hit rate",
        SvgAxis("time of arrival (s after the start)", least=0.0),
        SvgAxis("cached share of prompt tokens", least=0.0, most=1.0, percent=True),
        [SvgLine("hit rate", [(at, share) for at, share, _ in rows])],
        marks if rows else [],
    )
    return _figure(folder, "Hit rate", chart, "report-hits.csv", ("arrival_s", "hit_rate", "prompt_tokens"), rows)


def _load(folder: Path) -> str:
    """Draw the running requests and the number of workers, from the rows of metrics.csv."""
    rows = number_rows(folder / "metrics.csv")
    parts = []
    for title, label, names in (
        ("Requests under way", "requests", ("inflight", "queued")),
        ("Workers", "workers in the router's roster", ("workers",)),
    ):
        lines = [
            SvgLine(name, [(row["seconds"], row[name]) for row in rows if "seconds" in row and name in row])
            for name in names
        ]
        if any(len(line.points) > 1 for line in lines):
            chart = line_chart(
                title, SvgAxis("time (s after the start)", least=0.0), SvgAxis(label, least=0.0), [*lines]
            )
            parts.append(f"<section><h2>{title}</h2>{chart}")
            parts.append('<p class="data"><a href="metrics.csv">data as CSV</a></p></section>')
    return "".join(parts)


def _workers(folder: Path, summary: RunSummary) -> str:
    bars = [
        (name, share.share * 100, f"{share.share:.0%}, {share.requests} requests, {_percent(share.hit_rate)} hit")
        for name, share in summary.workers.items()
    ]
    rows = [
        (name, share.requests, share.share, share.prompt_tokens, share.output_tokens, share.hit_rate)
        for name, share in summary.workers.items()
    ]
    chart = bar_chart("Requests per worker", "share of answered requests (%)", bars)
    head = ("worker", "requests", "share", "prompt_tokens", "output_tokens", "hit_rate")
    return _figure(folder, "Requests per worker", chart, "report-workers.csv", head, rows)


def _outcomes(folder: Path, records: Sequence[RequestRecord]) -> str:
    """Write every request's figures as CSV, and list why requests were not answered."""
    head = ("id", "arrival_s", "worker", "isl", "osl", "cached", "ttft_s", "itl_mean_s", "e2e_s", "outcome", "reason")
    rows = [
        (
            record.id,
            record.arrival,
            record.worker,
            record.isl,
            record.osl,
            record.cached,
            record.ttft,
            None if record.itl is None else record.itl.mean,
            record.e2e,
            record.outcome,
            record.reason,
        )
        for record in records
    ]
    _csv(folder / "report-requests.csv", head, rows)
    why: dict[tuple[str, str], int] = {}
    for record in records:
        if record.outcome != "ok":
            key = (record.outcome, record.reason[:200])
            why[key] = why.get(key, 0) + 1
    link = '<p class="data"><a href="report-requests.csv">every request as CSV</a></p>'
    if not why:
        return f"<section><h2>Requests</h2><p>All were answered.</p>{link}</section>"
    ordered = sorted(why.items(), key=lambda item: -item[1])[:20]
    body = table(("outcome", "why", "requests"), [(*key, str(count)) for key, count in ordered])
    return f"<section><h2>Requests that were not answered</h2>{body}{link}</section>"


def _numbers(summary: RunSummary, bench: dict[str, Any]) -> str:
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
            rows.append((label, *(f"{v * 1e3:,.1f}" for v in (one.mean, one.p50, one.p90, one.p99, one.max))))
    times = table(("", "mean", "p50", "p90", "p99", "max"), rows)
    bound = bench.get("hit_rate_bound")
    facts = [
        f"{summary.submitted} requests: {summary.ok} answered, {summary.rejected} rejected, {summary.failed} failed, "
        f"{summary.expired} expired, {summary.cancelled} cancelled, {summary.unsent} unsent.",
        f"{summary.prompt_tokens:,} prompt and {summary.output_tokens:,} output tokens in {summary.duration:.1f} s.",
        f"Hit rate {_percent(summary.hit_rate)} of prompt tokens"
        + ("." if bound is None else f"; an infinite cache would reach {bound:.1%}."),
    ]
    if bench.get("slo"):
        facts.append(f"Goodput {_percent(summary.goodput_share)} of all submitted ({summary.in_slo} in SLO).")
    return f"<section><h2>Numbers</h2><p>{html.escape(' '.join(facts))}</p>{times}</section>"


def _verdict(bench: dict[str, Any]) -> str:
    if not bench:
        return ""
    if bench.get("valid"):
        notes = bench.get("wall_notes")
        return f'<p class="note">{html.escape(notes)}</p>' if notes else ""
    heading = "In doubt" if bench.get("counts") else "Invalid run"
    return f'<p class="invalid">{heading}: {html.escape(str(bench.get("wall_verdict")))}</p>'


def _about(run: dict[str, Any], bench: dict[str, Any]) -> str:
    parts = [f"penstock {run['penstock']}"] if "penstock" in run else []
    if "seed" in run:
        parts.append(f"seed {run['seed']}")
    if "model" in bench:
        parts.append(f"model {bench['model']}")
    return ", ".join(parts)


def _figure(
    folder: Path, title: str, chart: str, file: str, head: Sequence[str], rows: Sequence[Sequence[object]]
) -> str:
    _csv(folder / file, head, rows)
    return (
        f"<section><h2>{html.escape(title)}</h2>{chart}"
        f'<p class="data"><a href="{file}">data as CSV</a> ({", ".join(head)})</p></section>'
    )


def _csv(path: Path, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    lines = [",".join(head)] + [",".join(_cell(cell) for cell in row) for row in rows]
    try:
        path.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error


def _cell(cell: object) -> str:
    if cell is None:
        return ""  # unknown is not 0
    if isinstance(cell, float):
        return f"{cell:.6g}"
    text = str(cell).replace("\n", " ")
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"') else text


def write_gaps(folder: Path, gaps: Sequence[tuple[float, int]]) -> None:
    """Write (seconds between tokens, their count), ascending, in the file that the report reads."""
    lines = [f"{gap:g},{count}\n" for gap, count in gaps]
    (folder / "itl.csv").write_text("gap_s,tokens\n" + "".join(lines))


def _gaps(path: Path) -> list[tuple[float, int]]:
    try:
        lines = path.read_text().splitlines()[1:]
    except FileNotFoundError:
        return []
    return [(float(gap), int(count)) for gap, count in (line.split(",") for line in lines)]


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"
