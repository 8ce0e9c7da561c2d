"""Which measured points can the roofline be held to? Reads the CSV file of operating points.

Taken are aggregated points on up to 8 GPUs. The file does not say how many requests a disaggregated point decodes at
once, and how attention was split over more than 8 GPUs.
"""

import csv
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from models import CONFIGS

from penstock.engine.calibrate import Measured
from penstock.engine.gpus import GPUS
from penstock.engine.model_shape import Dtype, shape_of

GPUS_MAX = 8
SHAPES = {name: shape_of(config, name) for name, config in CONFIGS.items()}
WEIGHTS: dict[str, Dtype] = {"nvfp4": "fp4", "fp8": "fp8", "fp8_block": "fp8"}
_IN_ID = re.compile(r"_tp(\d+)(?:_\d+)?_ep(?:\d+|none)")


@dataclass(frozen=True, slots=True)
class Point:
    """A measured point, and whose: ``group`` is (engine, GPU, model, precision)."""

    group: tuple[str, str, str, str]
    measured: Measured
    fitted: bool
    """Whether it is of the half that constants are fitted on; decided by a hash of its id."""


def points_of(lines: Iterable[str]) -> tuple[list[Point], int]:
    """Return the points that can be used, and how many rows can't."""
    found, left_out = [], 0
    for row in csv.DictReader(lines):
        point = _point(row) if row["mode"] == "agg" else None
        if point is None:
            left_out += 1
        else:
            found.append(point)
    return found, left_out


def _point(row: dict[str, str]) -> Point | None:
    replicas = int(row["attention_dp_size"] or 1) or 1
    tensor = int(row["tp_size"])
    # Some rows give the product of all kinds of parallelism as tp_size; the GPUs then stand in the id.
    told = _IN_ID.search(row["id"])
    gpus = int(told.group(1)) if told else tensor * replicas
    if gpus > GPUS_MAX:
        return None
    experts = int(row["moe_ep_size"] or 1) or 1
    tensor = min(tensor, gpus)
    engine, gpu = row["backend"], row["system"].removesuffix("_sxm")
    name = next(name for name in CONFIGS if name in row["model_path"])
    quantised = row["gemm_quant_mode"]
    shape = SHAPES[name]
    return Point(
        group=(engine, gpu, name, "mxfp4" if name == "gpt-oss-120b" else quantised or "bf16"),
        measured=Measured(
            shape=shape,
            gpu=GPUS[gpu],
            tensor_parallel=tensor,
            expert_parallel=experts if shape.experts and experts <= gpus else 1,
            weight_dtype=None if name == "gpt-oss-120b" else WEIGHTS.get(quantised),
            kv_dtype="fp8" if engine == "trtllm" and quantised else None,
            isl=int(row["isl"]),
            osl=int(row["osl"]),
            concurrency=int(row["batch_size"]) * replicas,
            prefill_first=engine == "sglang",
            tpot=float(row["silicon_tpot_ms"]) / 1e3,
        ),
        fitted=hashlib.sha256(row["id"].encode()).digest()[0] % 2 == 0,
    )
