"""Command ``penstock explain``: the candidates behind a routing decision, from the record that decided."""

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import click
import msgspec

from penstock import extension
from penstock.cli.explain_scale import decisions_of, scale_text
from penstock.cli.explain_start import start_text, started
from penstock.cli.shared.admin_client import AdminClient, path_part
from penstock.cli.shared.cluster_options import cluster_options
from penstock.cli.shared.followed_file import run_option
from penstock.cli.shared.output import (
    fitted_table,
    json_option,
    seconds_text,
    show,
    text_width,
    wide_option,
    wrapped,
)
from penstock.frontend.admin.admin_answers import RequestList
from penstock.kernel.plurals import counted
from penstock.kernel.request_record import Explanation, RequestEnd
from penstock.router.events import Decision
from penstock.runtime.cluster_state.fleet_api import DesiredState

EPILOG = """\b
Examples:
  penstock explain                        the newest requests, with their ids
  penstock explain REQUEST_ID
  penstock explain --program build-42     the newest requests of one program and its sub-agents
  penstock explain REQUEST_ID --json | jq '.decisions[0].candidates'
  penstock explain REQUEST_ID --run runs/RUN      of a run that is over, or was simulated
  penstock explain scale                  why there are as many replicas as there are: the planner's last decisions
  penstock explain scale --run runs/RUN
  penstock explain start                  where the seconds of each replica's start went
  penstock explain start main-0

An answer carries its id in the header x-penstock-request-id. Lower cost wins; the chosen worker has a *.
"""

LISTED_MAX = 1000
"""Newest requests among which those of a program are looked for: as many as the route lists."""
NANOSECONDS = 1e9
COST_PARTS = ("prefill", "decode", "queue", "transfer", "adapter", "discount")
CANDIDATE_COLUMNS = {
    "COST": "total",
    **{part.upper(): part for part in COST_PARTS},
    "OVERLAP BLOCKS": "overlap_blocks",
    "CACHED TOKENS": "overlap_tokens",
    "COSTLY BLOCKS": "costly_blocks",
    "ACTIVE": "active_requests",
    "PREFILL TOKENS": "active_prefill_tokens",
    "IN USE": "active_blocks",
    "INDEX": "index",
}
"""Heading -> attribute of a candidate's `Cost`."""
_LOADS = ("INDEX", "IN USE", "PREFILL TOKENS", "COSTLY BLOCKS", "CACHED TOKENS", "ACTIVE")
CANDIDATES_SPARE = (*_LOADS, *(part.upper() for part in reversed(COST_PARTS)))
"""Columns that are left out on a narrow terminal, the first one first, after those that tell no candidates apart."""
CANDIDATES_SHOWN = 20
"""Most candidates of a decision that are shown as text, the cheapest first."""
REQUESTS_SPARE = ("MODEL", "SESSION", "CACHED", "PROMPT")


@click.command("explain", epilog=EPILOG, short_help="Show why a request went where it went.")
@click.argument("request", nargs=-1, metavar="[REQUEST_ID]")
@run_option
@wide_option
@click.option("--limit", type=click.IntRange(1, 1000), default=10, show_default=True, help="Newest requests to list.")
@click.option("--program", help="List the newest requests of this program only, whichever of its sub-agents sent them.")
@cluster_options
@json_option
def command(
    client: AdminClient,
    request: tuple[str, ...],
    run: Path | None,
    limit: int,
    program: str | None,
    as_json: bool,
    wide: bool,
) -> int:
    """Show why REQUEST_ID went where it went; without an id, list the newest requests.

    ``penstock explain scale`` shows why pools have as many replicas as they have (a request that is called so is found
    by ``penstock explain request scale``). ``penstock explain start`` shows where the seconds of starts went.
    """
    width = text_width(wide)
    if request == ("scale",):
        decided = decisions_of(run, limit, client)
        show(as_json, decided, wrapped(scale_text(decided), width, hang="    "))
        return 0
    if request[:1] == ("start",) and len(request) <= 2:
        state = client.get("/admin/desired", DesiredState)
        replicas = started(state.pools, request[1] if len(request) == 2 else None)
        show(as_json, {"replicas": replicas}, wrapped(start_text(replicas, len(request) == 2), width, hang="    "))
        return 0
    words = request[1:] if len(request) == 2 and request[0] == "request" else request
    if len(words) > 1:
        raise click.UsageError("give one request id")
    answer: RequestList | Explanation[Decision]
    if not words:
        among = limit if program is None else LISTED_MAX
        if run is None:
            answer = client.get(f"/admin/requests?limit={among}", RequestList)
        else:
            answer = RequestList(extension.entry("run", "newest")(run, among))
        if program is not None:
            answer = RequestList([each for each in answer.requests if each.program == program][:limit])
    elif run is not None:
        recorded = msgspec.json.encode(extension.entry("run", "explain")(run, words[0]))
        answer = msgspec.json.decode(recorded, type=Explanation[Decision])
    else:
        answer = client.get(f"/admin/explain/{path_part(words[0])}", Explanation[Decision])
    if isinstance(answer, RequestList):
        text = requests_text(answer.requests, width)
    else:
        text = explain_text(words[0], answer, width)
    show(as_json, answer, text)
    return 0


def requests_text(ended: Sequence[RequestEnd], width: int) -> str:
    """Return the newest ended requests as a table; an id is never shortened."""
    if not ended:
        return "No request has ended yet. 'penstock chat Hello' sends one."
    rows = [
        [
            each.id,
            each.model,
            each.outcome,
            each.isl,
            each.cached,
            each.osl,
            seconds_text(_seconds_between(each.arrived, each.first)),
            str(each.legs[-1].target) if each.legs else "-",
        ]
        for each in ended
    ]
    headings = ["REQUEST", "MODEL", "OUTCOME", "PROMPT", "CACHED", "OUTPUT", "TTFT", "WORKER"]
    if any(each.program or each.session for each in ended):
        headings += ["SESSION", "PROGRAM"]
        rows = [[*row, each.session or "-", each.program or "-"] for row, each in zip(rows, ended, strict=True)]
    silent = ("MODEL",) if len({each.model for each in ended}) == 1 else ()
    return fitted_table(headings, rows, width, REQUESTS_SPARE, silent=silent, text="WORKER")


def explain_text(request: str, explanation: Explanation[Decision], width: int) -> str:
    """Return a request's end and each of its decisions, with its candidates, as text."""
    ended = explanation.request
    head = f"Request {request} has not ended yet." if ended is None else _ended_text(request, ended)
    parts = [wrapped(head, width), *(_decision_text(decision, width) for decision in explanation.decisions)]
    if not explanation.decisions:
        parts.append("It waits for a worker." if ended is None else "It was never placed on a worker.")
    return "\n\n".join(parts)


def _ended_text(request: str, ended: RequestEnd) -> str:
    lines = [
        f"Request {request} of {ended.model}"
        + (f" (asked for as {ended.name})" if ended.name is not None else "")
        + (f" (a shadow's copy of {ended.copy_of})" if ended.copy_of is not None else "")
        + f": {ended.outcome}, status {ended.status}"
        + (f", fault: {ended.fault}" if ended.fault != "none" else "")
        + (f" ({ended.reason})" if ended.reason else "")
    ]
    cached = "an unknown number" if ended.cached is None else f"{ended.cached:,}"
    isl = "an unknown number of prompt tokens" if ended.isl is None else counted(ended.isl, "prompt token")
    lines.append(
        f"{isl}, of which {cached} came from cache ({ended.expected_cached:,} expected); "
        f"{counted(ended.osl, 'output token')}"
    )
    times = [
        f"queued {seconds_text(ended.queued)}",
        f"first token after {seconds_text(_seconds_between(ended.arrived, ended.first))}",
        f"ended after {seconds_text(_seconds_between(ended.arrived, ended.closed))}",
        counted(ended.attempts or 0, "attempt"),
    ]
    lines.append(", ".join(times))
    if ended.session or ended.program:
        lines.append(f"session {ended.session or '-'} of program {ended.program or '-'}")
    if ended.ignored_hints:
        lines.append("hints without an effect: " + ", ".join(ended.ignored_hints))
    if ended.way:
        lines.append(ended.way)
    if ended.next_turn:
        lines.append(f"beginning of the next turn: {ended.next_turn}")
    if len({leg.role for leg in ended.legs}) > 1:
        lines.append("stages: " + ", then ".join(f"{leg.role} on {leg.target}" for leg in ended.legs))
    lines += [f"failed on {leg.target}: {leg.failure}" for leg in ended.legs if leg.failure]
    return "\n".join(lines)


def _decision_text(decision: Decision, width: int) -> str:
    candidates = sorted(decision.candidates, key=lambda each: (each.total, str(each.target)))
    more = len(candidates) - CANDIDATES_SHOWN
    if more > 0:  # the last of them is the chosen one, where it is not among the cheapest
        chosen = [each for each in candidates[CANDIDATES_SHOWN:] if each.target == decision.chosen]
        candidates = [*candidates[: CANDIDATES_SHOWN - len(chosen)], *chosen]
    stage = "" if decision.stage == "aggregated" else f" ({decision.stage})"
    head = (
        f"Attempt {decision.attempt}{stage} went to {decision.chosen} by {decision.mode}: {decision.reason}\n"
        + (f"{decision.flow}\n" if decision.flow else "")
        + (f"{decision.adapter}\n" if decision.adapter else "")
        + f"{counted(decision.blocks, 'prompt block')}; cost in {candidates[0].unit if candidates else 'blocks'}"
    )
    if decision.temperature:
        head += f"; drawn at temperature {decision.temperature:g}"
    values_of = attrgetter(*CANDIDATE_COLUMNS.values())
    scorers = list(candidates[0].plugins or ()) if candidates else []
    rows = [
        [
            f"{' *'[each.target == decision.chosen]} {each.target}",
            *values_of(each),
            *((each.plugins or {}).get(name, 0.0) for name in scorers),
        ]
        for each in candidates
    ]
    headings = [*CANDIDATE_COLUMNS, *(name.upper() for name in scorers)]
    columns = dict(zip(headings, zip(*(row[1:] for row in rows), strict=True), strict=True)) if rows else {}
    same = [heading for heading, values in columns.items() if heading != "COST" and len(set(values)) == 1]
    spare = (*same, *(heading for heading in CANDIDATES_SPARE if heading not in same))
    lines = [wrapped(head, width), fitted_table(("  WORKER", *headings), rows, width, spare)]
    if decision.left_out:
        kept = "only these were written down (router.decisions is the share of requests of which all are)"
        lines.append(wrapped(f"  and {counted(decision.left_out, 'other candidate')}: {kept}", width, hang="    "))
    elif more > 0:
        lines.append(f"  and {counted(more, 'other candidate')}: --json has them all")
    for each in decision.excluded:
        others = f" (and {counted(each.others, 'other')})" if each.others else ""
        lines.append(wrapped(f"  excluded: {each.target}{others} {each.reason}", width, hang="    "))
    return "\n".join(lines)


def _seconds_between(start: int, end: int | None) -> float | None:
    """Return seconds between two times, which are kernel nanoseconds."""
    return None if end is None else (end - start) / NANOSECONDS
