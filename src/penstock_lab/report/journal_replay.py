"""Replays a journal: checks that it gives the same decisions, and what other settings would have decided."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.config.files.plugin_modules import load_plugins
from penstock.config.live_knobs import put_at, value_at
from penstock.config.reading.load import load
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.fleet import journal as fleet_journal
from penstock.kernel.errors import ConfigError
from penstock.kernel.journal_frames import Frames, Header, Placed, Record, digest_of, read_header, read_record
from penstock.kernel.machine import Effect, Event, Machine, Nanos, seconds
from penstock.kernel.values import Slo
from penstock.planner import journal as planner_journal
from penstock.planner.events import Ticked
from penstock.router import journal as router_journal
from penstock.router.router import Router
from penstock.router.settings import RouterSettings
from penstock.router.what_if import Other, WhatIf

OTHERS_MAX = 1000
"""Most decisions kept to be shown; all of them are counted."""


class JournalKind(NamedTuple):
    """One kind of machine that has a journal."""

    machine: Callable[[Header], Machine]
    event: Callable[[Record, Machine], Event]
    placed: Callable[[Sequence[Effect]], Placed]


def _router_event(record: Record, router: Machine) -> Event:
    assert isinstance(router, Router)
    return router_journal.event_of(record, router.form)


KINDS = {
    router_journal.KIND: JournalKind(router_journal.router_of, _router_event, router_journal.placed_by),
    planner_journal.KIND: JournalKind(
        lambda header: planner_journal.planner_of(header, load_plugins(planner_journal.settings_of(header).plugins)),
        lambda record, planner: planner_journal.event_of(record),
        planner_journal.placed_by,
    ),
    fleet_journal.KIND: JournalKind(
        fleet_journal.fleet_of, lambda record, fleet: fleet_journal.event_of(record), fleet_journal.placed_by
    ),
}


@dataclass(slots=True)
class Mismatch:
    """First step whose replay differs from the journal."""

    kind: str
    router: str
    """The machine's name."""
    segment: str
    sequence: int
    at: Nanos
    event: str
    request: str | None
    recorded: Placed
    """As recorded: of a router (request, attempt, worker, rank); of a planner (pool, replicas, outcome, tick); of a
    fleet (replica, serial, effect, 0)."""
    replayed: Placed
    effects: list[str]
    """Kinds of the effects in the replay."""
    why: str = ""
    """The planner's reason in the replay."""


@dataclass(slots=True)
class Comparison:
    """Totals of other settings against the recorded ones, over all decisions. Tokens; seconds."""

    decisions: int = 0
    moved: int = 0
    prompt: int = 0
    cached: int = 0
    other_cached: int = 0
    ahead: int = 0
    other_ahead: int = 0
    predicted: int = 0
    ttft: float = 0.0
    other_ttft: float = 0.0
    share: dict[str, int] = field(default_factory=dict)
    other_share: dict[str, int] = field(default_factory=dict)

    def add(self, other: Other, isl: int) -> None:
        """Count one decision about a prompt of so many tokens."""
        self.decisions += 1
        self.moved += other.moved
        self.prompt += isl
        self.cached += other.cached
        self.other_cached += other.other_cached
        self.ahead += other.ahead
        self.other_ahead += other.other_ahead
        if other.ttft is not None and other.other_ttft is not None:
            self.predicted += 1
            self.ttft += other.ttft
            self.other_ttft += other.other_ttft
        for share, target in ((self.share, other.was), (self.other_share, other.would_be)):
            share[str(target)] = share.get(str(target), 0) + 1


@dataclass(slots=True)
class Replayed:
    """Result of a replay."""

    segments: int = 0
    records: int = 0
    decisions: int = 0
    first: Nanos | None = None
    last: Nanos | None = None
    wall_ns: int | None = None
    mismatch: Mismatch | None = None
    problems: list[str] = field(default_factory=list)
    """Parts that could not be read, each with its start."""
    unread: list[str] = field(default_factory=list)
    """Journals of which no event could be replayed: nothing is known of their decisions."""
    whole: Comparison = field(default_factory=Comparison)
    others: list[Other] = field(default_factory=list)
    """The first decisions that would have been different."""


def replay(path: Path, overrides: list[str]) -> Replayed:
    """Replay a journal.

    Args:
        path: a run folder, its journal, one router's journal, or one segment.
        overrides: ``name=value`` of a config: also compute the decisions of these settings.
    Raises:
        ConfigError: there is no journal, nothing of it can be read, or an override is no setting of the router.
    """
    replayed = Replayed()
    for segments in _journals_below(path):
        records, problems = replayed.records, len(replayed.problems)
        _replay_one(segments, overrides, replayed)
        if replayed.records == records and len(replayed.problems) > problems:
            replayed.unread.append(str(segments[0].parent))
    if not replayed.segments:
        raise ConfigError(f"nothing of the journal {path} can be read: {'; '.join(replayed.problems)}")
    return replayed


def _replay_one(segments: list[Path], overrides: list[str], replayed: Replayed) -> None:
    machine: Machine | None = None
    kind = KINDS[router_journal.KIND]
    what_if: WhatIf | None = None
    expected = -1
    for segment in segments:
        frames = Frames(_segment_bytes(segment))
        payloads = iter(frames)
        try:
            header = read_header(next(payloads))
            if header.kind not in KINDS:
                raise ValueError(f"a journal of a {header.kind}, not of a {' or a '.join(KINDS)}")
            if machine is None or header.sequence != expected:
                if machine is not None:
                    replayed.problems.append(f"{segment}: records {expected} to {header.sequence - 1} are missing")
                kind = KINDS[header.kind]
                machine = kind.machine(header)
                changes = overrides if header.kind == router_journal.KIND else []
                what_if = WhatIf(header, *_changed_settings(header, overrides)) if changes else None
                expected = header.sequence
        except (StopIteration, ValueError, KeyError) as error:
            replayed.problems.append(f"{segment}: {frames.problem or f'it has no header that can be read: {error}'}")
            continue
        replayed.segments += 1
        if replayed.wall_ns is None:
            replayed.wall_ns = header.wall_ns
        for record in _segment_records(segment, payloads, replayed):
            if record.sequence != expected:
                replayed.problems.append(f"{segment}: record {expected} is missing, {record.sequence} follows")
                break
            try:
                event = kind.event(record, machine)
            except (ValueError, KeyError) as error:
                replayed.problems.append(f"{segment}: record {expected} is of another version: {error!r}")
                break
            effects = _replay_step(kind, header, machine, record, event, segment, replayed)
            if effects is None:
                return
            if what_if is not None and isinstance(machine, Router):
                for other in what_if.follow(record.now, event, effects, machine):
                    replayed.whole.add(other, machine.requests[other.request].prompt.isl)
                    if other.moved and len(replayed.others) < OTHERS_MAX:
                        replayed.others.append(other)
            expected += 1
        if frames.problem is not None:
            replayed.problems.append(f"{segment}: {frames.problem}")


def _replay_step(
    kind: JournalKind,
    header: Header,
    machine: Machine,
    record: Record,
    event: Event,
    segment: Path,
    replayed: Replayed,
) -> Sequence[Effect] | None:
    """Let the machine handle one record's event; None where the result differs."""
    effects = machine.handle(record.now, event)
    replayed.records += 1
    if header.kind != fleet_journal.KIND:
        replayed.decisions += len(record.placed)
    replayed.first = record.now if replayed.first is None else min(replayed.first, record.now)
    replayed.last = record.now if replayed.last is None else max(replayed.last, record.now)
    if digest_of(effects) == record.digest:
        return effects
    replayed.mismatch = Mismatch(
        kind=header.kind,
        router=header.machine,
        segment=str(segment),
        sequence=record.sequence,
        at=record.now,
        event=type(event).__name__,
        request=getattr(event, "id", None),
        recorded=[(request, attempt, worker, rank) for request, attempt, worker, rank in record.placed],
        replayed=kind.placed(effects),
        effects=[type(effect).__name__ for effect in effects],
        why="; ".join(effect.record.why or "" for effect in effects if isinstance(effect, Ticked)),
    )
    return None


def _segment_records(segment: Path, payloads: Iterator[bytes], replayed: Replayed) -> Iterator[Record]:
    for payload in payloads:
        try:
            yield read_record(payload)
        except ValueError as error:
            replayed.problems.append(f"{segment}: a record can't be read: {error}")
            return


def _changed_settings(header: Header, overrides: list[str]) -> tuple[RouterSettings, Slo]:
    """Return the journal's router settings and SLO, with some changed."""
    base = ClusterSettings(
        router=msgspec.convert(header.made["settings"], RouterSettings),
        slo=msgspec.convert(header.snapshot["slo"], Slo),
    )
    wrong = [text for text in overrides if not text.startswith(("router.", "slo."))]
    if wrong:
        raise ConfigError(f"--set {wrong[0]!r} is not one of the router's settings", hint="such as router.mode=kv")
    changed = load(None, overrides).settings
    for text in overrides:
        path = text.partition("=")[0].strip().replace("-", "_").split(".")
        base = put_at(base, path, value_at(changed, path))
    return base.router, base.slo


def _journals_below(path: Path) -> list[list[Path]]:
    """Return the segments of each router's journal, in order."""
    if path.is_file():
        return [[path]]
    root = path / "journal" if (path / "journal").is_dir() else path
    if not root.is_dir():
        raise ConfigError(f"there is no journal {path}", hint="give a run folder; runs.journal=true writes one")
    folders = [folder for folder in sorted(root.iterdir()) if folder.is_dir()] or [root]
    journals = [sorted(file for file in folder.iterdir() if file.name.isdigit()) for folder in folders]
    journals = [segments for segments in journals if segments]
    if not journals:
        raise ConfigError(
            f"{path} holds no journal", hint="runs.journal=true writes one; a run folder has it under journal/"
        )
    return journals


def _segment_bytes(segment: Path) -> bytes:
    try:
        return segment.read_bytes()
    except OSError as error:
        raise ConfigError(f"{segment} can't be read: {error.strerror}") from error


def since(replayed: Replayed) -> float:
    """Return the seconds that the journal covers."""
    return 0.0 if replayed.first is None or replayed.last is None else seconds(replayed.last - replayed.first)
