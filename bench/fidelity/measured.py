"""How near does the engine come to measured GPU runs? Each is a real vLLM's, as LLMServingSim (MIT) leaves one.

A run is ``NAME__requests.jsonl`` and ``NAME__meta.json``, in most cases with ``NAME__timeseries.csv``; the profile of
that GPU's operators lies beside it, in ``profile_NAME/<data type>/tp<N>``. All that the engine is told stands in those:
arrivals, lengths, limits, and the blocks of the KV cache where the run says how many it had. Nothing is fitted to it.
"""

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import Compared, Served, compare
from replay import Arrival, replay

from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.kv_capacity import with_blocks
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.engine.timing.gpus import GPUS
from penstock_lab.engine.timing.known_models import model_named

FOLDER = "vllm_real"
META = "__meta.json"
BLOCK = 16
"""Tokens per block where a run does not say: vLLM's default on GPUs, and that of the profiles."""
OPERATORS, ROOFLINE = "operators", "roofline, defaults"


class NotARun(Exception):
    """A folder or file does not hold a measured run; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run: where its files are, and what its engine was."""

    name: str
    folder: Path
    kwargs: Mapping[str, Any]
    """Arguments that vLLM was started with."""
    block_size: int
    kv_blocks: int | None
    """As the engine counted them when it started; None where the run does not say."""

    async_scheduling: bool
    """Whether it planned a pass when the one before it started; vLLM's default since 0.14."""

    @property
    def model(self) -> str:
        return str(self.kwargs["model"])

    @property
    def gpu(self) -> str:
        """Name of the GPU in the engine's table: the run's own begins with it."""
        told = self.name.lower().replace("-", "").replace("_", "")
        return max((name for name in GPUS if told.startswith(name)), key=len, default=self.name)

    @property
    def tensor_parallel_size(self) -> int:
        return int(self.kwargs.get("tensor_parallel_size") or 1)

    @property
    def data_parallel(self) -> int:
        return int(self.kwargs.get("data_parallel_size") or 1)

    @property
    def expert_parallel_size(self) -> int:
        return self.tensor_parallel_size * self.data_parallel if self.kwargs.get("enable_expert_parallel") else 1

    @property
    def max_num_seqs(self) -> int:
        return int(self.kwargs["max_num_seqs"])

    @property
    def max_batched(self) -> int:
        return int(self.kwargs["max_num_batched_tokens"])

    @property
    def profile(self) -> Path:
        """Folder of the operators' profile.

        Raises:
            NotARun: there is none for that many GPUs.
        """
        found = sorted((self.folder / f"profile_{self.name}").glob(f"*/tp{self.tensor_parallel_size}"))
        if not found:
            raise NotARun(
                f"{self.name} has no profile_{self.name}/<data type>/tp{self.tensor_parallel_size} in {self.folder}"
            )
        return found[0]

    def requests(self) -> list["Request"]:
        return requests_of((self.folder / f"{self.name}__requests.jsonl").read_text().splitlines())

    def series(self) -> list["Second"]:
        return seconds_of((self.folder / f"{self.name}__timeseries.csv").read_text().splitlines())


def run_of(meta: Path) -> Run:
    """Return the run of a ``NAME__meta.json``.

    Raises:
        NotARun: it is not there, or lacks the engine's arguments.
    """
    try:
        told = json.loads(meta.read_text())
        kwargs, cache = told["engine_kwargs"], told.get("kv_cache") or {}
    except (OSError, ValueError, KeyError) as error:
        raise NotARun(f"{meta} says of no run what its engine was: {error!r}") from error
    blocks = cache.get("num_gpu_blocks")
    scheduler = (told.get("resolved_config") or {}).get("scheduler_config") or {}
    return Run(
        meta.name.removesuffix(META),
        meta.parent,
        kwargs,
        int(cache.get("block_size") or BLOCK),
        # vLLM keeps one block of these for itself: what has no KV of its own is said to lie there.
        None if blocks is None else int(blocks) - 1,
        bool(scheduler.get("async_scheduling", True)),
    )


def runs_of(paths: Iterable[Path]) -> list[Run]:
    """Return the runs of folders (all that lie in one), meta files or the common beginnings of a run's files.

    Raises:
        NotARun: a path holds none.
    """
    found = []
    for path in paths:
        metas = (
            [path] if path.is_file() or (path.parent.is_dir() and not path.is_dir()) else sorted(path.glob(f"*{META}"))
        )
        if not metas:
            raise NotARun(f"no measured run in {path}: there is no NAME{META}")
        found += [run_of(meta if meta.name.endswith(META) else meta.parent / f"{meta.name}{META}") for meta in metas]
    return found


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


def settings_of(run: Run, timing: TimingSettings) -> SimSettings:
    """Return the engine of the run."""
    # Ranks of the attention are one engine here: what each may have adds up, and a pass waits for the fullest.
    ranks = run.data_parallel
    return SimSettings(
        block_size=run.block_size,
        kv_blocks="auto" if run.kv_blocks is None else run.kv_blocks * ranks,
        max_num_seqs=run.max_num_seqs * ranks,
        max_num_batched_tokens=run.max_batched * ranks,
        async_scheduling=run.async_scheduling,
        timing=timing,
    )


def timings(run: Run, model: Path) -> dict[str, TimingSettings]:
    """Return what is compared, by what the table calls it; ``model`` is the model's ``config.json``."""
    common = {
        "model": str(model),
        "gpu": run.gpu,
        "tensor_parallel_size": run.tensor_parallel_size,
        "expert_parallel_size": run.expert_parallel_size,
    }
    profile = {"kind": "operators", "profile": str(run.profile), **common}
    return {OPERATORS: TimingSettings(**profile), ROOFLINE: TimingSettings(kind="roofline", **common)}


def write_model(run: Run, path: Path) -> None:
    """Write the ``config.json`` of the run's model, of which the run has no more than the name."""
    path.write_text(json.dumps(model_named(run.model)))


def compared(run: Run, model: Path) -> dict[str, list[Compared]]:
    """Return the figures of every timing beside the real ones; ``model`` is where to write the model's config to."""
    write_model(run, model)
    rows = run.requests()
    real = [Served(row.arrived, row.first, row.last, row.osl) for row in rows]
    arrivals = [Arrival(row.arrived, row.isl, row.osl) for row in rows]
    found = {}
    for name, timing in timings(run, model).items():
        table = load_timing(timing)
        found[name] = compare(real, replay(arrivals, with_blocks(settings_of(run, timing), table), table))
    return found
