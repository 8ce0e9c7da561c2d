"""Operator timing: composes the time of a pass from tables of operators that were measured one by one.

A profile has, for one GPU's share of one model: ``dense`` operators by the pass's tokens, ``per_sequence`` ones by the
sequences that get a token, ``attention`` by (prompt tokens, tokens before them, sequences that decode, tokens each of
those reads), and of models with experts ``moe`` by (tokens, experts that they touch). A pass is their sum, each as
often as a pass has it. Between measured points lines are drawn; beyond the last two points the line goes on, which is
counted as extrapolated. Where an engine runs without CUDA graphs, the GPU waits between two operators for the next one
to start, which none of them has in its own time: `OPERATOR_GAP_MS`.

Several prompts in one pass count as one that attends to as many pairs. Sequences count as equally long, unless the
profile has ``skew``: what their attention takes longer when they are not.
Source: layout and composition as in LLMServingSim's profiles (docs/bench/fidelity.md holds them to real runs).
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import MILLISECOND
from penstock_lab.engine.settings import TimingSettings
from penstock_lab.engine.timing.collectives import Collectives
from penstock_lab.engine.timing.decode_steps import Array, DecodeSteps, TabulatedSteps
from penstock_lab.engine.timing.model_shape import ModelShape
from penstock_lab.engine.timing.roofline import experts_touched

MICROSECOND = MILLISECOND / 1000

OPERATOR_GAP_MS = 0.0
"""What a GPU idles between two operators of a pass, which a profile of each one lacks: CUDA graphs close the gaps."""
ONCE = ("embedding", "final_layernorm", "lm_head", "sampler")
"""Operators that a pass has once; all others it has in every layer."""
TWICE_PER_LAYER = ("layernorm",)
WITHOUT_EXPERTS = ("gate_up_proj", "act_fn", "down_proj")
"""Operators of the layers that have no experts."""
COLUMNS = {
    "dense": ("layer", "tokens", "time_us"),
    "per_sequence": ("layer", "sequences", "time_us"),
    "attention": ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"),
    "moe": ("tokens", "activated_experts", "time_us"),
    "skew": ("n", "pc", "kv_big", "kv_mean", "t_mean_us", "t_max_us", "t_skew_us"),
}
"""Columns of each table, as the CSV files name them."""
OPTIONAL = ("moe", "skew")
"""Tables that not every profile has: experts, and attention of sequences that are not equally long."""


class OperatorTiming:
    """A profile as a timing model.

    Args:
        tables: per table of `COLUMNS` a mapping of its columns.
        shape: of the model, of which a profile has one layer of each kind; None where the tables have all of it.
        link: where an engine has several GPUs, what they exchange: profiles have none of it. With more GPUs of experts
            than of tensors, attention is data-parallel: each rank computes its own sequences and prompts, all wait for
            the one with the most, and every GPU its share of the experts for the tokens of all.
    Raises:
        ConfigError: a table or column is absent, or holds what is no duration.
    """

    def __init__(
        self, tables: Mapping[str, Any], shape: ModelShape | None, link: Collectives | None, settings: TimingSettings
    ) -> None:
        self.lookups = self.extrapolated = 0
        scale = MICROSECOND / settings.speed_up
        gap = OPERATOR_GAP_MS * MILLISECOND / settings.speed_up
        self._fixed, self._token = gap * _operators(tables, shape), 0.0
        if link is not None:
            self._fixed += link.fixed * 1000 * MILLISECOND / settings.speed_up
            self._token = link.token * 1000 * MILLISECOND / settings.speed_up
        gpus = settings.tensor_parallel_size if shape is None else settings.gpus
        self._replicas = gpus // settings.tensor_parallel_size
        self._dense = _Curve.of(_table_of(tables, "dense"), shape, scale)
        self._outputs = _Curve.of(_table_of(tables, "per_sequence"), shape, scale)
        self._attention = _Grid(_table_of(tables, "attention"), scale * (1 if shape is None else shape.layers))
        self._skew = _Skew(_table_of(tables, "skew")) if "skew" in tables else None
        self.uneven = self._skew is not None
        self._experts = None
        if shape is not None and shape.moe_layers:
            self._experts = _Curve.of_experts(_table_of(tables, "moe"), shape, scale * shape.moe_layers, self._replicas)

    def prefill(self, tokens: int) -> float:
        return self.mixed(tokens, [(0, tokens)], 0, 0) if tokens else 0.0

    def mixed(self, tokens: int, chunks: Iterable[tuple[int, int]], kv: int, seqs: int, longest: int = 0) -> float:
        self.lookups += 1
        ranks = [(0, 0, 0)]  # prompt tokens, pairs, prompts
        if self._replicas == 1:
            pairs = prompts = 0
            for past, new in chunks:
                pairs += new * past + new * (new + 1) // 2
                prompts += 1
            ranks = [(tokens, pairs, prompts)]
        else:
            ranks = _spread_ranks(chunks, self._replicas)
        own = -(-seqs // self._replicas)
        timed = [self._rank(*rank, kv / seqs if seqs else 0.0, own, longest) for rank in ranks]
        covered = all(inside for _, inside in timed) and self._covers_all(tokens + seqs)
        self.extrapolated += not covered
        return max(time for time, _ in timed) + self._shared(tokens + seqs)

    def _rank(self, tokens: int, pairs: int, prompts: int, reads: float, seqs: int, longest: int) -> tuple[float, bool]:
        """Return what one rank of the attention takes for its own, and whether that was measured."""
        past_each = max(0.0, pairs / tokens - (tokens + 1) / 2) if tokens else 0.0
        point = (float(tokens), past_each, float(seqs), reads)
        attention, inside = self._attention.at(point)
        if self._skew is not None and longest > reads > 0:
            most, _ = self._attention.at((*point[:3], float(longest)))
            attention += max(0.0, most - attention) * self._skew.share(seqs, tokens, reads, longest)
        inside = inside and self._covers(tokens + seqs, prompts + seqs)
        return self._own(tokens + seqs, prompts + seqs) + attention, inside

    def decode(self, kv: int, seqs: int) -> float:
        return float(self._steps(np.array([kv], dtype=np.int64), seqs)[0]) if seqs else 0.0

    def run(self, kv: int, seqs: int, steps: int, longest: int = 0) -> DecodeSteps:
        step = np.arange(steps, dtype=np.int64)
        times = self._steps(kv + seqs * step, seqs)
        if self._skew is not None and longest * seqs > kv:
            own, on = -(-seqs // self._replicas), step.astype(np.float64)
            curve = self._attention.decoding(own)
            share = self._skew.share(own, 0, kv / seqs, longest)
            times += share * np.maximum(0.0, curve(longest + on) - curve(kv / seqs + on))
        return TabulatedSteps.of(times)

    def over(self, kv: npt.NDArray[np.int64], seqs: int) -> DecodeSteps:
        return TabulatedSteps.of(self._steps(kv, seqs))

    def _steps(self, kv: npt.NDArray[np.int64], seqs: int) -> Array:
        each, own = kv / seqs, -(-seqs // self._replicas)
        curve = self._attention.decoding(own)
        self.lookups += len(kv)
        if curve.measured and self._covers(own, own) and self._covers_all(seqs):
            self.extrapolated += int(np.count_nonzero(each > curve.last))
        else:
            self.extrapolated += len(kv)
        steps: Array = self._own(own, own) + self._shared(seqs) + curve(each)
        return steps

    def _covers(self, tokens: int, outputs: int) -> bool:
        return tokens <= self._dense.last and outputs <= self._outputs.last

    def _covers_all(self, tokens: int) -> bool:
        return self._experts is None or tokens <= self._experts.last

    def _own(self, tokens: int, outputs: int) -> float:
        """Return what a rank computes for its own tokens, but for attention."""
        return self._dense.at(tokens) + self._outputs.at(outputs)

    def _shared(self, tokens: int) -> float:
        """Return what all ranks do together for the tokens of all: experts and exchanges."""
        experts = 0.0 if self._experts is None else self._experts.at(tokens)
        return self._fixed + self._token * tokens + experts


def _spread_ranks(chunks: Iterable[tuple[int, int]], replicas: int) -> list[tuple[int, int, int]]:
    """Return (tokens, pairs, prompts) of each rank: the largest prompts first, each to the rank with the fewest."""
    ranks = [(0, 0, 0)] * replicas
    for past, new in sorted(chunks, key=lambda chunk: -chunk[1]):
        least = ranks.index(min(ranks))
        tokens, pairs, prompts = ranks[least]
        ranks[least] = (tokens + new, pairs + new * past + new * (new + 1) // 2, prompts + 1)
    return ranks


class _Curve:
    """A line through measured points, which goes on beyond the last two and is flat before the first."""

    def __init__(self, axis: Array, values: Array, measured: bool = True) -> None:
        self.last, self.measured = float(axis[-1]), measured
        self._axis, self._values = axis, values
        self._slope = max(0.0, float((values[-1] - values[-2]) / (axis[-1] - axis[-2]))) if len(axis) > 1 else 0.0
        self._known: dict[int, float] = {}

    @classmethod
    def of(cls, table: Mapping[str, Sequence[Any]], shape: ModelShape | None, scale: float) -> "_Curve":
        """Return the sum of all operators of a table, each as often as a pass of the model has it."""
        axis_name = next(name for name in table if name not in ("layer", "time_us"))
        names = np.asarray(table["layer"])
        at, time = _numbers_of(table[axis_name], axis_name), _numbers_of(table["time_us"], "time_us")
        # Up to where all operators were measured: beyond, one of them would stand still unnoticed.
        axis = np.unique(at[at <= min(at[names == name].max() for name in np.unique(names))])
        total = np.zeros(len(axis))
        for name in np.unique(names):
            mine = names == name
            order = np.argsort(at[mine])
            total += _times_per_pass(str(name), shape) * np.interp(axis, at[mine][order], time[mine][order])
        return cls(axis, total * scale)

    @classmethod
    def of_experts(
        cls, table: Mapping[str, Sequence[Any]], shape: ModelShape, scale: float, replicas: int = 1
    ) -> "_Curve":
        """Return a block of experts by the tokens of a pass, which touch as many as even choices would.

        With ``replicas`` a GPU has that share of the experts, and of the tokens' choices.
        """
        at = _numbers_of(table["tokens"], "tokens")
        touched = _numbers_of(table["activated_experts"], "activated_experts")
        rows, columns = np.unique(at), np.unique(touched)
        grid = np.full((len(rows), len(columns)), np.nan)
        places = np.searchsorted(rows, at), np.searchsorted(columns, touched)
        grid[places] = _numbers_of(table["time_us"], "time_us") * scale
        for along, points, beyond in ((1, columns, False), (0, rows, False), (1, columns, True), (0, rows, True)):
            grid = np.where(np.isnan(grid), _fill_grid(grid, points, along, beyond=beyond), grid)
        # Between two rows the number of experts bends: every small batch has a point of its own.
        axis = np.unique(np.append(rows * replicas, np.arange(rows[0], min(rows[-1] * replicas, 256.0) + 1)))
        touched_of = [experts_touched(shape.experts, shape.experts_per_token, int(tokens)) for tokens in axis]
        expected = np.array(touched_of) / replicas
        by_row = np.array([np.interp(expected, columns, line) for line in grid])
        return cls(axis, np.array([np.interp(tokens / replicas, rows, by_row[:, i]) for i, tokens in enumerate(axis)]))

    def __call__(self, at: Array) -> Array:
        values: Array = np.interp(at, self._axis, self._values) + np.maximum(0.0, at - self.last) * self._slope
        return values

    def at(self, value: int) -> float:
        """Return one value; it is kept, since passes of few sizes come again and again."""
        result = self._known.get(value)
        if result is None:
            result = self._known[value] = float(self(np.array([float(value)]))[0])
        return result


class _Skew:
    """The share of the way from all-average to all-longest by which attention of uneven sequences takes longer.

    Kernels split long sequences over idle multiprocessors while there are few; from some number of sequences on they
    don't, and a pass waits for the longest one, the more the fewer rounds of blocks there are. A profile shows that as
    (t_skew - t_mean) / (t_max - t_mean) by prompt tokens, sequences, their unevenness and the longest one.
    """

    _UNEVEN = np.array([0.0, 0.2, 0.4, 0.6, 0.8])
    """Of 1 - mean / longest."""
    _LONGEST = (1024.0, 4096.0)
    """Bounds of the groups by the longest sequence, those of LLMServingSim's own fit."""

    def __init__(self, table: Mapping[str, Sequence[Any]]) -> None:
        read = {name: _numbers_of(table[name], name) for name in COLUMNS["skew"]}
        self._seqs, self._tokens = np.unique(read["n"]), np.unique(read["pc"])
        uneven = np.rint((1.0 - read["kv_mean"] / np.maximum(read["kv_big"], 1.0)) * 5.0).astype(np.int64).clip(1, 4)
        shape = (len(self._tokens), len(self._LONGEST) + 1, len(self._seqs), len(self._UNEVEN))
        longer, most = np.zeros(shape), np.zeros(shape)
        places = (
            np.searchsorted(self._tokens, read["pc"]),
            np.searchsorted(self._LONGEST, read["kv_big"]),
            np.searchsorted(self._seqs, read["n"]),
            uneven,
        )
        np.add.at(longer, places, read["t_skew_us"] - read["t_mean_us"])
        np.add.at(most, places, read["t_max_us"] - read["t_mean_us"])
        # Sums, so that rows where both are alike, and noise is all that differs, count for little.
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(most > 0, np.clip(longer / most, 0.0, 1.0), np.nan)
        # What was not measured is as its nearest neighbours by unevenness, then by sequences and by prompt tokens.
        for axis, points in ((3, self._UNEVEN), (2, np.log2(self._seqs)), (0, self._tokens), (1, np.arange(3.0))):
            share = np.apply_along_axis(_level, axis, share, points)
        self._share: Array = np.nan_to_num(share)

    def share(self, seqs: int, tokens: int, mean: float, longest: int) -> float:
        """Return the share for so many sequences, of such lengths, beside so many prompt tokens."""
        rows = self._share[int(np.argmin(np.abs(self._tokens - tokens))), int(np.searchsorted(self._LONGEST, longest))]
        along = [float(np.interp(1.0 - mean / longest, self._UNEVEN, row)) for row in rows]
        return float(np.interp(np.log2(max(1, seqs)), np.log2(self._seqs), along))


class _Grid:
    """Attention by its four axes. Cells that were not measured are filled from their neighbours, one axis at a time."""

    def __init__(self, table: Mapping[str, Sequence[Any]], scale: float) -> None:
        names = COLUMNS["attention"]
        columns = [_numbers_of(table[name], name) for name in names[:4]]
        time = _numbers_of(table["time_us"], "time_us") * scale
        self._axes = [np.unique(np.append(column, 0.0)) for column in columns]
        self._points: list[list[float]] = [axis.tolist() for axis in self._axes]
        if any(len(axis) < 2 for axis in self._axes):
            raise ConfigError("attention.csv measures one of its axes at 0 only", hint="each needs another point")
        grid = np.full([len(axis) for axis in self._axes], np.nan)
        places = tuple(np.searchsorted(axis, column) for axis, column in zip(self._axes, columns, strict=True))
        grid[places] = time
        # Where no sequence decodes, what it would read makes no difference; the same for prompts.
        grid[:, :, 0, :] = grid[:, :, 0, :1]
        grid[0] = grid[0, :1]
        grid[0, :, 0, :] = 0.0
        for axis in (3, 2, 1, 0):
            inside = _fill_grid(grid, self._axes[axis], axis, beyond=False)
            grid = np.where(np.isnan(grid), inside, grid)
        self._measured = ~np.isnan(grid)
        for axis in (3, 1, 2, 0):
            grid = np.where(np.isnan(grid), _fill_grid(grid, self._axes[axis], axis, beyond=True), grid)
        if np.isnan(grid).any():
            raise ConfigError("attention.csv leaves cells that no line reaches", hint="profile a whole grid")
        self._grid = grid
        self._decoding: dict[int, _Curve] = {}

    def at(self, point: tuple[float, float, float, float]) -> tuple[float, bool]:
        """Return nanoseconds, by lines along each axis in turn, and whether that lies within what was measured.

        Cost: 16 cells, about 20 us.
        """
        places = [self._below(axis, value) for axis, value in enumerate(point)]
        around = tuple(slice(low, low + 2 if share else low + 1) for low, share in places)
        cells = self._grid[around]
        for _, share in places:
            cells = cells[0] * (1.0 - share) + cells[1] * share if share else cells[0]
        inside = all(share <= 1.0 for _, share in places) and bool(self._measured[around].all())
        return max(0.0, float(cells)), inside

    def decoding(self, seqs: int) -> _Curve:
        """Return the curve over the tokens that each of so many sequences reads, without prompts."""
        curve = self._decoding.get(seqs)
        if curve is None:
            low, share = self._below(2, float(seqs))
            rows = self._grid[0, 0, low : low + 2]
            values = rows[0] * (1.0 - share) + rows[1] * share
            _, measured = self.at((0.0, 0.0, float(seqs), self._points[3][-1]))
            curve = self._decoding[seqs] = _Curve(self._axes[3], values, measured)
        return curve

    def _below(self, axis: int, value: float) -> tuple[int, float]:
        points = self._points[axis]
        low = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
        return low, (value - points[low]) / (points[low + 1] - points[low])


def _times_per_pass(name: str, shape: ModelShape | None) -> int:
    """Return how often a pass has an operator."""
    if shape is None or name in ONCE:
        return 1
    if name in WITHOUT_EXPERTS:
        return shape.layers - shape.moe_layers
    return shape.layers * (2 if name in TWICE_PER_LAYER else 1)


def _operators(tables: Mapping[str, Any], shape: ModelShape | None) -> int:
    """Return how many operators a pass has, one after another; 0 where the tables have whole passes."""
    if shape is None:
        return 0
    named = {str(name) for table in ("dense", "per_sequence") for name in _table_of(tables, table)["layer"]}
    return sum(_times_per_pass(name, shape) for name in named) + shape.layers + shape.moe_layers


def _level(line: Array, points: Array) -> Array:
    """Return a line with what it lacks interpolated, and level beyond its ends; one that lacks all stays as it is."""
    known = ~np.isnan(line)
    return np.interp(points, points[known], line[known]) if known.any() else line


def _fill_grid(grid: Array, points: Array, axis: int, *, beyond: bool) -> Array:
    """Return the grid with each line along an axis interpolated, and where ``beyond`` also carried on at both ends."""
    lines = np.moveaxis(grid, axis, -1).copy()
    flat = lines.reshape(-1, len(points))
    for line in flat:
        known = ~np.isnan(line)
        count = int(np.count_nonzero(known))
        if count == len(line) or count == 0:
            continue
        x, y = points[known], line[known]
        if not beyond:
            line[:] = np.interp(points, x, y, left=np.nan, right=np.nan)
            continue
        slope = max(0.0, float((y[-1] - y[-2]) / (x[-1] - x[-2]))) if count > 1 else 0.0
        line[:] = np.interp(points, x, y) + np.maximum(0.0, points - x[-1]) * slope
    return np.moveaxis(flat.reshape(lines.shape), -1, axis)


def _table_of(tables: Mapping[str, Any], name: str) -> Mapping[str, Sequence[Any]]:
    table = tables.get(name)
    if table is None:
        raise ConfigError(f"the profile lacks {name}.csv", hint=f"it needs {', '.join(COLUMNS)}")
    absent = [column for column in COLUMNS[name] if column not in table]
    if absent:
        raise ConfigError(
            f"{name}.csv lacks the column {', '.join(absent)}", hint=f"it needs {', '.join(COLUMNS[name])}"
        )
    columns: Mapping[str, Sequence[Any]] = {column: table[column] for column in COLUMNS[name]}
    if len({len(column) for column in columns.values()}) != 1 or not len(columns[COLUMNS[name][-1]]):
        raise ConfigError(f"{name}.csv has no rows, or columns of different lengths")
    return columns


def _numbers_of(values: Sequence[Any], name: str) -> Array:
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except ValueError as error:
        raise ConfigError(f"the profile's column {name} holds something that is not a number: {error}") from error
    if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
        raise ConfigError(f"the profile's column {name} holds a number that is not finite or below 0")
    return numbers
