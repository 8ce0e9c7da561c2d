"""Worker tables: a fleet as text, every worker of a small one; of a large one its pools, and who is worth a look."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.cli.shared.output import WIDE, fitted_table, table, wrapped
from penstock.frontend.admin.admin_answers import ClusterStatus
from penstock.kernel.plurals import counted
from penstock.kernel.values import Replica
from penstock.router.status_rows import StatusFinding, WorkerStatus

WORKERS_MAX, WORST_MAX, NAMES_MAX = 30, 12, 3
"""Workers that are all listed, as many as a screen has lines; those of a larger fleet that are; names in a sentence."""
_DIGITS = re.compile(r"(\d+)")
_NAME = re.compile(r"[\w.-]+")


def natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts names as people count: main-2 before main-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]


def workers_text(status: ClusterStatus, width: int) -> str:
    """Return the workers as text, in lines of ``width`` columns; at `WIDE` all of them, however many."""
    rows = worker_rows(status)
    if len(rows) <= WORKERS_MAX or width == WIDE:
        return _worker_table_text(status, list(rows.values()), width)
    worst = _worst(status, rows)[:WORST_MAX]
    parts = [table(POOL_HEADINGS, pool_rows(status))]
    if worst:
        parts.append(_worker_table_text(status, [rows[name] for name in worst], width))
    return "\n\n".join(parts) + f"\n{counted(len(rows) - len(worst), 'worker')} more: penstock status --wide."


def _worker_table_text(status: ClusterStatus, rows: Sequence[Sequence[Any]], width: int) -> str:
    text = fitted_table(WORKER_HEADINGS, rows, width, worker_spare(status), silent=("ROLE",), text="STATE")
    cut = [row for row in rows if f"{row[STATE_AT]}" not in text]
    return text + "".join("\n" + wrapped(f"{row[0]}: {row[STATE_AT]}", width) for row in cut)


def _worst(status: ClusterStatus, rows: Iterable[str]) -> list[str]:
    """Return who is worth a look: those that take no requests, then those that fail or were started again."""
    known = {worker.id: worker for worker in status.workers}
    marks: dict[str, tuple[bool, int, int]] = {}
    for name in rows:
        worker = known.get(name)
        if worker is None or worker.why_not or worker.state != "ready" or worker.breaker != "closed":
            marks[name] = (False, 0, 0)
        elif worker.failures or worker.restarts:
            marks[name] = (True, -worker.failures, -worker.restarts)
    return sorted(marks, key=lambda name: (marks[name], natural(name)))


POOL_HEADINGS = (
    *("POOL", "READY", "ACTIVE", "PREFILL TOKENS", "IN USE", "KV BLOCKS"),
    *("REQUESTS", "FAILED", "RESTARTS"),
)
SUMMED = (
    *("active_requests", "active_prefill_tokens", "active_blocks", "resident_blocks", "kv_blocks"),
    *("requests", "failures", "restarts"),
)
"""What a pool's workers have together, for its row."""


def pool_rows(status: ClusterStatus) -> list[list[Any]]:
    """Return one row per pool, under `POOL_HEADINGS`; workers of no pool of this cluster are under their model."""
    pools = {pool.name: pool for pool in status.pools}
    pool_of = {replica.id: pool.name for pool in status.pools for replica in pool.replicas or ()}
    members: dict[str, list[WorkerStatus]] = defaultdict(list, {name: [] for name in pools})
    for worker in status.workers:
        members[pool_of.get(worker.id, worker.model)].append(worker)
    rows: list[list[Any]] = []
    for name, workers in members.items():
        ready, desired = sum(not worker.why_not for worker in workers), len(workers)
        if name in pools:
            ready, desired = pools[name].serving, pools[name].desired
        running, tokens, active, resident, blocks, *counts = (_sum_over_workers(workers, field) for field in SUMMED)
        rows.append([name, f"{ready} of {desired}", running, tokens, active, _blocks_cell(resident, blocks), *counts])
    return rows


def _sum_over_workers(workers: Sequence[WorkerStatus], field: str) -> int | None:
    """Return what workers have together, as far as it is known; None where it is of none of them."""
    known = [value for worker in workers if (value := getattr(worker, field)) is not None]
    return sum(known) if known or not workers else None


def _blocks_cell(resident: int | None, blocks: int | None) -> str | int | None:
    """Return how many blocks are in engines' memory, and how many fit."""
    return resident if not blocks else f"{'-' if resident is None else f'{resident:,}'} of {blocks:,}"


def finding_lines(status: ClusterStatus) -> list[str]:
    """Return the findings as lines, each with its next step; those that differ only in a name are one."""
    known = {worker.id for worker in status.workers} | {r.id for pool in status.pools for r in pool.replicas or ()}
    same: dict[str, dict[str, StatusFinding]] = defaultdict(dict)
    for finding in status.findings:
        line = finding_line(finding)
        of = {word for word in _NAME.findall(line) if word in known}
        name = of.pop() if len(of) == 1 else ""
        same[line.replace(name, "*") if name else line][name] = finding
    lines = []
    for alike in same.values():
        first, *others = sorted(alike, key=natural)
        shown, left = ", ".join(others[: NAMES_MAX - 1]), len(others) - (NAMES_MAX - 1)
        more = f"; the same of {shown}" + (f" and {left:,} more" if left > 0 else "") if others else ""
        lines.append(finding_line(alike[first]) + more)
    return lines


def finding_line(finding: StatusFinding) -> str:
    """Return one finding as a line, with its next step."""
    return f"  {finding.level}: {finding.text}" + (f" ({finding.hint})" if finding.hint else "")


def state_text(worker: WorkerStatus) -> str:
    """Return a worker's state, and why it takes no requests."""
    why = (worker.why_not or "").removeprefix(f"is {worker.state}").removeprefix(": ")
    return worker.state if why in ("", worker.state) else f"{worker.state} ({why})"


WORKER_COLUMNS: dict[str, Callable[[WorkerStatus], Any]] = {
    "WORKER": lambda worker: worker.id,
    "ROLE": lambda worker: worker.role,
    "STATE": lambda worker: state_text(worker),
    "INDEX": lambda worker: worker.index,
    "ACTIVE": lambda worker: worker.active_requests,
    "PREFILL TOKENS": lambda worker: worker.active_prefill_tokens,
    "IN USE": lambda worker: worker.active_blocks,
    "KV BLOCKS": lambda worker: _blocks_cell(worker.resident_blocks, worker.kv_blocks),
    "REQUESTS": lambda worker: worker.requests,
    "FAILED": lambda worker: worker.failures,
    "RESTARTS": lambda worker: worker.restarts,
    "BREAKER": lambda worker: worker.breaker,
    "KV EVENTS": lambda worker: None if worker.kv_events is None else worker.kv_events.applied,
    "LOST": lambda worker: None if worker.kv_events is None else worker.kv_events.lost,
    "URL": lambda worker: worker.url,
}
WORKER_HEADINGS = tuple(WORKER_COLUMNS)
STATE_AT = WORKER_HEADINGS.index("STATE")


def worker_spare(status: ClusterStatus) -> tuple[str, ...]:
    """Return which columns of the workers are left out first."""
    least = ("URL", "LOST", "KV EVENTS", "BREAKER", "PREFILL TOKENS")
    plain = all(worker.role == "aggregated" for worker in status.workers)
    # The reason why a worker takes no requests is beside its state.
    return (*(("ROLE",) if plain else ()), *least, "IN USE", "INDEX", "KV BLOCKS")


def worker_rows(status: ClusterStatus) -> dict[str, list[Any]]:
    """Return one row per worker by its name, under `WORKER_HEADINGS`: also of replicas that are down, or asleep."""
    rows = {worker.id: [value_of(worker) for value_of in WORKER_COLUMNS.values()] for worker in status.workers}
    restarts = {crash.name: crash.count for crash in status.crashes}
    for pool in status.pools:
        for replica in pool.replicas or ():
            if replica.id not in rows:
                known: dict[str, Any] = {"WORKER": replica.id, "ROLE": pool.role, "STATE": replica_text(replica)}
                known["RESTARTS"] = restarts.get(replica.id, 0)
                rows[replica.id] = [known.get(heading) for heading in WORKER_HEADINGS]
    return {name: rows[name] for name in sorted(rows, key=natural)}


def replica_text(replica: Replica) -> str:
    """Return the state of a pool's replica, and why it does not serve."""
    return ("asleep" if replica.asleep else replica.state) + (f" ({replica.reason})" if replica.reason else "")
