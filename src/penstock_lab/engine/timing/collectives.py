"""Collectives between the GPUs of an engine: what a link gives them, and what those of one pass cost.

A collective takes a latency and its bytes over the link's rate. On NVLink both are constants of the calibration. Cards
on PCIe have numbers of their own (`penstock_lab.engine.timing.gpus`): what reaches them there is far from the data
sheet's rate, and depends on whether one card may read another's memory. ``timing.link`` replaces these numbers, by hand
or from a measurement.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from penstock.kernel.errors import ConfigError
from penstock_lab.engine.settings import Calibration
from penstock_lab.engine.timing.gpus import Gpu
from penstock_lab.engine.timing.model_shape import ModelShape
from penstock_lab.engine.timing.weight_types import BYTES

_BY_HAND = re.compile(r"\s*([\d.]+)\s*GB/s\s*,\s*([\d.]+)\s*us\s*")
_HINT = "write it as '16GB/s,20us', or name a file with what all_reduce_perf of nccl-tests prints"


@dataclass(frozen=True, slots=True)
class Link:
    """What collectives reach: ``rate`` in bytes per second on the bus (nccl-tests' busbw), ``latency`` in seconds."""

    rate: float
    latency: float


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds that GPUs take to exchange what they have: per pass, and per token of the pass."""

    fixed: float
    token: float


def link_of(gpu: Gpu, gpus: int, calibration: Calibration) -> Link:
    """Return what collectives of so many GPUs reach by the table."""
    if gpu.collective_gb_per_s is not None and gpus <= gpu.link_gpus:
        return Link(gpu.collective_gb_per_s * 1e9, gpu.collective_us * 1e-6)
    return Link(gpu.link(gpus) * calibration.link_efficiency, calibration.link_latency_ms * 1e-3)


def link_by_hand(text: str) -> Link:
    """Return the link that a text such as ``16GB/s,20us`` describes.

    Raises:
        ConfigError: it describes none.
    """
    match = _BY_HAND.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"timing.link {text!r} is not a link", hint=_HINT)
    return Link(float(match[1]) * 1e9, float(match[2]) * 1e-6)


def link_measured(lines: Iterable[str], where: str) -> Link:
    """Return the link that nccl-tests' ``all_reduce_perf`` has measured: a line through time over bytes on the bus.

    Raises:
        ConfigError: there are fewer than two sizes, or a larger one took no longer.
    """
    points = []
    for line in lines:
        cells = line.split()
        if len(cells) < 8 or not cells[0].isdigit():
            continue
        try:
            size, micros, rate, bus = float(cells[0]), float(cells[5]), float(cells[6]), float(cells[7])
        except ValueError as error:
            raise ConfigError(
                f"timing.link {where}: {line.strip()!r} is not a row of nccl-tests", hint=_HINT
            ) from error
        if size and micros and rate:
            points.append((size * bus / rate, micros * 1e-6))
    if len({sent for sent, _ in points}) < 2:
        raise ConfigError(f"timing.link {where} has not two sizes that were measured", hint=_HINT)
    sent, seconds = np.array(points).T
    # Relative errors count, or the largest size alone would say it all.
    design = np.stack([np.ones_like(sent), sent], axis=1) / seconds[:, None]
    (latency, slope), *_ = np.linalg.lstsq(design, np.ones_like(sent), rcond=None)
    if slope <= 0:
        raise ConfigError(f"timing.link {where}: larger sizes took no longer", hint="measure from 1 KB to 128 MB")
    return Link(1.0 / float(slope), max(0.0, float(latency)))


def collectives(
    shape: ModelShape, within: Link, across: Link, tensor_parallel_size: int, replicas: int, *, gathered: bool = False
) -> Collectives:
    """Return what the exchanges of one pass cost.

    An all-reduce after each attention and MLP: 2(n-1)/n of the activations over ``within``;
    with ``replicas`` of the attention each expert layer sends every token to its experts and back over ``across``
    instead of its second all-reduce.

    Args:
        gathered: every token goes to every GPU (all-gather and reduce-scatter, vLLM's default), not only to its
            experts (all-to-all, once to each GPU however many of them it has).
    """
    gpus, width = tensor_parallel_size * replicas, shape.hidden * BYTES[shape.dtype]
    reduces = shape.sublayers - (shape.moe_layers if replicas > 1 else 0)
    reduces = reduces if tensor_parallel_size > 1 else 0
    exchanges = 2 * shape.moe_layers if replicas > 1 else 0
    reduced = 2.0 * (tensor_parallel_size - 1) / tensor_parallel_size * reduces * width / replicas
    reached = 1.0 if gathered else 1.0 - (1.0 - 1.0 / gpus) ** shape.experts_per_token
    exchanged = exchanges * reached * width * (gpus - 1) / gpus
    return Collectives(
        reduces * within.latency + exchanges * across.latency, reduced / within.rate + exchanged / across.rate
    )
