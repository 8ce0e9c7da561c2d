"""Command ``penstock replay``: whether a journal gives the same decisions, and those of other settings."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.shared.output import json_option, show, table
from penstock.kernel.plurals import counted

if TYPE_CHECKING:
    from penstock_lab.report.journal_replay import Replayed

EPILOG = """\b
Examples:
  penstock replay runs/RUN                               the same decisions again, or where they differ
  penstock replay runs/RUN --set router.mode=round_robin what round robin would have decided instead
  penstock replay runs/RUN/journal/ROUTER/000003         one segment
  penstock replay runs/RUN/journal/planner-PID           a planner's decisions
  penstock replay runs/RUN/journal/fleet-PID             which engines were started and ended

A run, live or simulated, leaves its journal under runs/RUN/journal/: hashes, counts and lengths, never text. With
--set every decision is asked in the state that it was made in, so effects do not add up from one to the next;
'penstock simulate --trace runs/RUN/requests.jsonl --compare ...' shows what they come to together.
"""


@click.command("replay", epilog=EPILOG, short_help="Feed a run's journal back, also with other settings.")
@click.argument("journal", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="NAME=VALUE",
    help="Ask what other settings of the router would have decided; may be repeated.",
)
@click.option("--limit", type=click.IntRange(0, 1000), default=10, show_default=True, help="Decisions to list.")
@json_option
def command(journal: Path, overrides: tuple[str, ...], limit: int, as_json: bool) -> int:
    """Feed JOURNAL, a run folder or what lies in its journal/, back through the router, planner or fleet that wrote it.

    Ends with 1 where a decision came out differently, or nothing of a machine's journal could be replayed.
    """
    from penstock_lab.report.journal_replay import replay

    replayed = replay(journal, list(overrides))
    show(as_json, replace(replayed, others=replayed.others[:limit]), text_of(replayed, bool(overrides), limit))
    return 0 if replayed.mismatch is None and not replayed.unread else 1


def text_of(replayed: "Replayed", what_if: bool, limit: int) -> str:
    """Return the result of a replay as text."""
    from penstock_lab.report.journal_replay import since

    lines = [
        f"{replayed.records:,} events in {counted(replayed.segments, 'segment')}, "
        f"{since(replayed):,.1f} s, {counted(replayed.decisions, 'decision')}"
    ]
    lines += [f"not read: {problem}" for problem in replayed.problems]
    lines += [
        f"nothing of {journal} was replayed: see above, and use the version that wrote it"
        for journal in replayed.unread
    ]
    wrong = replayed.mismatch
    if wrong is None and replayed.records:
        which = "every event that could be read" if replayed.problems else "every event"
        lines.append(f"{which} came to the same effects again")
    elif wrong is not None:
        lines += [
            f"record {wrong.sequence} of {wrong.router} ({wrong.segment}), {wrong.at / 1e9:.6f} s after its start:",
            f"  {wrong.event} {wrong.request or ''} came to other effects: {', '.join(wrong.effects) or 'none'}",
            f"  it was:  {_placed_text(wrong.recorded, wrong.kind)}",
            f"  it is:   {_placed_text(wrong.replayed, wrong.kind)}",
            *([f"  because: {wrong.why}"] if wrong.why else []),
        ]
    if what_if:
        lines += ["", *_comparison_lines(replayed, limit)]
    return "\n".join(lines)


def _placed_text(placed: list[tuple[str, int, str, int]], kind: str) -> str:
    if kind == "planner":
        tick = f"tick {placed[0][3]}, {placed[0][2]}: " if placed else ""
        return tick + (", ".join(f"{pool} {replicas}" for pool, replicas, _, _ in placed) or "no tick ended")
    if kind == "fleet":
        return ", ".join(f"{effect} {replica}" for replica, _, effect, _ in placed) or "nothing was done"
    placements = [f"{request} to {worker}/{rank} (attempt {attempt})" for request, attempt, worker, rank in placed]
    return ", ".join(placements) or "nothing was placed"


def _comparison_lines(replayed: "Replayed", limit: int) -> list[str]:
    whole = replayed.whole
    if not whole.decisions:
        return ["no decision could be asked with the other settings"]
    count = whole.decisions
    cached, ahead = (whole.cached, whole.other_cached), (whole.ahead, whole.other_ahead)
    shares = (whole.share, whole.other_share)
    rows = [
        ["prompt tokens expected in the cache", *(_share_text(each, whole.prompt) for each in cached)],
        ["prefill tokens ahead of the first token, mean", *(f"{each / count:,.0f}" for each in ahead)],
        ["share of the busiest worker", *(_share_text(max(each.values()), count) for each in shares)],
    ]
    if whole.predicted:
        ttft = (f"{each / whole.predicted * 1e3:,.1f} ms" for each in (whole.ttft, whole.other_ttft))
        rows.append(["TTFT as predicted from that, mean", *ttft])
    lines = [
        f"{whole.moved:,} of {count:,} decisions ({whole.moved / count:.1%}) would have been others",
        table(["", "AS IT WAS", "WITH --set"], rows),
    ]
    if replayed.others and limit:
        moved = [
            [f"{other.at / 1e9:.3f}", other.request, str(other.was), str(other.would_be), other.reason]
            for other in replayed.others[:limit]
        ]
        lines += ["", table(["SECONDS", "REQUEST", "WENT TO", "WOULD GO TO", "BECAUSE"], moved)]
    return lines


def _share_text(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
