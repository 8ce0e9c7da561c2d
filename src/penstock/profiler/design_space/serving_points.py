"""Operating points of engines: of context engines, of generation engines and of co-located ones, as columns.

Every point is a steady state without a queue: as many requests begin as end. Times are those of the roofline; the
TTFT is that of the passes that a prompt is in, and what waits before them is left to simulation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engine.timing.decode_steps import Array
from penstock.kernel.values import RequestShape
from penstock.profiler.design_space.parallel_mappings import RANK_TOKENS, ParallelMapping, ServedModel
from penstock.profiler.design_space.roofline_grid import RooflineGrid

Chosen = npt.NDArray[Any]
"""Numbers of points, or a mask over them."""
SEQUENCES = np.unique(np.round(2.0 ** (np.arange(0, 45) / 4)))
"""Sequences that decode at once per rank of the attention: 1 to 2,048, four steps to a doubling."""
PROMPTS = 2.0 ** np.arange(0, 7)
"""Prompts of one pass per rank."""
CHUNKS = 2.0 ** (np.arange(12, 29) / 2)
"""Tokens of a prompt that one pass computes: 64 to 16,384, two steps to a doubling."""


@dataclass(frozen=True, slots=True)
class ServingPoints:
    """Points as columns, shape (points,).

    ``mapping``: number of the mapping; ``batch``: prompts of a pass, or sequences that decode, of the whole engine;
    ``chunk``: tokens of each prompt in a pass, 0 where prompts are computed whole; ``ttft``, ``tpot``: seconds, 0 of
    the phase that the engine does not have; ``rate``: requests per second of one engine of ``gpus`` GPUs.
    """

    mapping: Chosen
    batch: Array
    chunk: Array
    ttft: Array
    tpot: Array
    rate: Array
    gpus: Array

    def take(self, chosen: Chosen) -> "ServingPoints":
        """Return some of the points, by their numbers or by a mask."""
        return ServingPoints(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def and_also(self, other: "ServingPoints") -> "ServingPoints":
        """Return the points of both."""
        return ServingPoints(
            *(np.concatenate([getattr(self, field.name), getattr(other, field.name)]) for field in fields(self))
        )


class EnginePoints:
    """All points of one model for requests of one length.

    Args:
        mappings: those that are tried.
        request: tokens of every prompt and of every answer.
    """

    def __init__(self, served: ServedModel, mappings: Sequence[ParallelMapping], request: RequestShape[int]) -> None:
        self.mappings = mappings
        self._isl, self._osl = float(request.isl), float(request.osl)
        self._read = self._isl + self._osl / 2
        self._shape = served.shape
        self._rooflines = [mapping.roofline(served) for mapping in mappings]
        self._columns = np.array(
            [(each.replicas, each.stages, each.gpus, each.kv_tokens(served)) for each in mappings], dtype=np.float64
        )

    def context(self) -> ServingPoints:
        """Return points of engines that compute prompts: whole ones in batches, and in chunks through a pipeline."""
        replicas, stages, _, kv = self._axes(1)
        grid = RooflineGrid(self._shape, self._rooflines, 1)
        prompts = PROMPTS * replicas
        whole = grid.seconds(prompts=prompts, new=self._isl)
        fits = ((PROMPTS == 1) | (PROMPTS * self._isl <= RANK_TOKENS)) & (prompts * stages * self._isl <= kv)
        # One pass is in each stage: as many are under way as there are stages.
        points = self._points(fits, prompts, 0.0, whole, 0.0, prompts * stages / whole)
        parts, new = self._chunks()
        middle = grid.seconds(prompts=replicas, past=(self._isl - new) / 2, new=new) / stages
        last = grid.seconds(prompts=replicas, past=self._isl - new, new=new) / stages
        ttft = parts * middle + (stages - 1) * last
        fits = (stages > 1) & (parts > 1) & (replicas * stages * self._isl <= kv)
        return points.and_also(self._points(fits, replicas, new, ttft, 0.0, replicas / (parts * middle)))

    def generation(self) -> ServingPoints:
        """Return points of engines that only decode."""
        replicas, stages, _, kv = self._axes(1)
        micro = SEQUENCES * replicas
        step = RooflineGrid(self._shape, self._rooflines, 1).seconds(seqs=micro, kv=micro * self._read)
        batch = micro * stages
        return self._points(batch * self._read <= kv, batch, 0.0, 0.0, step, batch / (self._osl * step))

    def colocated(self) -> ServingPoints:
        """Return points of engines that compute whole prompts between the steps of decoding.

        A sequence waits for the prompts of the others: its mean TPOT is a step, and its share of their passes.
        """
        replicas, stages, _, kv = self._axes(2)
        grid = RooflineGrid(self._shape, self._rooflines, 2)
        micro, prompts = SEQUENCES[:, None] * replicas, PROMPTS * replicas
        step = grid.seconds(seqs=micro, kv=micro * self._read)
        whole = grid.seconds(prompts=prompts, new=self._isl)
        batch = micro * stages
        tpot = step + batch / (self._osl * prompts * stages) * whole
        fits = (PROMPTS == 1) | (PROMPTS * self._isl <= RANK_TOKENS)
        fits = fits & (batch * self._read + prompts * self._isl <= kv) & (prompts <= batch)
        return self._points(fits, batch, 0.0, step + whole, tpot, batch / (self._osl * tpot))

    def piggybacked(self) -> ServingPoints:
        """Return points of engines whose passes have a chunk of a prompt beside the sequences that decode."""
        replicas, stages, _, kv = self._axes(2)
        grid = RooflineGrid(self._shape, self._rooflines, 2)
        micro = SEQUENCES[:, None] * replicas
        parts, new = self._chunks()
        read = micro * self._read
        step = grid.seconds(seqs=micro, kv=read)
        mixed = grid.seconds(seqs=micro, kv=read, prompts=replicas, past=(self._isl - new) / 2, new=new)
        # Of a sequence's steps so many have a chunk beside them; more than all of them can't.
        share = micro * parts / (self._osl * replicas)
        tpot = step + share * (mixed - step)
        batch = micro * stages
        ttft = (parts + stages - 1) * mixed / stages
        fits = (share <= 1.0) & (batch * self._read + replicas * self._isl <= kv)
        return self._points(fits, batch, new, ttft, tpot, batch / (self._osl * tpot))

    def _axes(self, axes: int) -> tuple[Array, Array, Array, Array]:
        """Return the mappings' replicas, stages, GPUs and KV tokens, with as many axes after the first."""
        first, second, third, fourth = (column.reshape(-1, *[1] * axes) for column in self._columns.T)
        return first, second, third, fourth

    def _chunks(self) -> tuple[Array, Array]:
        """Return in how many parts a prompt is cut, and the tokens of each."""
        parts = np.unique(np.ceil(self._isl / CHUNKS))
        return parts, self._isl / parts

    def _points(self, fits: Chosen, *columns: Array | float) -> ServingPoints:
        """Return the points that fit; ``columns``: batch, chunk, ttft, tpot, rate."""
        axes = self._axes(max(np.ndim(column) for column in columns) - 1)
        number = np.arange(len(self.mappings)).reshape(axes[2].shape)
        fits, number, *rest = np.broadcast_arrays(fits, number, *columns, axes[2])
        batch, chunk, ttft, tpot, rate, gpus = (each[fits] for each in rest)
        return ServingPoints(number[fits], batch, chunk, ttft, tpot, rate, gpus)
