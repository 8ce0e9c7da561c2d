"""Engine candidates: GPU, parallelism, batch and chunk of one engine that fits its memory, with its times and price."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np

from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import SECOND
from penstock.kernel.values import EngineLimits, Role
from penstock.planner.performance.performance_model import Floats, Numbers, numbers
from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.kv_capacity import with_blocks
from penstock_lab.engine.settings import SimSettings, TimingKind, TimingSettings, TransferSettings
from penstock_lab.engine.timing.gpus import Gpu
from penstock_lab.engine.timing.model_shape import ModelShape
from penstock_lab.engine.timing.roofline import REQUEST_OVERHEAD, check_parallel
from penstock_lab.engine.timing.timing_model import TimingModel, timing_of
from penstock_lab.profiler.deployment_plan.plan_request import PlanRequest
from penstock_lab.profiler.deployment_plan.planned_traffic import BLOCK, PlannedTraffic

GRID = np.unique(np.geomspace(1, 4096, 64).astype(np.int64))
"""Sequences of a decode step that are asked for; between them steps are taken as linear."""


class PassTimes:
    """Seconds of prompts and decode steps.

    Args:
        timing: of one engine.
        chunk: most tokens of a pass.
        context: tokens that a decoding sequence reads, in the mean.
        beside: prompts are computed in passes that decode as well, as aggregated engines do: counted is what their
            tokens add to such a pass, since weights are read and kernels launched once for both.
    """

    source = "timing model"

    def __init__(self, timing: TimingModel, chunk: int, context: float, *, beside: bool) -> None:
        self.timing = timing
        self._chunk, self._context, self._beside = chunk, max(1, round(context)), beside
        self._step = timing.decode(self._context, 1)
        self._steps = np.array([timing.decode(int(seqs) * self._context, int(seqs)) for seqs in GRID]) / SECOND
        self._prompts: dict[int, float] = {}

    def prefill(self, tokens: Numbers) -> Floats:
        """Return seconds of lone prompts, in as many passes as they need."""
        asked = numbers(tokens)
        flat = [self._prompt(max(1, round(float(each)))) for each in asked.ravel()]
        return np.array(flat, dtype=np.float64).reshape(asked.shape)

    def decode(self, seqs: Numbers, kv: Numbers) -> Floats:
        """Return seconds of a decode step of ``seqs`` sequences; ``kv`` is that many times the context."""
        return np.asarray(np.interp(numbers(seqs), GRID, self._steps))

    def mixed(self, tokens: Numbers, seqs: Numbers, kv: Numbers) -> Floats:
        """Return seconds of a pass that does both."""
        return self.prefill(tokens) + self.decode(seqs, kv)

    def extrapolating(self, tokens: float, seqs: float, kv: float) -> bool:
        """Return whether the timing model looked beyond what was measured."""
        return self.timing.extrapolated > 0

    def ratio(self, q: float) -> float:
        """Return 1: a timing model does not tell how its measurements scatter."""
        return 1.0

    @property
    def extrapolated(self) -> float | None:
        """Share of the look-ups beyond what was measured; None where nothing is looked up."""
        return self.timing.extrapolated / self.timing.lookups if self.timing.lookups else None

    def _prompt(self, tokens: int) -> float:
        known = self._prompts.get(tokens)
        if known is None:
            total, past = 0.0, 0
            while past < tokens:
                new = min(self._chunk, tokens - past)
                if self._beside:
                    total += self.timing.mixed(new, [(past, new)], self._context, 1) - self._step
                else:
                    total += self.timing.mixed(new, [(past, new)], 0, 0)
                past += new
            known = self._prompts[tokens] = max(0.0, total) / SECOND
        return known


CHUNKS: Mapping[Role, Sequence[int]] = {
    "aggregated": (1024, 2048, 4096, 8192, 16_384),
    "prefill": (16_384,),
    "decode": (8192,),
}
"""Tokens of a pass. Apart, a prefill engine gains from long passes; a decode engine computes few prompts."""
SEQS_LEAST, SEQS_MOST = 16, 1024
"""Bounds of the most requests at once: vLLM captures CUDA graphs up to about the upper one."""
GPUS_PER_ENGINE = 16
"""Most GPUs of one engine that are tried, where a link joins as many, or a network joins the stages of a pipeline."""
STAGES = (1, 2, 4, 8)
"""Stages of a pipeline that are tried, until the model fits: they make room, and a pass no shorter."""
ONE_PASS = (
    "no stage alone holds the model on {gpu}: pipelines of {stages} stages by the roofline, one pass at a time; real "
    "engines have one per stage under way, so fewer may do"
)
LATENT_BLOCK = 64
"""Tokens per KV block of a latent cache: vLLM's kernels for it take no other."""
READERS = 256
"""Most requests at once of a model without answers: each is one pass."""
LONGER = 2
"""Multiple of the traffic's longest request that engines take: a sample does not have the longest one to come."""
SURE = 0.8
"""Share of the KV cache that one request may take: engines refuse to start where it has no room, and an estimate may be
wrong by the rest."""
NETWORK_SHARE = 0.8
"""Share of the network's rate that a hand-off reaches. A guess: what RDMA reads of large blocks usually reach."""
NETWORK_LATENCY = 1e-3
"""Seconds before a hand-off's first byte: the hand-shake and the first read. A guess."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineCandidate:
    """One engine that fits. ``sim`` has its number of KV blocks; ``price``: dollars per hour of all its GPUs."""

    role: Role
    gpu: str
    sim: SimSettings
    times: PassTimes
    price: float

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.sim.timing.gpus

    @property
    def chunk(self) -> int:
        """Most tokens of a pass."""
        return self.sim.max_num_batched_tokens

    @property
    def limits(self) -> EngineLimits[int]:
        """What one engine has room for."""
        return EngineLimits(
            max_num_batched_tokens=self.chunk, max_num_seqs=self.sim.max_num_seqs, kv_tokens=self.sim.capacity
        )


@dataclass(frozen=True, slots=True)
class IdleEngine:
    """The fastest that engines of one layout can be: nothing waits, and one sequence decodes. Seconds."""

    gpu: str
    gpus: int
    label: str
    step: float
    """One decode step of one sequence."""
    weights: float
    """Of it, reading the weights at the data sheet's bandwidth."""
    prompt: float
    """The mean prompt, computed alone, with what its request takes besides."""
    stages: int
    """Of its pipeline."""


class EngineCatalog:
    """Every engine of a request that fits.

    Attributes:
        candidates: by role.
        idle: how fast each layout is without load, for floors.
        refused: why layouts do not fit, by GPU.
        notes: what of the sources of timing failed.
    """

    def __init__(self, request: PlanRequest, traffic: PlannedTraffic) -> None:
        self.candidates: dict[Role, list[EngineCandidate]] = {role: [] for role in CHUNKS}
        self.idle: list[IdleEngine] = []
        self.refused: dict[str, list[str]] = {}
        self.notes: list[str] = []
        self._request, self._traffic, self._shape = request, traffic, request.shape()
        self._roles: Sequence[Role] = tuple(CHUNKS) if request.answers else ("aggregated",)
        self._longest = min(traffic.longest, self._shape.context or traffic.longest)
        self._predicts = find_spec("aiconfigurator_core") is not None
        mix = traffic.mix
        tokens = mix.mean((mix.isl + mix.osl / 2.0) * mix.osl)
        self._context = tokens / mix.mean(mix.osl)
        self._prompt = round(mix.mean(mix.fresh))
        for kind in request.gpus:
            gpu = request.gpu(kind)
            for stages in STAGES:
                for tensor, expert in layouts(self._shape, gpu, request.max_gpus, stages):
                    self._add(kind, gpu, tensor, expert, stages)
                if any(each.gpu == kind for each in self.idle):
                    if stages > 1:
                        self.notes.append(ONE_PASS.format(gpu=kind, stages=stages))
                    break

    def _add(self, kind: str, gpu: Gpu, tensor: int, expert: int, stages: int) -> None:
        timing, table = self._timing(kind, tensor, expert, stages)
        gpus = timing.gpus
        label = layout_label(gpus, kind, timing)
        base = SimSettings(
            block_size=LATENT_BLOCK if self._shape.latent else BLOCK,
            enable_chunked_prefill=self._request.answers,
            async_scheduling=True,
            request_overhead=self._request_overhead(timing, table),
            timing=timing,
            transfer=TransferSettings(
                bandwidth=gpu.network_gb_per_s * 1e9 * NETWORK_SHARE * gpus,
                latency=NETWORK_LATENCY,
                kv_bytes_per_token=max(1, round(self._shape.kv_bytes_with_states(None, self._prompt))),
            ),
        )
        model = timing_of(timing, 1, table)
        self.idle.append(
            IdleEngine(
                kind,
                gpus,
                label,
                model.decode(round(self._context), 1) / SECOND,
                self._weights(gpu, timing),
                model.prefill(self._prompt) / SECOND + base.request_overhead,
                stages,
            )
        )
        seqs = self._seqs(model)
        refused = ""
        for role in self._roles:
            for chunk in self._chunks(role, max(1, expert // tensor)):
                sim = msgspec.structs.replace(base, max_num_seqs=min(seqs, chunk), max_num_batched_tokens=chunk)
                try:
                    sim = with_blocks(sim, table, self._context)
                except ConfigError as error:
                    refused = error.message
                    continue
                if sim.capacity < self._longest:
                    refused = (
                        f"{label} holds {max(0, sim.capacity):,} tokens of KV beside the weights, and the longest "
                        f"request has {self._longest:,}"
                    )
                    continue
                sim = msgspec.structs.replace(sim, max_model_len=self._length(sim))
                times = PassTimes(
                    timing_of(timing, sim.capacity, table), chunk, self._context, beside=role != "prefill"
                )
                price = self._request.price(kind) * gpus
                self.candidates[role].append(EngineCandidate(role, kind, sim, times, price))
        if refused and not any(self._fits(kind, gpus, role) for role in CHUNKS):
            self.idle.pop()
            self.refused.setdefault(kind, []).append(refused)

    def _chunks(self, role: Role, ranks: int) -> Sequence[int]:
        """Return the tokens of a pass that are tried.

        A prompt of a model without answers is one pass. A rank's share of a hybrid model's pass must have room for a
        block of vLLM's cache, which is so long that the attention's part of it is no smaller than a state.
        """
        if not self._request.answers:
            return [max(chunk, LONGER * self._longest) for chunk in CHUNKS[role][-1:]]
        shape = self._shape
        if not shape.state_layers:
            return CHUNKS[role]
        block = shape.state_bytes / shape.state_layers / (shape.kv_bytes() / shape.attention_layers)
        return [chunk for chunk in CHUNKS[role] if chunk >= ranks * block]

    def _length(self, sim: SimSettings) -> int:
        """Return the longest request that an engine takes: by the traffic, as far as its model and its cache go."""
        wanted = -(-LONGER * self._longest // 1024) * 1024
        if not self._request.answers:
            wanted = LONGER * self._longest
        most = min(wanted, int(SURE * sim.capacity), self._shape.context or wanted)
        return max(self._longest, most)

    def _fits(self, kind: str, gpus: int, role: Role) -> bool:
        return any(each.gpu == kind and each.gpus == gpus for each in self.candidates[role])

    def _timing(
        self, kind: str, tensor: int, expert: int, stages: int
    ) -> tuple[TimingSettings, Mapping[str, Any] | None]:
        """Return the best source of timing of a layout: a profile of it, aiconfigurator, or the roofline.

        Profiles are of tensor-parallel sizes and aiconfigurator is asked for one stage: a pipeline has the roofline.
        """

        def settings(source: TimingKind, profile: str | None = None) -> TimingSettings:
            return TimingSettings(
                kind=source,
                model=self._request.path,
                gpu=kind,
                profile=profile,
                tensor_parallel_size=tensor,
                expert_parallel_size=expert,
                pipeline_parallel_size=stages,
            )

        measured = {} if expert > 1 or stages > 1 else self._request.profiles
        named = measured.get(f"{kind}:{tensor}")
        profile = named or measured.get(kind)
        if profile is not None:
            timing = settings("table", profile)
            try:
                table = load_timing(timing)
                timing_of(timing, 1, table)
            except ConfigError as error:
                if named is not None:
                    raise
                self.notes.append(f"no profile of TP{tensor}: {error.message}")
            else:
                return timing, table
        if self._predicts and stages == 1:
            timing = settings("aiconfigurator")
            try:
                return timing, load_timing(timing)
            except ConfigError as error:
                self.notes.append(f"roofline in place of aiconfigurator: {error.message}")
        timing = settings("roofline")
        return timing, load_timing(timing)

    def _request_overhead(self, timing: TimingSettings, table: Mapping[str, Any] | None) -> float:
        """Return what a request takes beside its passes: a profile says it, or has it in its prompts."""
        if timing.kind == "table":
            return float((table or {}).get("request_overhead", 0.0))
        return REQUEST_OVERHEAD.get(self._request.engine, REQUEST_OVERHEAD["vllm"])

    def _weights(self, gpu: Gpu, timing: TimingSettings) -> float:
        """Return seconds in which the GPUs read what a single token needs, one stage after another."""
        active = self._shape.weight_bytes * self._shape.params_active / self._shape.params
        return active * timing.pipeline_parallel_size / timing.gpus / gpu.bandwidth

    def _seqs(self, model: TimingModel) -> int:
        """Return the most requests at once: those whose step still keeps the ITL, as the next power of two."""
        if not self._request.answers:
            return READERS
        itl = self._request.slo.itl or 0.0
        seqs = SEQS_LEAST
        while seqs < SEQS_MOST and model.decode(round(seqs * self._context), seqs) / SECOND < itl:
            seqs *= 2
        return seqs


def layouts(shape: ModelShape, gpu: Gpu, most: int | None, stages: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (tensor parallel size, expert parallel size) of a stage of engines that a model and a GPU's link allow.

    Of a model with experts: sliced experts, whole experts behind tensor-parallel attention, and whole experts behind
    data-parallel attention.
    """
    gpus = 1
    while gpus <= min(gpu.link_gpus, min(GPUS_PER_ENGINE, most or GPUS_PER_ENGINE) // stages):
        choices = [(gpus, 1), (gpus, gpus), (1, gpus)] if shape.experts and gpus > 1 else [(gpus, 1)]
        for tensor, expert in choices:
            try:
                check_parallel(shape, tensor, expert, stages)
            except ConfigError:
                continue  # a layout that this model can't have: the others are tried
            if _splits_evenly(shape, tensor, expert):
                yield tensor, expert
        gpus *= 2


def _splits_evenly(shape: ModelShape, tensor: int, expert: int) -> bool:
    """Tell whether engines can split heads of the cache and scales so: vLLM and SGLang refuse to start otherwise."""
    if shape.kv_heads % tensor and tensor % shape.kv_heads:
        return False
    columns = [shape.dense_columns, 0 if expert > 1 else shape.expert_columns]
    return not any(each % (tensor * shape.scaled_columns) for each in columns)


def layout_label(gpus: int, kind: str, timing: TimingSettings) -> str:
    """Return a layout in words: ``2 h200``, with TP, EP and PP where they are more than one."""
    tensor, expert = timing.tensor_parallel_size, timing.expert_parallel_size
    sizes = [f"TP{tensor}" if tensor > 1 else "", f"EP{expert}" if expert > 1 else ""]
    if expert > tensor:
        sizes.append(f"DP{expert // tensor}")
    if timing.pipeline_parallel_size > 1:
        sizes.append(f"PP{timing.pipeline_parallel_size}")
    return " ".join([kind, *filter(None, sizes)]) if gpus > 1 else kind
