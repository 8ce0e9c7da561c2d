"""Which measured points can the roofline be held to? Reads the CSV file of operating points.

Taken are aggregated points on up to 8 GPUs. The file does not say how many requests a disaggregated point decodes at
once, and how attention was split over more than 8 GPUs.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from roofline_fit import MeasuredPoint

from penstock.kernel.values import RequestShape
from penstock_lab.engine.timing.gpus import GPUS
from penstock_lab.engine.timing.known_models import known_model
from penstock_lab.engine.timing.model_shape import ModelShape, shape_of
from penstock_lab.engine.timing.roofline import REQUEST_OVERHEAD
from penstock_lab.engine.timing.weight_types import Dtype

GPUS_MAX = 8
WEIGHTS: dict[str, Dtype] = {"nvfp4": "fp4", "fp8": "fp8", "fp8_block": "fp8"}
_IN_ID = re.compile(r"_tp(\d+)(?:_\d+)?_ep(?:\d+|none)")


@dataclass(frozen=True, slots=True)
class Point:
    """A measured point, and whose: ``group`` is (engine, GPU, model, precision).

    ``generated``: aiconfigurator's own run, of an engine that its rules configured; the others are InferenceMAX's.
    """

    group: tuple[str, str, str, str]
    measured: MeasuredPoint
    generated: bool = False

    @property
    def model(self) -> str:
        return self.group[2]

    def with_beside(self, beside: Mapping[str, float]) -> "Point":
        """Return the point under such costs of a request, by engine; one that has none of them takes vLLM's."""
        seconds = beside.get(self.group[0], beside["vllm"])
        return replace(self, measured=replace(self.measured, beside=seconds))


def points_of(lines: Iterable[str]) -> tuple[list[Point], Counter[str]]:
    """Return the points that can be used, and how many rows can't, by the reason."""
    found: list[Point] = []
    left_out: Counter[str] = Counter()
    for row in csv.DictReader(lines):
        point = _point(row) if row["mode"] == "agg" else "disaggregated"
        if isinstance(point, str):
            left_out[point] += 1
        else:
            found.append(point)
    return found, left_out


def weights_of(quantised: str) -> Dtype:
    """Return the data type of weights by the file's name for it."""
    return WEIGHTS.get(quantised, "bf16")


@cache
def shape_named(path: str) -> tuple[str, ModelShape] | None:
    """Return the model of a path without the data type of its weights, and its shape; None where it is not known."""
    name = re.sub(r"(?i)-(fp8|nvfp4|fp4|instruct|dynamic)(?=-|$)", "", path.rsplit("/", 1)[-1])
    config = known_model(name)
    return None if config is None else (name, shape_of(config, name))


def _point(row: dict[str, str]) -> Point | str:
    replicas = int(row["attention_dp_size"] or 1) or 1
    tensor = int(row["tp_size"])
    # Some rows give the product of all kinds of parallelism as tp_size; the GPUs then stand in the id.
    told = _IN_ID.search(row["id"])
    gpus = int(told.group(1)) if told else tensor * replicas
    if gpus > GPUS_MAX:
        return f"over {GPUS_MAX} GPUs"
    experts = int(row["moe_ep_size"] or 1) or 1
    tensor = min(tensor, gpus)
    engine, gpu = row["backend"], row["system"].removesuffix("_sxm")
    known = shape_named(row["model_path"])
    if known is None:
        return f"{row['model_path']}: no shape is known"
    if gpu not in GPUS:
        return f"{gpu}: no such GPU"
    name, shape = known
    quantised = row["gemm_quant_mode"]
    own_dtype = shape.expert_dtype == "mxfp4"
    return Point(
        group=(engine, gpu, name, "mxfp4" if own_dtype else quantised or "bf16"),
        measured=MeasuredPoint(
            shape=shape,
            gpu=GPUS[gpu],
            tensor_parallel_size=tensor,
            expert_parallel_size=experts if shape.experts and experts <= gpus else 1,
            weight_dtype=None if own_dtype else weights_of(quantised),
            kv_cache_dtype="fp8" if engine == "trtllm" and quantised else None,
            request=RequestShape(int(row["isl"]), int(row["osl"])),
            concurrency=int(row["batch_size"]) * replicas,
            prefill_first=engine == "sglang",
            tpot=float(row["silicon_tpot_ms"]) / 1e3,
            ttft=float(row["silicon_ttft_ms"]) / 1e3,
            beside=REQUEST_OVERHEAD[engine],
        ),
        generated="gap-analysis" in row["silicon_data_source"],
    )
