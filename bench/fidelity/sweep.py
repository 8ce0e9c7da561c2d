"""What does a pass of an engine cost, from passes of known make? A small sweep, and a profile fitted to it.

A pass takes ``by tokens + outputs x a + pairs x b + KV read x c``: a line by its tokens that bends at `KNOTS`, so
much per sequence that gets a token, per (token, token seen) pair of a prompt and per token that decoding reads. The fit
is least squares on relative errors with no term below 0, over the means of equal passes. It is written in the public
layout of ``sim.timing.kind: operators``, whose lines give these terms back.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

BUDGET, MAX_SEQS = 512, 16
"""Most tokens and sequences of a pass."""
KNOTS = (1, 2, 3, 4, 6, 8, 12, MAX_SEQS, 64, 128, 256, BUDGET)
"""Close where batches are small: two sequences were seen to take longer than four."""
STEPS = 12
"""Passes that are timed while the same sequences decode."""
DECODING = [(seqs, kv) for seqs in KNOTS[: KNOTS.index(MAX_SEQS) + 1] for kv in (64, 600)]
PROMPTS = (16, 64, 128, 256, BUDGET, 900)
MIXED = [(prompt, seqs) for prompt in (32, 200, 700) for seqs in (2, 8, MAX_SEQS - 1)]
MIXED_KV = 300
STALL = 3.0
"""A pass that takes so many times what its like take in the median was held up by something else on the machine."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of known make: ``new`` tokens of one prompt after ``past``, and ``seqs`` that read ``kv`` together."""

    past: int
    new: int
    seqs: int
    kv: int
    seconds: float

    @property
    def tokens(self) -> int:
        return self.new + self.seqs

    @property
    def outputs(self) -> int:
        return self.seqs + (1 if self.new else 0)

    @property
    def pairs(self) -> int:
        return self.new * self.past + self.new * (self.new + 1) // 2


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds: at each of `KNOTS`, per output, per pair and per token read."""

    by_tokens: tuple[float, ...]
    output: float
    pair: float
    read: float

    def of(self, one: Pass) -> float:
        """Return what a pass takes."""
        line = float(np.interp(one.tokens, KNOTS, self.by_tokens))
        return line + self.output * one.outputs + self.pair * one.pairs + self.read * one.kv


def cases(seed: int) -> list[dict[str, int]]:
    """Return what one sweep does, in an order that spreads a slow moment of the machine over all of it."""
    decoding = [{"seqs": seqs, "kv": kv, "prompt": 0} for seqs, kv in DECODING]
    prompts = [{"seqs": 0, "kv": 0, "prompt": prompt} for prompt in PROMPTS]
    mixed = [{"seqs": seqs, "kv": MIXED_KV, "prompt": prompt} for prompt, seqs in MIXED]
    found = [{**case, "steps": STEPS, "budget": BUDGET} for case in (*decoding, *prompts, *mixed)]
    random.Random(seed).shuffle(found)
    return found


def alike(passes: Sequence[Mapping[str, Any]]) -> list[Pass]:
    """Return one pass for all that were made alike: the mean of those that did not stall.

    Raises:
        ValueError: a pass is none, so that the machine's clock or the engine is not what it should be.
    """
    made: dict[tuple[int, int, int, int], list[Mapping[str, Any]]] = {}
    for one in passes:
        if one["seconds"] <= 0:
            raise ValueError(f"a pass took {one['seconds']} s: {one}")
        made.setdefault((one["past"], one["new"], one["seqs"], one["case_kv"]), []).append(one)
    found = []
    for (past, new, seqs, _), like in sorted(made.items()):
        most = STALL * median(one["seconds"] for one in like)
        kept = [one for one in like if one["seconds"] <= most]
        seconds = mean(one["seconds"] for one in kept)
        found.append(Pass(past, new, seqs, round(mean(one["kv"] for one in kept)), seconds))
    return found


def fit(passes: Sequence[Pass]) -> Cost:
    """Return the cost whose relative errors have the least squares.

    Raises:
        ValueError: there are fewer passes than terms.
    """
    terms = len(KNOTS) + 3
    if len(passes) < terms:
        raise ValueError(f"{len(passes)} passes can't tell {terms} terms apart")
    rows = np.array([_terms(one) for one in passes])
    seconds = np.array([one.seconds for one in passes])
    found = _not_below_zero(rows / seconds[:, None], np.ones(len(passes)))
    return Cost(tuple(found[: len(KNOTS)].tolist()), *found[len(KNOTS) :].tolist())


def _terms(one: Pass) -> list[float]:
    """Return a pass as shares of the two knots that it lies between, and its outputs, pairs and tokens read."""
    knots = [float(np.interp(one.tokens, KNOTS, unit)) for unit in np.eye(len(KNOTS))]
    return [*knots, float(one.outputs), float(one.pairs), float(one.kv)]


def _not_below_zero(rows: Any, want: Any) -> Any:
    """Return least squares with no coefficient below 0: the most negative one is held at 0 until none is."""
    free = list(range(rows.shape[1]))
    while True:
        some = np.linalg.lstsq(rows[:, free], want, rcond=None)[0]
        if some.min() >= 0:
            found = np.zeros(rows.shape[1])
            found[free] = some
            return found
        free.pop(int(some.argmin()))


def write_profile(folder: Path, cost: Cost, layers: int, longest: int) -> None:
    """Write the cost as a profile of one of ``layers`` equal layers, for prompts and KV up to ``longest`` tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    scale = 1e6 / layers
    dense = [("block", tokens, seconds * scale) for tokens, seconds in zip(KNOTS, cost.by_tokens, strict=True)]
    outputs = [("lm_head", count, cost.output * count * 1e6) for count in (1, MAX_SEQS)]
    chunks = sorted({0, *KNOTS, *range(32, BUDGET + 1, 32)})  # pairs grow with the square: lines must be short
    attention = [
        (chunk, past, seqs, kv, scale * (cost.pair * (chunk * past + chunk * (chunk + 1) // 2) + cost.read * seqs * kv))
        for chunk in chunks
        for past in (0, longest)
        for seqs in (0, 1, MAX_SEQS)
        for kv in (0, longest)
    ]
    _write(folder / "dense.csv", "layer,tokens,time_us", dense)
    _write(folder / "per_sequence.csv", "layer,sequences,time_us", outputs)
    _write(folder / "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", attention)


def _write(path: Path, head: str, rows: Sequence[Sequence[object]]) -> None:
    path.write_text("\n".join([head, *(",".join(str(cell) for cell in row) for row in rows)]) + "\n")
