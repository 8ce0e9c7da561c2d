"""Program ledger: what the requests of each program came to, over all its sub-agents, for the newest programs."""

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from penstock.kernel.request_record import RequestRecord

PROGRAMS_MAX = 256
"""Programs that one frontend process remembers; the longest unused goes. Some 10 KB each at most."""
SESSIONS_MAX, WORKERS_MAX = 32, 16
"""Most sessions (its sub-agents) and most workers of a program that are named."""
GIVEN_MAX, SHOWN_MAX = 64, 20
"""Newest programs that one process tells the others, and that a status has."""


class ProgramStatus(msgspec.Struct, kw_only=True):
    """One program.

    Args:
        failed: its requests that were not answered.
        counted_tokens: its prompt tokens of which an engine told how many were cached, which are ``cached_tokens``.
        sessions: one for each sub-agent; ``more_sessions``: there are others.
        workers: requests by the worker that answered last.
        last: the end of its newest request, in seconds of Unix.
    """

    name: str
    model: str
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    counted_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    sessions: list[str] = []
    more_sessions: bool = False
    workers: dict[str, int] = {}
    last: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of its prompt tokens that came from a cache; None where no engine told."""
        return self.cached_tokens / self.counted_tokens if self.counted_tokens else None


class ProgramLedger:
    """The programs of one frontend process."""

    def __init__(self) -> None:
        self._programs: OrderedDict[str, ProgramStatus] = OrderedDict()

    def enter(self, record: RequestRecord, program: str, now: float) -> None:
        """Count an ended request of a program; ``now``: seconds of Unix."""
        known = self._programs.get(program)
        if known is None:
            known = self._programs[program] = ProgramStatus(name=program, model=record.model)
            if len(self._programs) > PROGRAMS_MAX:
                self._programs.popitem(last=False)
        self._programs.move_to_end(program)
        one = ProgramStatus(
            name=program,
            model=record.model,
            requests=1,
            failed=int(record.outcome != "ok"),
            prompt_tokens=record.isl or 0,
            counted_tokens=0 if record.cached is None else record.isl or 0,
            cached_tokens=record.cached or 0,
            output_tokens=record.osl,
            sessions=[] if record.session is None else [record.session],
            workers={} if record.worker is None else {record.worker: 1},
            last=now,
        )
        _add_program_counts(known, one)

    def newest(self) -> list[ProgramStatus]:
        """Return the newest programs first."""
        return list(reversed(self._programs.values()))[:GIVEN_MAX]


def join_programs(*lists: Iterable[ProgramStatus]) -> list[ProgramStatus]:
    """Return the newest programs of several processes, with what each knows of one added up."""
    joined: dict[str, ProgramStatus] = {}
    for programs in lists:
        for program in programs:
            if program.name in joined:
                _add_program_counts(joined[program.name], program)
            else:
                joined[program.name] = msgspec.structs.replace(
                    program, sessions=[*program.sessions], workers={**program.workers}
                )
    return sorted(joined.values(), key=lambda program: program.last, reverse=True)[:SHOWN_MAX]


def _add_program_counts(program: ProgramStatus, other: ProgramStatus) -> None:
    for name in ("requests", "failed", "prompt_tokens", "counted_tokens", "cached_tokens", "output_tokens"):
        setattr(program, name, getattr(program, name) + getattr(other, name))
    fresh = [session for session in other.sessions if session not in program.sessions]
    room = SESSIONS_MAX - len(program.sessions)
    program.sessions = [*program.sessions, *fresh[:room]]
    program.more_sessions = program.more_sessions or other.more_sessions or len(fresh) > room
    for worker, count in other.workers.items():
        if worker in program.workers or len(program.workers) < WORKERS_MAX:
            program.workers = {**program.workers, worker: program.workers.get(worker, 0) + count}
    program.model, program.last = other.model, max(program.last, other.last)
