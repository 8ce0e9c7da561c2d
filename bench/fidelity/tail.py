"""How long do decode steps take as the batch shrinks? The end of the measured run, when no prompt is left.

The time series has the tokens of each second, and the requests' timestamps who ran when; so many tokens from so many
sequences are so many steps. No pass is counted, so this stands apart from `passes`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from measured import Request, Second

from penstock.kernel.machine import SECOND
from penstock_lab.engine.timing.timing_model import TimingModel

SLICES = 100
"""Parts of a second within which the batch is taken as one."""
FEWEST = 50.0
"""Tokens of a second that is looked at."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one second: mean sequences, and seconds per step, real and as the operators add up."""

    seqs: float
    real: float
    operators: float


def steps_at_the_end(requests: Sequence[Request], series: Sequence[Second], timing: TimingModel) -> list[Steps]:
    """Return the steps of each second after the last prompt, in order."""
    apart = _apart(requests, series)
    last_prompt = max(second.end for second in series if second.prompt)
    found = []
    for second in series:
        if second.end <= last_prompt + 1.0 or second.generated < FEWEST:
            continue
        sequences = steps = 0.0
        for part in range(SLICES):
            now = second.end - 1.0 + (part + 0.5) / SLICES - apart
            reading = [
                request.isl + request.osl * (now - request.first) / (request.last - request.first)
                for request in requests
                if request.first <= now < request.last
            ]
            if reading:
                sequences += len(reading) / SLICES
                steps += len(reading) / SLICES / (_step(reading, timing) / SECOND)
        found.append(Steps(sequences, sequences / second.generated, sequences / steps))
    return found


def _step(reading: Sequence[float], timing: TimingModel) -> float:
    """Return what one step of sequences of such lengths takes, in nanoseconds."""
    return timing.run(round(sum(reading)), len(reading), 1, round(max(reading))).after(1)


def _apart(requests: Sequence[Request], series: Sequence[Second]) -> float:
    """Return by how much the series' clock is ahead: its last second has the last tokens of the last request."""
    end = max(requests, key=lambda request: request.last)
    step = (end.last - end.first) / (end.osl - 1)
    final = max(second.end for second in series if second.generated)
    count = next(second.generated for second in series if second.end == final)
    return final - 1.0 + count * step - end.last
