"""Estimates of an engine's step statistics from the requests that the router placed on it.

vLLM reports how many sequences decoded, not how much KV they read, and how many requests wait, not how many tokens that
is. The router knows each request's prompt, when its first token came, and which have none yet. Some samples of that per
window give both; docs/guides/engines.md has the errors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from penstock.kernel.machine import SECOND, Nanos
from penstock.kernel.values import StepStats
from penstock.router.workers.active import Active


@dataclass(frozen=True, slots=True)
class LoadLook:
    """One sample of an engine's requests.

    ``decoding``: those with a first token; ``decode_kv``: KV tokens of theirs that are known; ``ages`` seconds, summed,
    in which each has made tokens that are not counted in ``decode_kv``. ``silent``: prompt tokens (cached ones
    included, as engines count their queue) and seconds since dispatch, of each request without a token yet, the oldest
    first: it waits, is prefilled, or makes tokens that come all at once at the end.
    """

    decoding: int
    decode_kv: float
    ages: float
    silent: tuple[tuple[float, float], ...] = ()


def look(requests: Iterable[Active], block_size: int, now: Nanos) -> LoadLook:
    """Sample the requests that occupy an engine. Cost: O(requests)."""
    decoding = 0
    decode_kv = ages = 0.0
    silent: list[tuple[float, float]] = []
    for active in requests:
        # The last block of a prompt is half full, on average.
        prompt = (len(active.blocks) + (active.unhashed_blocks - 0.5 if active.unhashed_blocks else 0.0)) * block_size
        age = (now - active.touched) / SECOND
        if active.prefill_tokens:
            silent.append((prompt, age))
        else:
            decoding += 1
            decode_kv += prompt + active.output_blocks * block_size
            ages += age
    return LoadLook(decoding, decode_kv, ages, tuple(silent))


def completed(window: StepStats, looks: Sequence[LoadLook]) -> StepStats:
    """Return a window with estimates added, and named in ``estimated``.

    Args:
        looks: samples of the same engine, spread evenly over the window; without any nothing is estimated.
    """
    if not looks or not window.passes:
        return window
    if window.decode_seqs is not None:
        running, wait = window.decode_seqs / window.passes, _wait(window)
        looks = [_heard(one, running, wait) for one in looks]
    estimates: dict[str, int] = {}
    if window.decode_kv is None and window.decode_seqs is not None:
        kv = _kv_per_sequence(window, looks)
        if kv is not None:
            estimates["decode_kv"] = round(window.decode_seqs * kv)
    if window.queued_prefill_tokens is None and window.queued_requests is not None:
        prompt = _prompt(looks)
        if prompt is not None or not window.queued_requests:
            estimates["queued_prefill_tokens"] = round(window.queued_requests * (prompt or 0.0))
    if not estimates:
        return window
    return msgspec.structs.replace(window, **estimates, estimated=tuple(sorted({*window.estimated, *estimates})))


def _wait(window: StepStats) -> float:
    """Return how long a request waits in the engine, in seconds: the queue's length by the rate at which it moves."""
    if not window.queued_requests or not window.prefill_requests or not window.wall:
        return 0.0
    return window.queued_requests / window.passes * window.wall / window.prefill_requests


def _heard(one: LoadLook, running: float, wait: float) -> LoadLook:
    """Count the oldest silent requests as decoding, where the engine decodes more than have a first token.

    An answer that is not streamed is silent until its end; the request sent first is the likeliest to be decoding,
    for as long as it did not wait.
    """
    more = min(round(running) - one.decoding, len(one.silent))
    if more <= 0:
        return one
    decode_kv = one.decode_kv + sum(prompt for prompt, _ in one.silent[:more])
    ages = one.ages + sum(max(0.0, age - wait) for _, age in one.silent[:more])
    return LoadLook(one.decoding + more, decode_kv, ages, one.silent[more:])


def _kv_per_sequence(window: StepStats, looks: Sequence[LoadLook]) -> float | None:
    """Return the KV tokens that a decoding sequence reads in a pass, on average."""
    sequences = sum(one.decoding for one in looks)
    if not sequences:
        return None if window.decode_seqs else 0.0
    decode_kv = sum(one.decode_kv for one in looks)
    if window.wall:
        # A pass gives a sequence one token, so its age in passes is the length of its output.
        decode_kv += sum(one.ages for one in looks) * window.passes / window.wall
    return decode_kv / sequences


def _prompt(looks: Sequence[LoadLook]) -> float | None:
    """Return the mean prompt of requests without a first token, or, where no sample has one, of those that decode."""
    silent = [prompt for one in looks for prompt, _ in one.silent]
    if silent:
        return sum(silent) / len(silent)
    count = sum(one.decoding for one in looks)
    return sum(one.decode_kv for one in looks) / count if count else None
