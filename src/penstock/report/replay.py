"""Does a journal come to the same decisions again, and what would other settings have decided?"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.config.live import put_at, value_at
from penstock.config.load import load
from penstock.kernel.errors import ConfigError
from penstock.kernel.journal import Frames, Header, Record, digest_of
from penstock.kernel.machine import Effect, Event, Nanos, seconds
from penstock.router.journal import event_of, placed_by, read_header, read_record, router_of
from penstock.router.router import Router
from penstock.router.settings import RouterSettings
from penstock.router.what_if import Other, WhatIf

KEPT = 1000
"""Decisions that are kept to be shown; all of them are counted."""


@dataclass(slots=True)
class Mismatch:
    """Where the replay came to something else than the journal says."""

    router: str
    segment: str
    sequence: int
    at: Nanos
    event: str
    request: str | None
    recorded: list[tuple[str, int, str, int]]
    """(request, attempt, worker, rank) as it was"""
    replayed: list[tuple[str, int, str, int]]
    effects: list[str]
    """Kinds of the effects that the replay came to."""


@dataclass(slots=True)
class Comparison:
    """What other settings come to, over all decisions. Tokens; seconds."""

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

    def add(self, other: Other) -> None:
        """Count one decision."""
        self.decisions += 1
        self.moved += other.moved
        self.prompt += other.isl
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
    """What came of a replay."""

    segments: int = 0
    records: int = 0
    decisions: int = 0
    first: Nanos | None = None
    last: Nanos | None = None
    wall_ns: int | None = None
    mismatch: Mismatch | None = None
    problems: list[str] = field(default_factory=list)
    """What could not be read, and from where on."""
    whole: Comparison = field(default_factory=Comparison)
    others: list[Other] = field(default_factory=list)
    """Decisions that would have been others, the first ones."""


def replay(path: Path, overrides: list[str]) -> Replayed:
    """Feed a journal back.

    Args:
        path: a run folder, its journal, one router's journal, or one segment.
        overrides: ``name=value`` of a config: also ask what these settings would have decided.
    Raises:
        ConfigError: there is no journal, nothing of it can be read, or an override is none of the router's.
    """
    found = Replayed()
    for segments in _journals(path):
        _replay_one(segments, overrides, found)
    if not found.segments:
        raise ConfigError(f"nothing of the journal {path} can be read: {'; '.join(found.problems)}")
    return found


def _replay_one(segments: list[Path], overrides: list[str], found: Replayed) -> None:
    router: Router | None = None
    what_if: WhatIf | None = None
    expected = -1
    for segment in segments:
        frames = Frames(_bytes(segment))
        payloads = iter(frames)
        try:
            header = read_header(next(payloads))
            if router is None or header.sequence != expected:
                if router is not None:
                    found.problems.append(f"{segment}: records {expected} to {header.sequence - 1} are missing")
                router = router_of(header)
                what_if = WhatIf(header, _changed(header, overrides)) if overrides else None
                expected = header.sequence
        except (StopIteration, ValueError) as error:
            found.problems.append(f"{segment}: {frames.problem or f'it has no header that can be read: {error}'}")
            continue
        found.segments += 1
        if found.wall_ns is None:
            found.wall_ns = header.wall_ns
        for record in _records(segment, payloads, found):
            if record.sequence != expected:
                found.problems.append(f"{segment}: record {expected} is missing, {record.sequence} follows")
                break
            event = event_of(record, runs=router.runs)
            effects = _step(router, record, event, segment, found)
            if effects is None:
                return
            if what_if is not None:
                for other in what_if.follow(record.now, event, effects, router):
                    found.whole.add(other)
                    if other.moved and len(found.others) < KEPT:
                        found.others.append(other)
            expected += 1
        if frames.problem is not None:
            found.problems.append(f"{segment}: {frames.problem}")


def _step(router: Router, record: Record, event: Event, segment: Path, found: Replayed) -> list[Effect] | None:
    """Let the router take one record's event; None where it came to something else."""
    effects = router.handle(record.now, event)
    found.records += 1
    found.decisions += len(record.placed)
    found.first = record.now if found.first is None else min(found.first, record.now)
    found.last = record.now if found.last is None else max(found.last, record.now)
    if digest_of(effects) == record.digest:
        return effects
    found.mismatch = Mismatch(
        router=router.name,
        segment=str(segment),
        sequence=record.sequence,
        at=record.now,
        event=type(event).__name__,
        request=getattr(event, "id", None),
        recorded=[(request, attempt, worker, rank) for request, attempt, worker, rank in record.placed],
        replayed=placed_by(effects),
        effects=[type(effect).__name__ for effect in effects],
    )
    return None


def _records(segment: Path, payloads: Iterator[bytes], found: Replayed) -> Iterator[Record]:
    for payload in payloads:
        try:
            yield read_record(payload)
        except ValueError as error:
            found.problems.append(f"{segment}: a record can't be read: {error}")
            return


def _changed(header: Header, overrides: list[str]) -> RouterSettings:
    """Return the router's settings as the journal has them, with some changed."""
    base = msgspec.convert(header.made["settings"], RouterSettings)
    wrong = [text for text in overrides if not text.startswith("router.")]
    if wrong:
        raise ConfigError(f"--set {wrong[0]!r} is none of the router's settings", hint="such as router.mode=kv")
    changed = load(None, overrides).settings.router
    for text in overrides:
        path = text.partition("=")[0].strip().replace("-", "_").split(".")[1:]
        base = put_at(base, path, value_at(changed, path))
    return base


def _journals(path: Path) -> list[list[Path]]:
    """Return the segments of each router's journal, in order."""
    if path.is_file():
        return [[path]]
    root = path / "journal" if (path / "journal").is_dir() else path
    if not root.is_dir():
        raise ConfigError(f"there is no journal {path}", hint="give a run folder; runs.journal=true writes one")
    folders = [folder for folder in sorted(root.iterdir()) if folder.is_dir()] or [root]
    found = [sorted(file for file in folder.iterdir() if file.name.isdigit()) for folder in folders]
    found = [segments for segments in found if segments]
    if not found:
        raise ConfigError(
            f"{path} holds no journal", hint="runs.journal=true writes one; a run folder has it under journal/"
        )
    return found


def _bytes(segment: Path) -> bytes:
    try:
        return segment.read_bytes()
    except OSError as error:
        raise ConfigError(f"{segment} can't be read: {error.strerror}") from error


def since(found: Replayed) -> float:
    """Return the seconds that the journal covers."""
    return 0.0 if found.first is None or found.last is None else seconds(found.last - found.first)
