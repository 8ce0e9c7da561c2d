"""How near does the engine come to a measured GPU run? Llama-3.1-8B on one RTX PRO 6000, 300 requests at 10 per second.

Run and profile are LLMServingSim's (MIT). Nothing is fitted to the run: the operators' times are the profile's, and the
gap between two of them is the start value.
"""

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from errors import Compared, Served, compare
from replay import Arrival, replay

from penstock.config.timing_files import load_timing
from penstock.engine.capacity import kv_blocks_of
from penstock.engine.gpus import named
from penstock.engine.model_shape import shape_of
from penstock.engine.settings import SimSettings, TimingSettings

RUN = "vllm_real"
SERIES = "RTXPRO6000_Llama-3.1-8B__timeseries.csv"
REQUESTS = "RTXPRO6000_Llama-3.1-8B__requests.jsonl"
PROFILE = Path("profile_RTXPRO6000_Llama-3.1-8B") / "bf16" / "tp1"
MODEL = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
OPERATORS, NO_GAP = "operators", "operators, no gap between them"
MAX_SEQS, MAX_BATCHED, BLOCK = 128, 2048, 16
"""As the run's meta.json says; the block size is that of its profile."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the run: seconds since the first arrival, tokens, and when the engine took it up and served it."""

    arrived: float
    queued: float
    scheduled: float
    first: float
    last: float
    isl: int
    osl: int


def requests_of(lines: Iterable[str]) -> list[Request]:
    """Return the run in order of arrival, on one clock.

    Arrivals are on the wall clock and all else on the engine's. The engine takes its input between two passes, so the
    request that it took up soonest after its arrival tells by how much the two differ, to a millisecond or so.
    """
    rows = [json.loads(line) for line in lines]
    apart = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    began = min(row["arrival_time"] for row in rows) + apart
    found = [
        Request(
            row["arrival_time"] + apart - began,
            row["queued_ts"] - began,
            row["scheduled_ts"] - began,
            row["first_token_ts"] - began,
            row["last_token_ts"] - began,
            row["input_toks"],
            row["output_toks"],
        )
        for row in rows
    ]
    return sorted(found, key=lambda request: request.arrived)


@dataclass(frozen=True, slots=True)
class Second:
    """A second of the run's time series: when it ended, on the series' own clock, and tokens computed in it."""

    end: float
    prompt: float
    generated: float


def seconds_of(lines: Iterable[str]) -> list[Second]:
    """Return the run's time series."""
    return [
        Second(float(row["t"]), float(row["prompt_throughput"]), float(row["gen_throughput"]))
        for row in csv.DictReader(lines)
    ]


def settings_of(timing: TimingSettings) -> SimSettings:
    """Return the engine of the run."""
    return SimSettings(
        block_size=BLOCK,
        kv_blocks=kv_blocks_of(shape_of(MODEL), named("rtxpro6000"), block_size=BLOCK),
        max_seqs=MAX_SEQS,
        max_batched_tokens=MAX_BATCHED,
        timing=timing,
        emit_decode_blocks=False,
    )


def timings(folder: Path, model: Path) -> dict[str, TimingSettings]:
    """Return what is compared, by what the table calls it; ``model`` is a file with `MODEL` in it."""
    profile = {"kind": "operators", "model": str(model), "profile": str(folder / PROFILE)}
    return {
        OPERATORS: TimingSettings(**profile),
        NO_GAP: TimingSettings(**profile, operator_gap_ms=0.0),
        "roofline, start values": TimingSettings(kind="roofline", model=str(model), gpu="rtxpro6000"),
    }


def read(folder: Path) -> list[Request]:
    return requests_of((folder / REQUESTS).read_text().splitlines())


def write_model(path: Path) -> None:
    path.write_text(json.dumps(MODEL))


def compared(folder: Path, model: Path) -> dict[str, list[Compared]]:
    """Return the figures of every timing beside the real ones; ``model`` is the file to write `MODEL` to."""
    write_model(model)
    rows = read(folder)
    real = [Served(row.arrived, row.first, row.last, row.osl) for row in rows]
    arrivals = [Arrival(row.arrived, row.isl, row.osl) for row in rows]
    found = {}
    for name, timing in timings(folder, model).items():
        found[name] = compare(real, replay(arrivals, settings_of(timing), load_timing(timing)))
    return found
