"""Step statistics from an engine's /metrics: the differences of its counters between two scrapes.

For engines without the plug-in. The page has the number of passes and what they made, not how long they took or what
each did: ``estimated`` lists what is computed from other counters; what can't be computed is None.
"""

from collections.abc import Mapping

from penstock.adapters.engines.dialects.dialect import MetricNames, samples
from penstock.kernel.values import StepStats


class ScrapedSteps:
    """Differences between one page of metrics and the next."""

    def __init__(self, counters: MetricNames) -> None:
        self._counters = counters
        self._before: dict[str, float] | None = None

    @property
    def possible(self) -> bool:
        """Whether this kind of engine reports its passes at all."""
        return self._counters.passes is not None

    def take(self, page: str) -> StepStats | None:
        """Return what happened since the last page; None for the first, and where the engine started over."""
        now = samples(page)
        before, self._before = self._before, now
        return None if before is None else between(self._counters, before, now)

    def forget(self) -> None:
        """Begin anew: another source reported what happened since the last page."""
        self._before = None


def between(counters: MetricNames, before: Mapping[str, float], now: Mapping[str, float]) -> StepStats | None:
    """Return the statistics between two pages, or None where a counter is missing or went back."""

    def grown(name: str | None) -> float | None:
        if name is None or name not in now or name not in before:
            return None
        return now[name] - before[name]

    passes = grown(counters.passes)
    prompt, cached = grown(counters.prompt_tokens), grown(counters.cached_tokens)
    made, first = grown(counters.generation_tokens), grown(counters.first_tokens)
    itl_sum, itl_count = grown(counters.itl_sum), grown(counters.itl_count)
    preempted = grown(counters.preemptions)
    if passes is None or any(count is not None and count < 0 for count in (passes, prompt, made, first)):
        return None
    estimated: list[str] = []

    def worked_out(name: str, value: float | None) -> int | None:
        if value is None:
            return None
        estimated.append(name)
        return max(0, round(value))

    waiting = None
    if counters.waiting is not None and counters.waiting in now and counters.waiting in before:
        waiting = passes * (now[counters.waiting] + before[counters.waiting]) / 2
    wall = None
    if itl_sum is not None and itl_count:
        # A gap between two tokens of a request is a pass; passes without decoding are taken to be as long.
        wall = passes * itl_sum / itl_count
        estimated.append("wall")
    elif not passes:
        wall = 0.0
    return StepStats(
        passes=round(passes),
        wall=wall,
        prefill_tokens=worked_out("prefill_tokens", None if prompt is None else prompt - (cached or 0.0)),
        # One for each prompt that was done: a prompt that took several passes counts once, not once for each.
        prefill_requests=worked_out("prefill_requests", first),
        # The first token of a request comes from its prefill.
        decode_seqs=worked_out("decode_seqs", None if made is None or first is None else made - first),
        queued_requests=worked_out("queued_requests", waiting),
        preemptions=None if preempted is None else max(0, round(preempted)),
        estimated=tuple(sorted(estimated)),
    )
