"""Which passes made the measured run? A scheduler that is held to the run's own timestamps, pass by pass.

The run has no record of its passes, but two facts tell them: every request of a pass has its token at the same moment,
and what a pass has in it follows from vLLM's rule (who runs first, then who waits, within the limits). So the rule is
played again; a pass ends when the requests that have their first or last token in it say so, and where none does, when
the profile says so. A rule that is not the engine's soon puts requests into one pass that had their tokens at different
moments, or starts them at another time than the engine did: such contradictions are counted.
"""

from collections import deque
from dataclasses import dataclass, field

from measured import Request, Run

from penstock.kernel.machine import SECOND
from penstock_lab.engine.timing.timing_model import TimingModel

SAME = 0.001
"""Seconds within which tokens belong to one pass; no pass of this run is shorter than ten times that."""


@dataclass(slots=True)
class Running:
    """A request in the engine: prompt tokens computed, and output tokens that passes were planned for."""

    request: Request
    computed: int = 0
    planned: int = 0


@dataclass(slots=True)
class Pass:
    """A pass; ``real`` is what it took in seconds, None where no milestone says when it began and ended."""

    chunks: list[tuple[int, int]] = field(default_factory=list)
    kv: int = 0
    seqs: int = 0
    longest: int = 0
    firsts: list[Request] = field(default_factory=list)
    lasts: list[Running] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(new for _, new in self.chunks)

    def profiled(self, timing: TimingModel) -> float:
        """Return what the profile says it takes, in seconds."""
        if self.chunks:
            return timing.mixed(self.prompt_tokens, self.chunks, self.kv, self.seqs, self.longest) / SECOND
        return timing.run(self.kv, self.seqs, 1, self.longest).after(1) / SECOND


@dataclass(frozen=True, slots=True)
class Stretch:
    """Passes between two milestones: ``real`` seconds for all of them."""

    passes: list[Pass]
    real: float


@dataclass(frozen=True, slots=True)
class Recovered:
    """``milestones`` were looked at, of which ``contradicted`` do not fit the rule."""

    stretches: list[Stretch]
    milestones: int
    contradicted: int


class _Rule:
    """vLLM's rule: ``ahead`` passes are planned before the one under way has ended."""

    def __init__(self, run: Run, ahead: int) -> None:
        self._run = run
        self.waiting = deque(sorted(run.requests(), key=lambda request: request.queued))
        self.running: list[Running] = []
        self.planned: deque[Pass] = deque()
        self.milestones = self.contradicted = 0
        self._ahead = ahead

    def plan(self, now: float) -> None:
        """Plan as many passes as the rule allows at this moment."""
        while len(self.planned) <= self._ahead:
            one, budget = Pass(), self._run.max_batched
            for run in self.running:
                if run.computed < run.request.isl:
                    budget -= self._compute(one, run, budget)
                elif run.planned < run.request.osl:
                    reads = run.request.isl + run.planned
                    one.seqs, one.kv, one.longest = one.seqs + 1, one.kv + reads, max(one.longest, reads)
                    budget -= 1
                    self._token(one, run)
            while (
                self.waiting
                and len(self.running) < self._run.max_num_seqs
                and budget
                and self.waiting[0].queued <= now + SAME
            ):
                run = Running(self.waiting.popleft())
                self.running.append(run)
                self._check(abs(run.request.scheduled - now) <= SAME)
                budget -= self._compute(one, run, budget)
            if not one.chunks and not one.seqs:
                return
            self.planned.append(one)

    def ended(self, one: Pass) -> None:
        """Hear that a pass is over."""
        moments = [request.first for request in one.firsts] + [run.request.last for run in one.lasts]
        for moment in moments:
            self._check(abs(moment - one.end) <= SAME)
        for run in one.lasts:
            self.running.remove(run)

    def _compute(self, one: Pass, run: Running, budget: int) -> int:
        new = min(budget, run.request.isl - run.computed)
        if new:
            one.chunks.append((run.computed, new))
            run.computed += new
            if run.computed == run.request.isl:
                one.firsts.append(run.request)
                self._token(one, run)
        return new

    def _token(self, one: Pass, run: Running) -> None:
        run.planned += 1
        if run.planned == run.request.osl:
            one.lasts.append(run)

    def _check(self, fits: bool) -> None:
        self.milestones += 1
        self.contradicted += not fits


def recover(run: Run, timing: TimingModel, ahead: int, until: float) -> Recovered:
    """Return the run's passes up to a moment, as a rule makes them.

    Args:
        timing: bridges passes that no milestone tells of; longer than a hundred of those it can miscount them.
        ahead: 0 plans a pass when the one before it has ended, 1 when that one starts (asynchronous scheduling).
    """
    rule, found, stretch, since, now = _Rule(run, ahead), [], [], 0.0, 0.0
    while now < until:
        rule.plan(now)
        if not rule.planned:
            if not rule.waiting:
                break
            now = since = rule.waiting[0].queued
            stretch = []
            continue
        one = rule.planned.popleft()
        guess = now + one.profiled(timing)
        told = _told(rule, one, guess, guess - now)
        one.start, one.end = now, guess if told is None else told
        now = one.end
        rule.ended(one)
        stretch.append(one)
        if told is not None:
            found.append(Stretch(stretch, now - since))
            stretch, since = [], now
    return Recovered(found, rule.milestones, rule.contradicted)


def _told(rule: _Rule, one: Pass, guess: float, length: float) -> float | None:
    """Return when a pass ended, where a token in it or a request that was taken in then tells."""
    if one.firsts:
        return one.firsts[0].first
    if one.lasts:
        return one.lasts[0].request.last
    # The engine takes requests in when a pass has ended, and at no other time.
    if rule.waiting and abs(rule.waiting[0].scheduled - guess) < length / 2:
        return rule.waiting[0].scheduled
    return None
