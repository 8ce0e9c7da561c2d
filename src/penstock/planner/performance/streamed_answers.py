"""Passes estimated from streamed answers, for engines that report none: a lone prefill and a decode step per window.

- **Decode.** The gap between two tokens of an answer is a pass. How many decode in it follows from how long answers
  took to decode in total (Little's law): a request meets as many others as there are on average.
- **Prefill.** The fastest answers did not wait, so their TTFT is a prefill. Where all of them waited, an engine still
  completed its work: no prefill took longer than the window's share of it.

Both are coarse, and good enough to size a fleet by: their error is learnt as stress.
"""

from typing import NamedTuple

from penstock.kernel.latency_bins import quantiles
from penstock.kernel.values import Traffic
from penstock.planner.sizing.workload_mix import WorkloadMix

QUICK = 0.05
"""Rank of the answers that count as not having waited."""
FEWEST = 5
"""Fewest answers for a useful window."""


class AnswerWindow(NamedTuple):
    """A pass of one engine: prompt tokens, sequences that decode and their KV tokens, and its seconds."""

    tokens: float
    seqs: float
    kv: float
    seconds: float


def prefill_row(traffic: Traffic, engines: int, max_num_seqs: float) -> AnswerWindow | None:
    """Return the prefill that a window's answers imply; None where they imply none.

    Args:
        engines: how many served them; ``max_num_seqs``: sequences that one of them runs at a time.
    """
    mix = mix_of(traffic)
    prefill = None if mix is None else quickest(traffic, mix)
    if prefill is None:
        return None
    tokens, seconds = prefill
    most = engines * traffic.seconds / traffic.answered
    if max_num_seqs <= 1.0:  # it decodes in no other pass
        most -= (traffic.itl_mean or 0.0) * (traffic.output_tokens / traffic.answered - 1.0)
    return AnswerWindow(tokens, 0.0, 0.0, min(seconds, most)) if most > 0.0 else None


def decode_row(traffic: Traffic, engines: int, max_num_seqs: float) -> AnswerWindow | None:
    """Return the decode step that a window's answers imply; None where they imply none. Arguments as above."""
    mix, gap = mix_of(traffic), traffic.itl_mean
    made = traffic.output_tokens - traffic.answered  # the first token of an answer comes from its prefill
    if mix is None or not gap or made <= 0:
        return None
    each = 1.0 / (engines * traffic.seconds)
    seqs = min(max_num_seqs, 1.0 + gap * made * each)
    fresh = traffic.answered * mix.mean(mix.fresh) * each * gap if max_num_seqs > 1.0 else 0.0
    return AnswerWindow(fresh, seqs, seqs * mix.mean(mix.isl + mix.osl / 2.0), gap)


def quickest(traffic: Traffic, mix: WorkloadMix) -> tuple[float, float] | None:
    """Return prompt tokens and TTFT (seconds) of answers that did not wait: the shortest prompts are the fastest."""
    (seconds,) = quantiles(traffic.ttft, (QUICK,))
    if seconds is None:
        return None
    return mix.quantile(mix.fresh, QUICK), seconds


def mix_of(traffic: Traffic) -> WorkloadMix | None:
    """Return the mix of a window's answers; None where there are too few."""
    if traffic.answered < FEWEST or not traffic.seconds:
        return None
    if traffic.shapes:
        return WorkloadMix.of_bins(traffic.shapes)
    isl, osl = traffic.answered_prompt_tokens / traffic.answered, traffic.output_tokens / traffic.answered
    return WorkloadMix.of_means(isl, osl, traffic.shape.hit_rate or 0.0)
