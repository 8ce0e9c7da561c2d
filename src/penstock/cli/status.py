"""What does ``penstock status`` show? Models, workers, queues and findings, as the router itself sees them."""

from typing import Any

import click

from penstock.cli.client import Client, admin_key_option, url_option
from penstock.cli.output import json_option, percent, print_json, seconds_text, table

EPILOG = """\b
Examples:
  penstock status
  penstock status --json | jq '.workers[] | {id, state, index}'
  penstock status --url http://127.0.0.1:9000 --admin-key "$KEY"
"""


@click.command("status", epilog=EPILOG, short_help="Show models, workers, queues and findings of a cluster.")
@url_option
@admin_key_option
@json_option
def command(url: str, admin_key: str | None, as_json: bool) -> int:
    """Show models, workers, queues and findings of a running cluster."""
    found = Client(url, admin_key).get("/admin/status")
    if as_json:
        print_json(found)
    else:
        click.echo(status_text(found))
    return 0


def status_text(found: dict[str, Any]) -> str:
    """Return the whole status as text."""
    parts = [_head(found), table(MODEL_HEADINGS, model_rows(found)), table(WORKER_HEADINGS, worker_rows(found))]
    planner = found.get("planner")
    if planner:
        from penstock.cli.explain_scale import planner_text

        parts.append(planner_text(planner))
    findings = found.get("findings") or []
    if findings:
        parts.append("Findings:\n" + "\n".join(finding_line(finding) for finding in findings))
    else:
        parts.append("No findings. 'penstock doctor' looks further.")
    return "\n\n".join(parts)


def head_lines(found: dict[str, Any]) -> list[str]:
    """Return the cluster in two lines: where it is, and its counts."""
    requests = found.get("requests") or {}
    counts = ", ".join(
        f"{requests[name]:,} {name}"
        for name in ("inflight", "ok", "failed", "rejected", "cancelled", "expired")
        if isinstance(requests.get(name), int)
    )
    name = found.get("cluster") or "cluster"
    return [
        f"{name} at {found.get('endpoint') or '-'}, up {seconds_text(found.get('uptime'))}, "
        f"{found.get('mode') or '-'} routing, Penstock {found.get('version') or '-'}",
        f"Requests: {counts or '-'}; hit rate {percent(found.get('hit_rate'))}",
    ]


MODEL_HEADINGS = ("MODEL", "READY", "WORKERS", "INDEX", "BLOCK", "TOKENIZER", "INFLIGHT", "QUEUED", "HIT RATE")
WORKER_HEADINGS = (
    "WORKER",
    "ROLE",
    "STATE",
    "INDEX",
    "ACTIVE",
    "PREFILL TOKENS",
    "KV BLOCKS",
    "REQUESTS",
    "FAILURES",
    "BREAKER",
    "KV EVENTS",
    "LOST",
    "URL",
)


def handoff_line(model: dict[str, Any]) -> str:
    """Return in one line what became of a model's prefills on workers of their own."""
    counts = model["handoffs"]
    told = f"{counts['done']:,} handed over, {counts['local']:,} not worth it"
    for name, words in (("fallback", "fell back"), ("lost", "lost"), ("released", "let go")):
        if counts.get(name):
            told += f", {counts[name]:,} {words}"
    return f"Prefills of {model.get('name')} on workers of their own ({model.get('handoff')}): {told}"


def model_rows(found: dict[str, Any]) -> list[list[Any]]:
    """Return one row per model, under `MODEL_HEADINGS`."""
    queues = found.get("queue") or {}
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
        for model in found.get("models") or []
    ]


def worker_rows(found: dict[str, Any]) -> list[list[Any]]:
    """Return one row per worker, under `WORKER_HEADINGS`."""
    rows = []
    for worker in sorted(found.get("workers") or [], key=lambda worker: str(worker.get("id"))):
        events = worker.get("kv_events") or {}
        held, size = worker.get("active_blocks"), worker.get("kv_blocks")
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
                f"{held:,} of {size:,}" if isinstance(held, int) and isinstance(size, int) else held,
                worker.get("requests"),
                worker.get("failures"),
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


def _head(found: dict[str, Any]) -> str:
    lines = [*head_lines(found), f"Run folder: {found.get('run') or '-'}"]
    for model in found.get("models") or []:
        if model.get("handoffs"):
            lines.append(handoff_line(model))
    frontends = found.get("frontends") or []
    if len(frontends) > 1:
        lines.append(f"Frontends: {len(frontends)}; the counts are of the one that answered")
    return "\n".join(lines)
