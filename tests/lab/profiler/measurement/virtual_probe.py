"""An engine that is measured on virtual time: the real engine machine, without HTTP and without waiting."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.kernel.machine import SECOND
from penstock.kernel.values import EngineLimits
from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.kv_capacity import with_blocks
from penstock_lab.engine.self_benchmark import _run_prompts
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.engine.timing.timing_model import TimingModel, timing_of
from penstock_lab.profiler.measurement.engine_probe import PointKey, ProbeSample

MODEL = "Llama-3.1-8B"
GAP = 0.0004
"""Seconds that the host adds to a pass, and the engine does not count."""


def h100(tp: int, **more: Any) -> SimSettings:
    timing = TimingSettings(kind="roofline", model=MODEL, gpu="h100", tensor_parallel_size=tp)
    return SimSettings(timing=timing, max_model_len=16_384, enable_prefix_caching=False, **more)


@dataclass
class VirtualProbe:
    """Answers as `HttpProbe` does. ``noise``: relative; every ``spike``-th measurement takes ten times as long."""

    settings: SimSettings
    noise: float = 0.0
    spike: int = 0
    gap: float = 0.0
    calls: Counter[PointKey] = field(default_factory=Counter)
    clock: float = 0.0
    """Seconds that all measurements took together."""

    def __post_init__(self) -> None:
        self.table = load_timing(self.settings.timing)
        self.settings = with_blocks(self.settings, self.table)
        self.random = random.Random(3)

    @property
    def timing(self) -> TimingModel:
        return timing_of(self.settings.timing, self.settings.capacity, self.table)

    @property
    def limits(self) -> EngineLimits[int | None]:
        s = self.settings
        return EngineLimits(
            max_num_batched_tokens=s.max_num_batched_tokens,
            max_num_seqs=s.max_num_seqs,
            kv_tokens=s.capacity,
            max_model_len=s.max_model_len,
        )

    async def measure(self, key: PointKey) -> ProbeSample:
        self.calls[key] += 1
        seconds, context = self._exact(key)
        inside = seconds
        seconds = (seconds + self.gap) * self.random.lognormvariate(0.0, self.noise)
        if self.spike and self.calls.total() % self.spike == 0:
            seconds *= 10.0
        self.clock += seconds
        return ProbeSample(seconds, inside if key.seqs <= 1 and key.kind != "mixed" else None, seconds, context)

    def _exact(self, key: PointKey) -> tuple[float, float | None]:
        if key.kind == "mixed":
            kv = key.seqs * key.context
            return self.timing.mixed(key.tokens, [(0, key.tokens)], kv, key.seqs) / SECOND, float(key.context)
        quiet = msgspec.structs.replace(self.settings, emit_decode_blocks=False)
        if key.kind == "prefill":
            return _run_prompts(quiet, self.table, [key.tokens], 1)[0] / SECOND, None
        _, window = _run_prompts(quiet, self.table, [key.context] * key.seqs, 8)
        assert window is not None and window.wall is not None
        assert window.decode_kv is not None and window.decode_seqs is not None
        return window.wall / window.passes, window.decode_kv / window.decode_seqs
