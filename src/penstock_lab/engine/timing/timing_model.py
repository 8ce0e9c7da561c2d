"""`TimingModel`: the protocol for the duration of a forward pass; here with polynomial and table models.

For these three a pass takes ``prefill(new tokens)`` plus ``decode(KV tokens read, sequences)``. Those of
`penstock_lab.engine.timing.roofline` and `penstock_lab.engine.timing.operators` look at the pass as a whole. Nothing
here knows of a schedule. Durations are float nanoseconds inside and are rounded where they become kernel time.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import MILLISECOND
from penstock_lab.engine.settings import TimingSettings, checked_monotone
from penstock_lab.engine.timing.collectives import Collectives, collectives, link_of
from penstock_lab.engine.timing.decode_steps import Array, DecodeSteps, QuadraticSteps, TabulatedSteps
from penstock_lab.engine.timing.gpus import Gpu, gpu_of, named
from penstock_lab.engine.timing.model_shape import ModelShape, shape_of
from penstock_lab.engine.timing.operators import OperatorTiming
from penstock_lab.engine.timing.roofline import Roofline, RooflineTiming, check_parallel

TABLE_KEYS = ("prefill_isl", "prefill_ttft_ms", "decode_active_kv_tokens", "decode_context_length", "decode_itl")
CONTEXT_KEY, SEQS_KEY = "decode_context_length", "decode_seqs"
"""Second axis of a decode table: tokens per sequence as Dynamo has it, or sequences. More sequences take longer at the
same KV, longer contexts do not, so that only the second can be made monotone without error."""
UNSEEN = "models that its constants were not fitted to are off by 12 % in TPOT and 30 % in TTFT, in the median"
"""As docs/concepts/timing.md has it."""
FLOOR = 1.0 * MILLISECOND
"""A decode step of the fitted models takes at least this, before the speed-up: the fits say nothing below it."""


class TimingModel(Protocol):
    """A timing model. ``lookups`` and ``extrapolated`` count look-ups, and those outside of what was measured."""

    lookups: int
    extrapolated: int
    uneven: bool
    """Whether the longest sequence of a pass matters: other models do not get it."""

    def prefill(self, tokens: int) -> float:
        """Return nanoseconds of a pass over one prompt of ``tokens`` tokens, none of them cached."""
        ...

    def mixed(self, tokens: int, chunks: Iterable[tuple[int, int]], kv: int, seqs: int, longest: int = 0) -> float:
        """Return nanoseconds of a pass that computes prompts and, where ``seqs`` is not 0, decodes too.

        Args:
            tokens: new prompt tokens of all prompts together.
            chunks: per prompt (tokens before, new tokens); read once, and only by models that need it.
            kv, seqs: as in `decode`.
            longest: tokens that the longest of the sequences reads; 0 takes them as equally long.
        """
        ...

    def decode(self, kv: int, seqs: int) -> float:
        """Return nanoseconds of one step of ``seqs`` sequences that read ``kv`` tokens together."""
        ...

    def run(self, kv: int, seqs: int, steps: int, longest: int = 0) -> DecodeSteps:
        """Return a run of ``steps`` steps; step i reads ``kv + i * seqs`` tokens; ``longest`` is that of the first."""
        ...

    def over(self, kv: npt.NDArray[np.int64], seqs: int) -> DecodeSteps:
        """Return a run whose step i reads ``kv[i]`` tokens, shape (steps,): steps that are not equal."""
        ...


def timing_of(settings: TimingSettings, capacity: int, table: Mapping[str, Any] | None = None) -> TimingModel:
    """Return the timing model that the settings name.

    Args:
        capacity: KV tokens of the engine.
        table: what the files hold that the settings name, as `penstock_lab.config.timing_files` reads them: the
            arrays of the NPZ file or of a profile folder; ``model`` and ``gpu``, the fields of those files; a profile's
            columns by table.
    Raises:
        ConfigError: the table is absent or malformed, or the polynomial falls as load grows.
    """
    if settings.kind == "polynomial":
        return PolynomialTiming(settings, capacity)
    if table is None:
        knob = "model" if settings.kind in ("roofline", "operators") else "profile"
        raise ConfigError(
            f"timing.kind is {settings.kind}, but no {knob} was handed in", hint=f"set timing.{knob} to a file"
        )
    if settings.kind == "roofline":
        return RooflineTiming(roofline_of(settings, table), settings.speed_up)
    if settings.kind == "operators":
        return OperatorTiming(table, _shape(settings, table), _exchanges(settings, table), settings)
    if settings.kind == "aiconfigurator":
        return OperatorTiming(table, None, None, settings)
    return TableTiming(settings, table)


def source_of(settings: TimingSettings) -> str:
    """Describe in words where durations come from, and how far they were compared with real engines."""
    where = f"{settings.model} on {settings.gpus} {settings.gpu}"
    if settings.kind == "roofline":
        return f"roofline of {where}, by the data sheet: {UNSEEN}"
    if settings.kind == "operators":
        return f"operators measured in {settings.profile}"
    if settings.kind == "aiconfigurator":
        return f"aiconfigurator's kernels of {where}"
    if settings.kind == "table":
        return f"table {settings.profile}"
    return f"{settings.kind}, of no particular model and GPU"


def roofline_of(settings: TimingSettings, table: Mapping[str, Any]) -> Roofline:
    """Return the roofline that the settings name; ``table`` as `timing_of` has it.

    Raises:
        ConfigError: the model or the GPU is absent, malformed, or can't be split as the settings say.
    """
    return Roofline(
        _shape(settings, table),
        gpu_of_settings(settings, table),
        settings.calibration,
        tensor_parallel_size=settings.tensor_parallel_size,
        expert_parallel_size=settings.expert_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        weight_dtype=settings.weight_dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        link=table.get("link"),
    )


def _exchanges(settings: TimingSettings, table: Mapping[str, Any]) -> Collectives | None:
    """Return what an engine's GPUs exchange in a pass, which a profile of one of them lacks; None where it is one."""
    tensor, gpus = settings.tensor_parallel_size, settings.gpus
    if gpus == 1:
        return None
    shape, link = _shape(settings, table), table.get("link")
    check_parallel(shape, tensor, settings.expert_parallel_size)
    if link is None:
        gpu = gpu_of_settings(settings, table)
        within, across = (link_of(gpu, count, settings.calibration) for count in (tensor, gpus))
    else:
        within = across = link
    return collectives(shape, within, across, tensor, gpus // tensor, gathered=True)


def gpu_of_settings(settings: TimingSettings, table: Mapping[str, Any]) -> Gpu:
    """Return the GPU that the settings name; ``table`` as `timing_of` has it.

    Raises:
        ConfigError: it is absent or malformed.
    """
    where = settings.gpu or "timing.gpu"
    return gpu_of(table["gpu"], where) if "gpu" in table else named(where)


def _shape(settings: TimingSettings, table: Mapping[str, Any]) -> ModelShape:
    if "model" not in table:
        raise ConfigError(
            f"timing.kind is {settings.kind}, but no model was handed in", hint="set timing.model to a config.json"
        )
    return shape_of(table["model"], settings.model or "config.json")


class PolynomialTiming:
    """Fit of Dynamo's mocker: quadratic in the new tokens of a pass, and in the share of the KV cache that is read."""

    def __init__(self, settings: TimingSettings, capacity: int) -> None:
        checked_monotone(settings)
        self.lookups = self.extrapolated = 0
        self.uneven = False
        scale = MILLISECOND / settings.speed_up
        self._p2, self._p1, self._p0 = (each * scale for each in settings.prefill)
        self._capacity = capacity
        quadratic, linear, base = settings.decode
        self._d2 = quadratic * scale / capacity**2
        self._d1 = linear * scale / capacity
        self._d0 = base * scale
        self._floor = FLOOR / settings.speed_up
        self._flat = self.decode(capacity, 1)
        """A step that reads a whole cache's worth, or more."""

    def prefill(self, tokens: int) -> float:
        return (self._p2 * tokens + self._p1) * tokens + self._p0 if tokens else 0.0

    def mixed(self, tokens: int, chunks: Iterable[tuple[int, int]], kv: int, seqs: int, longest: int = 0) -> float:
        length = (self._p2 * tokens + self._p1) * tokens + self._p0 if tokens else 0.0
        return length + self.decode(kv, seqs) if seqs else length

    def decode(self, kv: int, seqs: int) -> float:
        if not seqs:
            return 0.0
        read = kv if kv < self._capacity else self._capacity
        length = (self._d2 * read + self._d1) * read + self._d0
        return length if length > self._floor else self._floor

    def run(self, kv: int, seqs: int, steps: int, longest: int = 0) -> DecodeSteps:
        if self._d0 < self._floor:
            return self.over(kv + seqs * np.arange(steps, dtype=np.int64), seqs)
        # The step that first reads a whole cache's worth, and all after it, take the same.
        bend = min(steps, max(0, -((kv - self._capacity) // seqs)))
        return QuadraticSteps(
            (self._d2 * kv + self._d1) * kv + self._d0,
            (2.0 * self._d2 * kv + self._d1) * seqs,
            self._d2 * seqs * seqs,
            bend,
            steps,
            self._flat,
        )

    def over(self, kv: npt.NDArray[np.int64], seqs: int) -> DecodeSteps:
        read = np.minimum(kv, self._capacity).astype(np.float64)
        return TabulatedSteps.of(np.maximum(self._floor, (self._d2 * read + self._d1) * read + self._d0))


class TableTiming:
    """Measured points: linear between them, and on beyond the last two, which is counted as extrapolated.

    Both tables are made monotone first (running maximum), because noise that makes a longer prompt faster would let
    a planner gain from more load.
    """

    def __init__(self, settings: TimingSettings, table: Mapping[str, Any]) -> None:
        self.lookups = self.extrapolated = 0
        self.uneven = False
        self._by_seqs = SEQS_KEY in table
        """Whether steps are looked up by KV and sequences, as in our own profiles, or by KV and context."""
        second = SEQS_KEY if self._by_seqs else CONTEXT_KEY
        keys = [second if key == CONTEXT_KEY else key for key in TABLE_KEYS]
        absent = [key for key in keys if key not in table]
        if absent:
            raise ConfigError(f"the timing table lacks {', '.join(absent)}", hint=f"it needs {', '.join(keys)}")
        arrays = {key: np.asarray(table[key], dtype=np.float64) for key in keys}
        self._isl = _axis("prefill_isl", arrays["prefill_isl"])
        self._kv = _axis("decode_active_kv_tokens", arrays["decode_active_kv_tokens"])
        self._second = _axis(second, arrays[second])
        scale = MILLISECOND / settings.speed_up
        prefill, itl = arrays["prefill_ttft_ms"], arrays["decode_itl"]
        if prefill.shape != self._isl.shape:
            raise ConfigError(f"prefill_ttft_ms has shape {prefill.shape}, prefill_isl {self._isl.shape}")
        if itl.shape != (len(self._kv), len(self._second)):
            raise ConfigError(f"decode_itl has shape {itl.shape}, its axes ({len(self._kv)}, {len(self._second)})")
        if not (np.isfinite(prefill).all() and np.isfinite(itl).all() and (prefill >= 0).all() and (itl > 0).all()):
            raise ConfigError("the timing table holds a duration that is not a positive number")
        self._prefill = np.maximum.accumulate(prefill) * scale
        self._itl = np.maximum.accumulate(np.maximum.accumulate(itl, axis=0), axis=1) * scale
        self._saving = float(table.get("mixed_saving_ms", 0.0)) * scale
        """What a pass with prompts and decoding saves: it reads the weights once. Measured, or 0."""

    def prefill(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        self.lookups += 1
        self.extrapolated += not self._isl[0] <= tokens <= self._isl[-1]
        low, share = _place_on_axis(self._isl, np.array([float(tokens)]))
        value = self._prefill[low] * (1.0 - share) + self._prefill[low + 1] * share
        return max(0.0, float(value[0]))

    def mixed(self, tokens: int, chunks: Iterable[tuple[int, int]], kv: int, seqs: int, longest: int = 0) -> float:
        prefill, decode = self.prefill(tokens), self.decode(kv, seqs)
        return max(prefill, decode, prefill + decode - self._saving)

    def decode(self, kv: int, seqs: int) -> float:
        return float(self._steps(np.array([kv], dtype=np.int64), seqs)[0]) if seqs else 0.0

    def run(self, kv: int, seqs: int, steps: int, longest: int = 0) -> DecodeSteps:
        return self.over(kv + seqs * np.arange(steps, dtype=np.int64), seqs)

    def over(self, kv: npt.NDArray[np.int64], seqs: int) -> DecodeSteps:
        return TabulatedSteps.of(self._steps(kv, seqs))

    def _steps(self, kv: npt.NDArray[np.int64], seqs: int) -> Array:
        read = kv.astype(np.float64)
        second = np.full_like(read, seqs) if self._by_seqs else read / seqs
        self.lookups += len(kv)
        inside = (self._kv[0] <= read) & (read <= self._kv[-1])
        inside &= (self._second[0] <= second) & (second <= self._second[-1])
        self.extrapolated += len(kv) - int(np.count_nonzero(inside))
        i, u = _place_on_axis(self._kv, read)
        j, v = _place_on_axis(self._second, second)
        grid = self._itl
        near = grid[i, j] * (1.0 - v) + grid[i, j + 1] * v
        far = grid[i + 1, j] * (1.0 - v) + grid[i + 1, j + 1] * v
        # Below the first point a line may cross zero; no step is faster than a hundredth of the fastest measured.
        floor = 0.01 * float(grid[0, 0])
        steps: Array = np.maximum(floor, near * (1.0 - u) + far * u)
        return steps


def _axis(name: str, values: Array) -> Array:
    if values.ndim != 1 or len(values) < 2 or not (np.diff(values) > 0).all():
        raise ConfigError(f"{name} must hold two or more rising numbers, not shape {values.shape}")
    return values


def _place_on_axis(axis: Array, values: Array) -> tuple[npt.NDArray[np.int64], Array]:
    """Return, per value, the interval that it lies in (the outermost where it lies beyond) and its share of it."""
    low: npt.NDArray[np.int64] = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, len(axis) - 2)
    return low, (values - axis[low]) / (axis[low + 1] - axis[low])
