"""The closed loop that a measured point was: so many clients, each with one request at a time, through the engine.

Clients begin together, every answer is followed by the next request, and all requests count: so do the usual load
generators. InferenceMAX's lengths are even between 0.8 of what they are called and all of it, which spreads the clients
in time. aiconfigurator's own runs have equal lengths, and engines started by its rules, whose passes have room for one
prompt beside the batch (``generator/rule_plugin/benchmark`` of its repository): that spreads them, too. What a request
takes beside its passes is added to the TTFT, and is no part of the loop: an answer takes a hundred times as long.
"""

from dataclasses import dataclass
from statistics import mean

import numpy as np
from points import Point
from roofline_fit import MEASURED_UTILISATION, MeasuredPoint

from penstock.kernel.machine import SECOND
from penstock.kernel.simulation import Simulation
from penstock.kernel.values import Prompt
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import EngineFinished, SubmitRequest
from penstock_lab.engine.kv_capacity import kv_blocks_of
from penstock_lab.engine.settings import Calibration, SimSettings
from penstock_lab.engine.timing.roofline import Roofline, RooflineTiming
from penstock_lab.engine.timing.timing_model import TimingModel

ROUNDS = 8
"""Requests of each client; the field's runs have ten."""
LEAST = 0.8
BLOCK = 64
MAX_BATCHED = 8192
"""Tokens of a pass, per rank of the attention: the usual limit of the engines that were measured."""
BESIDE = 1500
"""Tokens of a pass beside one prompt and the batch, by aiconfigurator's rules."""


@dataclass(frozen=True, slots=True)
class Looped:
    """Means over the requests, in seconds."""

    ttft: float
    tpot: float


def closed_loop(point: Point, calibration: Calibration, timing: TimingModel | None = None) -> Looped:
    """Return what the engine makes of a point; ``timing`` takes the place of the roofline."""
    measured = point.measured
    ranks = max(1, measured.expert_parallel_size // measured.tensor_parallel_size)
    budget = max(MAX_BATCHED * ranks, measured.concurrency)
    if point.generated:
        budget = measured.request.isl * ranks + measured.concurrency + BESIDE
    blocks = kv_blocks_of(
        measured.shape,
        measured.gpu,
        block_size=BLOCK,
        tensor_parallel_size=measured.tensor_parallel_size,
        expert_parallel_size=measured.expert_parallel_size,
        weight_dtype=measured.weight_dtype,
        kv_cache_dtype=measured.kv_cache_dtype,
        utilisation=MEASURED_UTILISATION,
        tokens=budget,
        seqs=measured.concurrency,
        length=measured.request.isl + measured.request.osl // 2,
    )
    settings = SimSettings(
        block_size=BLOCK,
        kv_blocks=max(blocks, -(-(measured.request.isl + measured.request.osl) // BLOCK)),
        max_num_seqs=measured.concurrency,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
        async_scheduling=point.group[0] == "vllm",
    )
    engine = Engine(settings)
    engine.timing = engine._core.timing = timing or RooflineTiming(roofline_of(measured, calibration))
    done: list[EngineFinished] = []
    asked = measured.concurrency
    lengths = np.random.default_rng(0).uniform(1.0 if point.generated else LEAST, 1.0, (ROUNDS * asked, 2)).tolist()

    def world(now: int, sender: str, effect: object) -> tuple[tuple[int, str, SubmitRequest], ...]:
        nonlocal asked
        if not isinstance(effect, EngineFinished):
            return ()
        done.append(effect)
        if asked >= ROUNDS * measured.concurrency:
            return ()
        asked += 1
        return ((effect.at, "engine", submit(asked - 1)),)

    def submit(number: int) -> SubmitRequest:
        prompt, answer = lengths[number]
        isl, osl = round(measured.request.isl * prompt), round(measured.request.osl * answer)
        return SubmitRequest(id=str(number), prompt=Prompt(isl), max_tokens=max(2, osl), ignore_eos=True)

    simulation = Simulation({"engine": engine}, world)
    for number in range(measured.concurrency):
        simulation.post(0, "engine", submit(number))
    simulation.run()
    first = [one.first for one in done if one.first is not None]
    return Looped(
        mean(at - one.arrived for at, one in zip(first, done, strict=True)) / SECOND + measured.beside,
        mean((one.at - at) / (one.tokens - 1) for at, one in zip(first, done, strict=True)) / SECOND,
    )


def roofline_of(measured: MeasuredPoint, calibration: Calibration) -> Roofline:
    return Roofline(
        measured.shape,
        measured.gpu,
        calibration,
        tensor_parallel_size=measured.tensor_parallel_size,
        expert_parallel_size=measured.expert_parallel_size,
        weight_dtype=measured.weight_dtype,
        kv_cache_dtype=measured.kv_cache_dtype,
    )
