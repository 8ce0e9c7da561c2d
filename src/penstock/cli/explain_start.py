"""Output of ``penstock explain start``: where the seconds of each replica's last start went."""

from collections.abc import Sequence

import click

from penstock.cli.shared.output import seconds_text, table
from penstock.kernel.values import Replica, StartRecord
from penstock.runtime.cluster_state.fleet_api import DesiredPool

PHASES = ("spawn", "wake", "import", "weights", "compile", "warm-up", "probe", "announce")
"""In the order in which they pass."""
MEANINGS = {
    "spawn": "until the process was born",
    "wake": "the engine's weights go back to where it computes",
    "import": "modules are loaded and arguments read",
    "weights": "weights are read",
    "compile": "the model is compiled",
    "warm-up": "memory is measured and set aside, and the first passes run",
    "probe": "until it answered health and models",
    "announce": "until every frontend knew it",
    "other": "between these",
}
UNKNOWN = "?"
BAR = 30


def started(pools: Sequence[DesiredPool], replica: str | None) -> list[Replica]:
    """Return the replicas with a known start, or the one of a name.

    Raises:
        UsageError: there is no such replica.
    """
    replicas = [each for pool in pools for each in pool.replicas or ()]
    if replica is None:
        return [each for each in replicas if each.start is not None]
    found = [each for each in replicas if each.id == replica]
    if not found:
        known = ", ".join(each.id for each in replicas) or "none"
        raise click.UsageError(f"there is no replica {replica!r}; there are: {known}")
    return found


def start_text(replicas: Sequence[Replica], one: bool) -> str:
    """Return the starts as a table, or the phases of one start as bars."""
    if one and replicas:
        return _phases_text(replicas[0])
    rows = []
    for replica in replicas:
        if replica.start is not None:
            spent = [_phase_cell(replica.start, phase) for phase in PHASES]
            how = "woken" if replica.start.woken else "started"
            rows.append([replica.id, how, _spent_text(replica.start.seconds), *spent, _spent_text(replica.start.other)])
    if not rows:
        return "No start of a replica that this cluster runs was seen to its end yet."
    headings = ["REPLICA", "HOW", "SECONDS", *(phase.upper() for phase in PHASES), "OTHER"]
    return table(headings, rows) + f"\n\n{UNKNOWN}: the engine does not tell, so that it is part of OTHER."


def _phases_text(replica: Replica) -> str:
    start = replica.start
    if start is None:
        why = f" ({replica.reason})" if replica.reason else ""
        state = "asleep" if replica.asleep else replica.state
        return f"{replica.id} is {state}{why}, and no start of it was seen to its end."
    how = "was woken" if start.woken else "was started"
    lines = [f"{replica.id} {how} within {seconds_text(start.seconds)}"]
    rows = []
    for phase, spent in (*_in_order(start), ("other", start.other)):
        share = 0.0 if spent is None or not start.seconds else spent / start.seconds
        rows.append([phase, _spent_text(spent), "#" * round(BAR * share), MEANINGS.get(phase, "")])
    return "\n".join([*lines, table(["PHASE", "SECONDS", "", "WHAT"], rows)])


def _in_order(start: StartRecord) -> list[tuple[str, float | None]]:
    known = [phase for phase in PHASES if phase in start.phases]
    return [(phase, start.phases[phase]) for phase in (*known, *(each for each in start.phases if each not in PHASES))]


def _phase_cell(start: StartRecord, phase: str) -> str:
    return _spent_text(start.phases[phase]) if phase in start.phases else "-"


def _spent_text(spent: float | None) -> str:
    return UNKNOWN if spent is None else f"{spent:.2f}"
