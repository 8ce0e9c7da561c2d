"""Command ``penstock status``: models, workers, queues and findings, as the router itself sees them."""

import time
from pathlib import Path
from typing import Any

import click

from penstock.cli.shared.admin_client import AdminClient, admin_key_option, url_option
from penstock.cli.shared.output import (
    fitted,
    json_option,
    percent,
    print_json,
    seconds_text,
    table,
    terminal_width,
    wrapped,
)
from penstock.kernel.plurals import counted
from penstock.kernel.time_windows import QUANTILES

EPILOG = """\b
Examples:
  penstock status
  penstock status --wide
  penstock status --json | jq '.workers[] | {id, state, index}'
  penstock status --url http://127.0.0.1:9000 --admin-key "$KEY"
"""


@click.command("status", epilog=EPILOG, short_help="Show models, workers, queues and findings of a cluster.")
@click.option("--wide", is_flag=True, help="Show every column, however wide the terminal is.")
@url_option
@admin_key_option
@json_option
def command(url: str, admin_key: str | None, as_json: bool, wide: bool) -> int:
    """Show models, workers, queues and findings of a running cluster."""
    status = AdminClient(url, admin_key).get("/admin/status")
    if as_json:
        print_json(status)
    else:
        click.echo(status_text(status, WIDE if wide else terminal_width()))
    return 0


WIDE = 10_000
"""Columns of a line where everything should be shown."""
REASONS_MAX = 5
"""Most crashes whose reasons are shown, the newest first."""


def status_text(status: dict[str, Any], width: int) -> str:
    """Return the whole status as text, in lines of ``width`` columns."""
    parts = [_head(status, width)]
    parts.append(table(*fitted(MODEL_HEADINGS, model_rows(status), width, MODEL_SPARE)))
    headings, rows = fitted(WORKER_HEADINGS, worker_rows(status), width, worker_spare(status))
    parts.append(table(headings, rows))
    left_out = [heading for heading in WORKER_HEADINGS if heading not in headings and heading != "ROLE"]
    if left_out:
        parts[-1] += "\n" + wrapped(f"'penstock status --wide' shows also: {', '.join(left_out).lower()}.", width)
    planner = status.get("planner")
    if planner:
        from penstock.cli.explain_scale import planner_text

        parts.append(planner_text(planner))
    crashes = crash_lines(status)
    if crashes:
        parts.append("\n".join(["Restarts:", *(wrapped(f"  {line}", width, hang="    ") for line in crashes)]))
    findings = status.get("findings") or []
    if findings:
        lines = (wrapped(finding_line(finding), width, hang="    ") for finding in findings)
        parts.append("Findings:\n" + "\n".join(lines))
    else:
        parts.append("No findings. 'penstock doctor' looks further.")
    return "\n\n".join(parts)


def head_lines(status: dict[str, Any]) -> list[str]:
    """Return the cluster in a few lines: its URL, its counts, and its speed in the last minute."""
    requests = status.get("requests") or {}
    counts = ", ".join(
        f"{requests[name]:,} {name}"
        for name in ("inflight", "ok", "failed", "rejected", "cancelled", "expired")
        if isinstance(requests.get(name), int)
    )
    name = status.get("cluster") or "cluster"
    return [
        f"{name} at {status.get('endpoint') or '-'}, up {seconds_text(status.get('uptime'))}, "
        f"{status.get('mode') or '-'} routing, Penstock {status.get('version') or '-'}",
        f"Requests: {counts or '-'}; hit rate {percent(status.get('hit_rate'))}",
        *latency_lines(status),
    ]


def latency_lines(status: dict[str, Any]) -> list[str]:
    """Return TTFT and ITL of the last minute in two lines; unknown where no token was streamed."""
    minute = status.get("last_minute") or {}
    lines = []
    for name in ("ttft", "itl"):
        parts = (f"{quantile} {seconds_text(minute.get(f'{name}_{quantile}'))}" for quantile in QUANTILES)
        lines.append(f"{name.upper():<5}{', '.join(parts)}")
    ended = minute.get("ended")
    lines[0] += f" (last minute: {'-' if ended is None else counted(ended, 'request')} ended)"
    return lines


def crash_lines(status: dict[str, Any]) -> list[str]:
    """Return one line per crashed process: which, how often, and the last reason."""
    crashes = status.get("crashes") or []
    lines = []
    for crash in crashes[:REASONS_MAX]:
        ago = seconds_text(max(0.0, time.time() - crash["at"]))
        lines.append(f"{crash['name']}: {counted(crash['count'], 'time')}, the last {ago} ago: it {crash['reason']}")
    if len(crashes) > REASONS_MAX:
        lines.append(f"and {counted(len(crashes) - REASONS_MAX, 'process', 'processes')} more; --json has them all")
    return lines


MODEL_HEADINGS = ("MODEL", "READY", "WORKERS", "INDEX", "BLOCK", "TOKENIZER", "INFLIGHT", "QUEUED", "HIT RATE")
MODEL_SPARE = ("TOKENIZER", "BLOCK")
"""Columns that are left out first on a narrow terminal."""
WORKER_HEADINGS = (
    "WORKER",
    "ROLE",
    "STATE",
    "INDEX",
    "ACTIVE",
    "PREFILL TOKENS",
    "KV BLOCKS",
    "REQUESTS",
    "FAILED",
    "RESTARTS",
    "BREAKER",
    "KV EVENTS",
    "LOST",
    "URL",
)


def worker_spare(status: dict[str, Any]) -> tuple[str, ...]:
    """Return which columns of the workers are left out first."""
    least = ("URL", "LOST", "KV EVENTS", "BREAKER", "PREFILL TOKENS")
    plain = all(worker.get("role") in (None, "aggregated") for worker in status.get("workers") or [])
    # The reason why a worker takes no requests is beside its state.
    return (*(("ROLE",) if plain else ()), *least, "INDEX", "KV BLOCKS")


def handoff_line(model: dict[str, Any]) -> str:
    """Return in one line the outcomes of a model's hand-offs from prefill workers."""
    counts = model["handoffs"]
    text = f"{counts['done']:,} handed over, {counts['local']:,} not worth it"
    for name, words in (("fallback", "fell back"), ("lost", "lost"), ("released", "let go")):
        if counts.get(name):
            text += f", {counts[name]:,} {words}"
    return f"Prefills of {model.get('name')} on workers of their own ({model.get('handoff')}): {text}"


def model_rows(status: dict[str, Any]) -> list[list[Any]]:
    """Return one row per model, under `MODEL_HEADINGS`."""
    queues = status.get("queue") or {}
    return [
        [
            model.get("name"),
            model.get("ready"),
            model.get("workers"),
            model.get("index"),
            model.get("block_size"),
            model.get("tokenizer") or "text blocks",
            model.get("inflight"),
            (queues.get(model.get("name")) or {}).get("length"),
            percent(model.get("hit_rate")),
        ]
        for model in status.get("models") or []
    ]


def worker_rows(status: dict[str, Any]) -> list[list[Any]]:
    """Return one row per worker, under `WORKER_HEADINGS`."""
    rows = []
    for worker in sorted(status.get("workers") or [], key=lambda worker: str(worker.get("id"))):
        events = worker.get("kv_events") or {}
        blocks, size = worker.get("active_blocks"), worker.get("kv_blocks")
        state = worker.get("state")
        if worker.get("why_not") and worker["why_not"] != state:
            state = f"{state} ({worker['why_not']})"
        rows.append(
            [
                worker.get("id"),
                worker.get("role"),
                state,
                worker.get("index"),
                worker.get("active_requests"),
                worker.get("active_prefill_tokens"),
                f"{blocks:,} of {size:,}" if isinstance(blocks, int) and isinstance(size, int) else blocks,
                worker.get("requests"),
                worker.get("failures"),
                worker.get("restarts"),
                worker.get("breaker"),
                events.get("applied"),
                events.get("lost"),
                worker.get("url"),
            ]
        )
    return rows


def finding_line(finding: dict[str, Any]) -> str:
    """Return one finding as a line, with its next step."""
    hint = finding.get("hint")
    return f"  {finding.get('level')}: {finding.get('text')}" + (f" ({hint})" if hint else "")


def _head(status: dict[str, Any], width: int) -> str:
    lines = [*head_lines(status), f"Run folder: {_near(status.get('run'))}"]
    for model in status.get("models") or []:
        if model.get("handoffs"):
            lines.append(handoff_line(model))
    frontends = status.get("frontends") or []
    if len(frontends) > 1:
        lines.append(f"Frontends: {len(frontends)}; the counts are of all of them")
    return "\n".join(wrapped(line, width) for line in lines)


def _near(run: str | None) -> str:
    """Write a folder relative to the current one, where it lies below."""
    if not run:
        return "-"
    path = Path(run)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else run
