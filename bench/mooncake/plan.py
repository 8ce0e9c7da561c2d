"""What is measured? Traces, cache sizes, modes, repeats and speeds, all fixed before the first run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock_lab.traffic import trace_slices
from penstock_lab.traffic.formats.mooncake import MooncakeTrace
from penstock_lab.traffic.hit_rate_bound import infinite_cache_bound
from penstock_lab.traffic.traffic_request import TrafficRequest

MODES = ("kv", "round_robin", "least_loaded", "random")

CACHE_BLOCKS = (2_048, 8_192, 32_768)
"""KV blocks of 64 tokens per engine, three sizes a factor of four apart. 2,048 (131,072 tokens) is the smallest that
holds the longest prompts of the traces; 32,768 holds a quarter of any slice's tokens and more, so nothing has to be
evicted where requests are spread evenly; 8,192 lies between. Chosen from the traces' lengths alone, before any run."""

BLOCK = 64
ENGINES = 4
MAX_LEN = CACHE_BLOCKS[0] * BLOCK
"""Longer requests fit no engine of the smallest size; they are left out of every run and counted."""

SPEED_UP = 5.0
"""Engines run so many times faster than their model, and arrivals come so many times faster: the same schedule in a
fifth of the time. What is reported is the engine's own time, that is measured time times this."""

STREAM_INTERVAL = 16
"""Output tokens per streamed chunk, so that two CPU cores can drive four engines, the frontend and the generator."""

RUN_SECONDS = 12.0
"""Length of one run by the clock: `RUN_SECONDS` * `SPEED_UP` seconds of the service."""

REPEATS = 3

SLO_TTFT, SLO_ITL = 2.0, 0.025
"""Seconds of the engine's own time: the level that the field's published comparison on this trace uses."""

TRACES = {
    "conversation": "mooncake_conversation_first6000.jsonl",
    "synthetic": "mooncake_synthetic_trace.jsonl",
}


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a trace that one repeat sends. Times of its requests are seconds of the service."""

    trace: str
    repeat: int
    requests: Sequence[TrafficRequest]
    too_long: int
    parts: int
    """Into how many parts the trace's conversations were dealt."""

    @property
    def prompt_tokens(self) -> int:
        return sum(request.isl for request in self.requests)

    @property
    def bound(self) -> float | None:
        """Share of prompt tokens that one infinite shared cache would hit."""
        return infinite_cache_bound(self.requests, BLOCK)


def read_trace(folder: Path, name: str) -> list[TrafficRequest]:
    """Read one whole trace."""
    with (folder / TRACES[name]).open("rb") as lines:
        return list(MooncakeTrace(lines))


def cut(trace: str, whole: Sequence[TrafficRequest], repeat: int, run_seconds: float = RUN_SECONDS) -> Slice:
    """Take one repeat's conversations from the whole trace, and close up the time between them.

    A window of 60 s cuts conversations off: of the conversation trace's reuse (35 % of its tokens) 8 % would be
    left. So the conversations are dealt into as many equal parts as fit, each repeat sends another part from end to
    end, and time is shortened by its share: requests per second, lengths, and the tokens that pass between two turns
    stay those of the trace.
    """
    span = whole[-1].at - whole[0].at
    parts = max(1, round(span / (run_seconds * SPEED_UP)))
    fits = [request for request in trace_slices.spread_ties(whole) if request.isl + request.osl <= MAX_LEN]
    dealt = trace_slices.deal_conversations(fits, parts)[repeat % parts]
    kept = list(trace_slices.scale_rate(trace_slices.rebase(dealt), parts))
    return Slice(trace, repeat, kept, len(whole) - len(fits), parts)


def write_slice(path: Path, requests: Sequence[TrafficRequest]) -> None:
    """Write requests as Mooncake JSON lines, for the load generator's command line."""
    rows = (
        {
            "timestamp": round(request.at * 1000, 3),
            "input_length": request.isl,
            "output_length": request.osl,
            "hash_ids": request.hash_ids,
        }
        for request in requests
    )
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
