"""Command ``penstock status``: models, workers, queues and findings, as the router itself sees them."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from penstock.cli.explain_scale import planner_text
from penstock.cli.shared.admin_client import AdminClient
from penstock.cli.shared.cluster_options import cluster_options
from penstock.cli.shared.live_screen import watch
from penstock.cli.shared.output import (
    WIDE,
    fitted,
    json_option,
    percent,
    seconds_text,
    show,
    table,
    terminal_width,
    text_width,
    wide_option,
    wrapped,
)
from penstock.cli.shared.worker_tables import finding_lines, workers_text
from penstock.frontend.admin.admin_answers import ClusterStatus, LastMinute, ShadowStatus, WantedAdapter
from penstock.frontend.program_ledger import ProgramStatus
from penstock.kernel.plurals import counted
from penstock.kernel.time_windows import QUANTILES
from penstock.router.status_rows import OUTCOMES, ModelStatus
from penstock.runtime.cluster_state.fleet_api import DesiredPool

EPILOG = """\b
Examples:
  penstock status
  penstock status --wide
  penstock status --watch
  penstock status --json | jq '.workers[] | {id, state, index}'
  penstock status --context dev --namespace llm
  penstock status --url http://127.0.0.1:9000 --admin-key "$KEY"
"""


@click.command("status", epilog=EPILOG, short_help="Show models, workers, queues and findings of a cluster.")
@wide_option
@click.option("--watch", "-w", "watching", is_flag=True, help="Redraw it every second until q or Ctrl-C, as top does.")
@cluster_options
@json_option
def command(client: AdminClient, as_json: bool, wide: bool, watching: bool) -> int:
    """Show models, workers, queues and findings of a running cluster."""
    if watching:
        if as_json or wide:
            raise click.UsageError("--watch goes with neither --json nor --wide")
        watch(client, 1.0, None, status_screen)
        return 0
    status = client.get("/admin/status", ClusterStatus)
    show(as_json, status, status_text(status, text_width(wide)))
    return 0


REASONS_MAX = 5
"""Most crashes whose reasons are shown, the newest first."""


def status_screen(status: ClusterStatus, rate: float | None, note: str | None) -> str:
    """Return the status as it is watched: with how many requests end per second, and what is wrong with it."""
    width = terminal_width()
    text = status_text(status, width, "" if rate is None else f"; {rate:.1f} requests end per second")
    return text if note is None else f"{text}\n{wrapped(f'error: {note}', width)}"


def status_text(status: ClusterStatus, width: int, pace: str = "") -> str:
    """Return the whole status as text, in lines of ``width`` columns. ``pace``: follows the counts of requests."""
    parts = [_status_head(status, width, pace)]
    parts.append(table(*fitted(MODEL_HEADINGS, model_rows(status), width, MODEL_SPARE)))
    parts.append(workers_text(status, width))
    if status.names:
        parts.append("\n".join(["Names:", *(wrapped(f"  {line}", width, hang="    ") for line in name_lines(status))]))
    if status.adapters:
        lines = (wrapped(f"  {adapter_line(each)}", width, hang="    ") for each in status.adapters)
        parts.append("\n".join(["Adapters:", *lines]))
    if status.programs:
        parts.append(programs_text(status.programs[: None if width == WIDE else PROGRAMS_SHOWN], len(status.programs)))
    if status.planner is not None:
        parts.append(planner_text(status.planner))
    crashes = crash_lines(status)
    if crashes:
        parts.append("\n".join(["Restarts:", *(wrapped(f"  {line}", width, hang="    ") for line in crashes)]))
    if status.findings:
        lines = (wrapped(line, width, hang="    ") for line in finding_lines(status))
        parts.append("Findings:\n" + "\n".join(lines))
    else:
        parts.append("No findings. 'penstock doctor' looks further.")
    return "\n\n".join(parts)


PROGRAM_HEADINGS = ("PROGRAM", "SUB-AGENTS", "REQUESTS", "FAILED", "PROMPT", "OUTPUT", "HIT RATE", "WORKERS")
PROGRAMS_SHOWN = 5
"""Programs that are listed without --wide."""


def programs_text(programs: Sequence[ProgramStatus], count: int) -> str:
    """Return the newest programs as a table; ``count``: how many the status has."""
    rows = [
        [
            program.name,
            f"{len(program.sessions)}{' or more' if program.more_sessions else ''}",
            program.requests,
            program.failed,
            program.prompt_tokens,
            program.output_tokens,
            percent(program.hit_rate),
            ", ".join(f"{worker} ({share:,})" for worker, share in _largest(program.workers)),
        ]
        for program in programs
    ]
    left = "" if len(programs) == count else f"\n{count - len(programs)} more: penstock status --wide."
    return table(PROGRAM_HEADINGS, rows) + left


def _largest(workers: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(workers.items(), key=lambda item: (-item[1], item[0]))[:3]


def head_lines(status: ClusterStatus) -> list[str]:
    """Return the cluster in a few lines: its URL, its counts, and its speed in the last minute."""
    counts = ", ".join(f"{getattr(status.requests, name):,} {name}" for name in ("inflight", *OUTCOMES))
    return [
        f"{status.cluster or 'cluster'} at {status.endpoint or '-'}, up {seconds_text(status.uptime)}, "
        f"{status.mode} routing, Penstock {status.version}",
        f"Requests: {counts}; hit rate {percent(status.hit_rate)}",
        *latency_lines(status.last_minute),
    ]


def latency_lines(minute: LastMinute) -> list[str]:
    """Return TTFT and ITL of the last minute in two lines; unknown where no token was streamed."""
    lines = []
    for name in ("ttft", "itl"):
        parts = (f"{quantile} {seconds_text(getattr(minute, f'{name}_{quantile}'))}" for quantile in QUANTILES)
        lines.append(f"{name.upper():<5}{', '.join(parts)}")
    lines[0] += f" (last minute: {counted(minute.ended, 'request')} ended)"
    return lines


def crash_lines(status: ClusterStatus) -> list[str]:
    """Return one line per crashed process: which, how often, and the last reason."""
    lines = []
    for crash in status.crashes[:REASONS_MAX]:
        ago = seconds_text(max(0.0, time.time() - crash.at))
        lines.append(f"{crash.name}: {counted(crash.count, 'time')}, the last {ago} ago: it {crash.reason}")
    if len(status.crashes) > REASONS_MAX:
        more = counted(len(status.crashes) - REASONS_MAX, "process", "processes")
        lines.append(f"and {more} more; --json has them all")
    return lines


def name_lines(status: ClusterStatus) -> list[str]:
    """Return one line per name that stands for models, and one per shadow of it."""
    lines = []
    for each in status.names:
        whole = sum(each.weights.values())
        shares = (
            f"{model} {percent(weight / whole)} ({counted(each.requests.get(model, 0), 'request')})"
            for model, weight in each.weights.items()
        )
        lines.append(f"{each.name}: {', '.join(shares)}")
        lines += [f"{each.name}: {shadow_text(shadow)}" for shadow in each.shadows]
    return lines


def adapter_line(adapter: WantedAdapter) -> str:
    """Return in one line on how many workers an adapter is to be, and on which it is."""
    there = [*adapter.workers, *(f"{worker} (loads)" for worker in adapter.loading)]
    text = (
        f"{adapter.name} of {adapter.model}: {counted(adapter.wanted, 'worker')} wanted, {len(adapter.workers)} there"
    )
    text += f" ({', '.join(there)})" if there else ""
    return f"{text}; {adapter.why}" if adapter.why else text


def shadow_text(shadow: ShadowStatus) -> str:
    """Return in one line what the copies of a name's requests to one model came to."""
    text = f"copies of {percent(shadow.share)} to {shadow.model}: {shadow.same:,} same, {shadow.different:,} different"
    text += "".join(f", {count:,} {name}" for name in ("failed", "skipped") if (count := getattr(shadow, name)))
    if shadow.seconds is None or shadow.answered_seconds is None:
        return text
    return f"{text}; {seconds_text(shadow.seconds)} on average, against {seconds_text(shadow.answered_seconds)}"


MODEL_HEADINGS = ("MODEL", "READY", "WORKERS", "INDEX", "BLOCK", "TOKENIZER", "INFLIGHT", "QUEUED", "HIT RATE")
MODEL_SPARE = ("TOKENIZER", "BLOCK")
"""Columns that are left out first on a narrow terminal."""


def handoff_line(model: ModelStatus, counts: Mapping[str, int]) -> str:
    """Return in one line the outcomes of a model's hand-offs from prefill workers."""
    text = f"{counts['done']:,} handed over, {counts['local']:,} not worth it"
    for name, words in (("fallback", "fell back"), ("lost", "lost"), ("released", "let go")):
        if counts.get(name):
            text += f", {counts[name]:,} {words}"
    return f"Prefills of {model.name} on workers of their own ({model.handoff}): {text}"


def model_rows(status: ClusterStatus) -> list[list[Any]]:
    """Return one row per model, under `MODEL_HEADINGS`; of those that are desired, so many replicas are ready."""
    desired: dict[str, list[DesiredPool]] = {}
    for pool in status.pools:
        desired.setdefault(pool.model, []).append(pool)
    ready = {
        model: f"{sum(each.serving for each in pools)} of {sum(each.desired for each in pools)}"
        for model, pools in desired.items()
    }
    return [
        [
            model.name,
            ready.get(model.name, model.ready),
            model.workers,
            model.index,
            model.block_size,
            model.tokenizer or "text blocks",
            model.inflight,
            status.queue[model.name].length if model.name in status.queue else None,
            percent(model.hit_rate),
        ]
        for model in status.models
    ]


def _status_head(status: ClusterStatus, width: int, pace: str) -> str:
    lines = [*head_lines(status), f"Run folder: {_near(status.run)}"]
    lines[1] += pace
    lines += [handoff_line(model, model.handoffs) for model in status.models if model.handoffs]
    if len(status.frontends) > 1:
        lines.append(f"Frontends: {len(status.frontends)}; the counts are of all of them")
    return "\n".join(wrapped(line, width) for line in lines)


def _near(run: str) -> str:
    """Write a folder relative to the current one, where it lies below."""
    if not run:
        return "-"
    path = Path(run)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else run
