"""Command ``penstock explain``: the candidates behind a routing decision, from the record that decided."""

from pathlib import Path
from typing import Any

import click

from penstock.cli.shared.admin_client import AdminClient, admin_key_option, path_part, url_option
from penstock.cli.shared.output import json_option, print_json, seconds_text, table

EPILOG = """\b
Examples:
  penstock explain                        the newest requests, with their ids
  penstock explain REQUEST_ID
  penstock explain REQUEST_ID --json | jq '.decisions[0].candidates'
  penstock explain REQUEST_ID --run runs/RUN      of a run that is over, or was simulated
  penstock explain scale                  why there are as many replicas as there are: the planner's last decisions
  penstock explain scale --run runs/RUN

An answer carries its id in the header x-penstock-request-id. Lower cost wins; the chosen worker has a *.
"""

NANOSECONDS = 1e9
CANDIDATE_HEADINGS = (
    "",
    "WORKER",
    "COST",
    "PREFILL",
    "DECODE",
    "QUEUE",
    "TRANSFER",
    "DISCOUNT",
    "OVERLAP BLOCKS",
    "CACHED TOKENS",
    "ACTIVE",
    "PREFILL TOKENS",
    "KV BLOCKS",
    "INDEX",
)


@click.command("explain", epilog=EPILOG, short_help="Show why a request went where it went.")
@click.argument("request", nargs=-1, metavar="[REQUEST_ID]")
@click.option(
    "--run",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a run, live or simulated, instead of a running cluster.",
)
@click.option("--limit", type=click.IntRange(1, 1000), default=10, show_default=True, help="Newest requests to list.")
@url_option
@admin_key_option
@json_option
def command(
    request: tuple[str, ...], run: Path | None, limit: int, url: str, admin_key: str | None, as_json: bool
) -> int:
    """Show why REQUEST_ID went where it went; without an id, list the newest requests.

    ``penstock explain scale`` shows why pools have as many replicas as they have (a request that is called so is found
    by ``penstock explain request scale``).
    """
    if request == ("scale",):
        from penstock.cli.explain_scale import decisions_of, scale_text

        decided = decisions_of(run, limit, url, admin_key)
        if as_json:
            print_json(decided)
        else:
            click.echo(scale_text(decided))
        return 0
    words = request[1:] if len(request) == 2 and request[0] == "request" else request
    if len(words) > 1:
        raise click.UsageError("give one request id")
    if run is not None:
        from penstock.report.run.run_reader import explain, newest

        answer = {"requests": newest(run, limit)} if not words else explain(run, words[0])
    elif not words:
        answer = AdminClient(url, admin_key).get(f"/admin/requests?limit={limit}")
    else:
        answer = AdminClient(url, admin_key).get(f"/admin/explain/{path_part(words[0])}")
    if as_json:
        print_json(answer)
    else:
        click.echo(explain_text(words[0], answer) if words else requests_text(answer))
    return 0


def requests_text(answer: Any) -> str:
    """Return the newest ended requests as a table."""
    closed = answer.get("requests", []) if isinstance(answer, dict) else answer
    if not closed:
        return "No request has ended yet. 'penstock chat Hello' sends one."
    rows = [
        [
            entry.get("id"),
            entry.get("model"),
            entry.get("outcome"),
            entry.get("isl"),
            entry.get("cached"),
            entry.get("osl"),
            seconds_text(_between(entry, "arrived", "first")),
            target_text((entry.get("legs") or [{}])[-1].get("target")),
        ]
        for entry in closed
    ]
    headings = ("REQUEST", "MODEL", "OUTCOME", "PROMPT TOKENS", "CACHED", "OUTPUT TOKENS", "TTFT", "WORKER")
    return table(headings, rows)


def explain_text(request: str, explanation: dict[str, Any]) -> str:
    """Return a request's end and each of its decisions, with its candidates, as text."""
    closed = explanation.get("request")
    parts = [_closed_text(request, closed) if closed else f"Request {request} has not ended yet."]
    decisions = explanation.get("decisions") or []
    for decision in decisions:
        parts.append(_decision_text(decision))
    if not decisions:
        parts.append("It was never placed on a worker." if closed else "It waits for a worker.")
    return "\n\n".join(parts)


def target_text(target: Any) -> str:
    """Write a target, which travels as [worker, rank], for display."""
    if isinstance(target, list | tuple) and target:
        rank = target[1] if len(target) > 1 else 0
        return f"{target[0]}/{rank}" if rank else str(target[0])
    return str(target) if target else "-"


def _closed_text(request: str, closed: dict[str, Any]) -> str:
    lines = [
        f"Request {request} of {closed.get('model')}: {closed.get('outcome')}, status {closed.get('status')}"
        + (f", fault: {closed['fault']}" if closed.get("fault") not in (None, "none") else "")
        + (f" ({closed['reason']})" if closed.get("reason") else "")
    ]
    cached = closed.get("cached")
    lines.append(
        f"{closed.get('isl'):,} prompt tokens, of which {cached if cached is not None else 'an unknown number'} came "
        f"from cache ({closed.get('expected_cached')} expected); {closed.get('osl'):,} output tokens"
    )
    times = [
        f"queued {seconds_text(closed.get('queued'))}",
        f"first token after {seconds_text(_between(closed, 'arrived', 'first'))}",
        f"ended after {seconds_text(_between(closed, 'arrived', 'closed'))}",
        f"{closed.get('attempts')} attempt" + ("" if closed.get("attempts") == 1 else "s"),
    ]
    lines.append(", ".join(times))
    legs = closed.get("legs") or []
    if len({leg.get("role") for leg in legs}) > 1:
        lines.append("stages: " + ", then ".join(f"{leg['role']} on {target_text(leg.get('target'))}" for leg in legs))
    for leg in closed.get("legs") or []:
        if leg.get("failure"):
            lines.append(f"failed on {target_text(leg.get('target'))}: {leg['failure']}")
    return "\n".join(lines)


def _decision_text(decision: dict[str, Any]) -> str:
    chosen = target_text(decision.get("chosen"))
    candidates = sorted(decision.get("candidates") or [], key=lambda c: (c["total"], target_text(c["target"])))
    unit = candidates[0]["unit"] if candidates else "blocks"
    stage = decision.get("stage", "aggregated")
    head = (
        f"Attempt {decision.get('attempt')}{'' if stage == 'aggregated' else f' ({stage})'} went to {chosen} by "
        f"{decision.get('mode')}: {decision.get('reason')}\n"
        + (f"{decision['flow']}\n" if decision.get("flow") else "")
        + f"{decision.get('blocks'):,} prompt blocks; cost in {unit}"
    )
    if decision.get("temperature"):
        head += f"; drawn at temperature {decision['temperature']:g}"
    rows = [
        [
            "*" if target_text(c["target"]) == chosen else "",
            target_text(c["target"]),
            float(c["total"]),
            *(float(c[name]) for name in ("prefill", "decode", "queue", "transfer", "discount")),
            c["overlap_blocks"],
            c["overlap_tokens"],
            c["active_requests"],
            c["active_prefill_tokens"],
            c["active_blocks"],
            c["index"],
        ]
        for c in candidates
    ]
    lines = [head, table(CANDIDATE_HEADINGS, rows)]
    for excluded in decision.get("excluded") or []:
        lines.append(f"  excluded: {target_text(excluded.get('target'))} {excluded.get('reason')}")
    return "\n".join(lines)


def _between(entry: dict[str, Any], start: str, end: str) -> float | None:
    """Return seconds between two of a record's times, which are kernel nanoseconds."""
    first, last = entry.get(start), entry.get(end)
    if first is None or last is None:
        return None
    return float(last - first) / NANOSECONDS
