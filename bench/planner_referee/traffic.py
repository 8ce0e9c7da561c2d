"""Which requests? The study's shapes of demand for faster engines, and a public trace, as files the peer can replay."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.planner_study.traffic import ALL, STEP
from penstock_lab.traffic.formats.mooncake import MooncakeTrace
from penstock_lab.traffic.lengths import Lognormal
from penstock_lab.traffic.rate_profiles import PiecewiseProfile, follow
from penstock_lab.traffic.traffic_request import TrafficRequest
from penstock_lab.traffic.workloads import Plain, plain

FASTER = 3.0
"""How many times the study's rates: an H200 serves so many more of these shorter requests than its A100 does."""
LENGTHS = Plain(prompt=Lognormal(5000, 0.6, 64, 12_000), answer=Lognormal(150, 0.6, 8, 600))
LONGEST_PROMPT, LONGEST_ANSWER = 12_000, 600
"""Tokens; no longer prompt can keep the TTFT that is promised, whoever scales."""
BLOCK = 512
"""Tokens of a block of the trace's format."""
CONVERSATION = "conversation"
FILE = "mooncake_conversation_first6000.jsonl"
COPIES, APART = 4, 20.0
"""How often each request of the public trace is sent, and seconds on average between it and a copy: one worker would
do for the trace as it is."""


def requests(name: str, seed: int, folder: Path | None) -> list[TrafficRequest]:
    """Return the requests of a kind of traffic in the order of arrival.

    Args:
        name: of the study's own traffic, or `CONVERSATION`.
        folder: where the public trace is.
    """
    rng = random.Random(f"referee {name} {seed}")
    if name == CONVERSATION:
        assert folder is not None
        return _conversation(folder / FILE, rng)
    kind = ALL[name]
    assert kind.rate is not None
    levels = [FASTER * kind.rate(step * STEP) for step in range(int(kind.seconds / STEP))]
    shape = PiecewiseProfile([step * STEP for step in range(len(levels))], levels)

    def starts(rate: float) -> Iterator[float]:
        return follow(shape, rate, rng)

    found = []
    for request in plain(1.0, rng, starts=starts, shape=LENGTHS, kind=name):
        if request.at >= kind.seconds:
            break
        found.append(TrafficRequest(at=request.at, isl=request.isl, osl=request.osl))
    return found


def write(requests: Sequence[TrafficRequest], path: Path) -> None:
    """Write a trace in Mooncake's format; no two requests share a prefix, so nobody's routing matters."""
    number = 0
    whole = path.with_suffix(".part")  # somebody else may be reading the trace of a run before
    with whole.open("w") as file:
        for request in requests:
            blocks = -(-request.isl // BLOCK)
            row = {
                "timestamp": round(request.at * 1e3, 3),
                "input_length": request.isl,
                "output_length": request.osl,
                "hash_ids": list(range(number, number + blocks)),
            }
            number += blocks
            file.write(json.dumps(row) + "\n")
    whole.replace(path)


def first_minute(requests: Sequence[TrafficRequest]) -> float:
    """Return requests per second of the first minute."""
    return sum(request.at < 60.0 for request in requests) / 60.0


def _conversation(path: Path, rng: random.Random) -> list[TrafficRequest]:
    with path.open("rb") as lines:
        rows = [one for one in MooncakeTrace(lines) if one.isl <= LONGEST_PROMPT]
    found = []
    for one in rows:
        for copy in range(COPIES):
            at = one.at + (rng.expovariate(1.0 / APART) if copy else rng.uniform(0.0, 1.0))
            found.append(TrafficRequest(at=at, isl=one.isl, osl=min(one.osl, LONGEST_ANSWER)))
    return sorted(found, key=lambda request: request.at)
