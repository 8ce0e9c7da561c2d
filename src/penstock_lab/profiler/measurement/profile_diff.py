"""Profile difference: which facts and which points of two profiles are not the same."""

from collections.abc import Iterator, Sequence

import msgspec

from penstock.config.files.profile_manifest import MeasuredProfile, ProfilePoint

SURE = 3.0
"""Standard errors of the difference beyond which it is no noise."""
LEAST = 0.02
"""Relative change below which nobody cares, however sure it is."""
CONTEXT_APART = 0.05
"""Relative difference of contexts within which two points are at the same place."""
IGNORED = ("date", "seconds", "gpu_seconds", "left_out", "host", "prefill", "decode")


class ChangedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A point that both profiles have: seconds before and now. ``changed``: whether that is more than noise."""

    point: ProfilePoint
    before: float
    now: float
    changed: bool

    @property
    def share(self) -> float:
        return self.now / self.before - 1.0


class ProfileDifference(msgspec.Struct, frozen=True, kw_only=True):
    """What differs. ``facts``: sentences; ``only_before``, ``only_now``: points that one of them lacks."""

    facts: list[str]
    points: list[ChangedPoint]
    only_before: int
    only_now: int

    def lines(self) -> Iterator[str]:
        """Yield it as text, the largest changes first."""
        yield from self.facts
        changed = sorted((each for each in self.points if each.changed), key=lambda each: -abs(each.share))
        for each in changed:
            point = each.point
            where = f"{point.kind}, TP {point.tp}"
            where += f", {point.tokens:,} tokens" if point.tokens else ""
            where += f", {point.seqs} in flight of {point.context:,.0f} tokens" if point.seqs else ""
            yield f"{where}: {1e3 * each.before:.2f} -> {1e3 * each.now:.2f} ms ({each.share:+.1%})"
        yield (
            f"{len(changed)} of {len(self.points)} points changed; {self.only_before} are only in the first, "
            f"{self.only_now} only in the second"
        )


def difference(before: MeasuredProfile, now: MeasuredProfile) -> ProfileDifference:
    """Return what changed from one profile to another."""
    facts = []
    for name in before.manifest.__struct_fields__:
        old, new = getattr(before.manifest, name), getattr(now.manifest, name)
        if name not in IGNORED and old != new:
            facts.append(f"{name}: {_fact_text(old)} -> {_fact_text(new)}")
    for phase in ("prefill", "decode"):
        first, second = getattr(before.manifest, phase), getattr(now.manifest, phase)
        sizes = [None if each is None else each.tp for each in (first, second)]
        if sizes[0] != sizes[1]:
            facts.append(f"{phase} TP: {sizes[0]} -> {sizes[1]}")
    both = [(old, new) for old in before.points if (new := _same_point(old, now.points)) is not None]
    return ProfileDifference(
        facts=facts,
        points=[_changed_point(old, new) for old, new in both],
        only_before=len(before.points) - len(both),
        only_now=len(now.points) - len(both),
    )


def _same_point(old: ProfilePoint, points: Sequence[ProfilePoint]) -> ProfilePoint | None:
    """Return the point that was measured at the same place; its context differs by some tokens from run to run."""
    place = (old.kind, old.tp, old.tokens, old.seqs)
    near = [p for p in points if (p.kind, p.tp, p.tokens, p.seqs) == place]
    found = min(near, key=lambda p: abs(p.context - old.context), default=None)
    apart = 0.0 if found is None else abs(found.context - old.context)
    return found if apart <= max(CONTEXT_APART * old.context, 1.0) else None


def _changed_point(old: ProfilePoint, new: ProfilePoint) -> ChangedPoint:
    error = (old.sd**2 / old.repeats + new.sd**2 / new.repeats) ** 0.5
    apart = abs(new.mean - old.mean)
    sure = apart > SURE * error and apart > LEAST * old.mean
    return ChangedPoint(point=new, before=old.mean, now=new.mean, changed=sure)


def _fact_text(value: object) -> str:
    return msgspec.json.encode(value).decode() if not isinstance(value, str) else value
