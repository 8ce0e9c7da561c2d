"""Does the roofline on arrays give what the scalar one gives, for every kind of model, mapping and pass?"""

import itertools

import numpy as np
import pytest

from penstock.kernel.machine import SECOND
from penstock_lab.engine.settings import Calibration
from penstock_lab.engine.timing.gpus import GPUS
from penstock_lab.engine.timing.known_models import model_named
from penstock_lab.engine.timing.model_shape import shape_of
from penstock_lab.engine.timing.roofline import Roofline, RooflineTiming, work_of
from penstock_lab.profiler.design_space.serving_points import ParallelMapping, RooflineGrid, ServedModel

DENSE = (ParallelMapping(1), ParallelMapping(4), ParallelMapping(8, stages=4))
EXPERTS = (ParallelMapping(8), ParallelMapping(1, 8), ParallelMapping(2, 8, 2))
CASES = [
    ("Llama-3.1-70B", DENSE),
    ("DeepSeek-R1", EXPERTS),
    ("DeepSeek-V3.2", EXPERTS),
    ("gpt-oss-120b", EXPERTS),
    ("gemma-2-27b", DENSE[:2]),
]


@pytest.mark.parametrize(("model", "mappings"), CASES, ids=[model for model, _ in CASES])
def test_arrays_give_what_the_scalar_roofline_gives(model: str, mappings: tuple[ParallelMapping, ...]) -> None:
    served = ServedModel(shape_of(model_named(model)), GPUS["gb200"], "fp4", "fp8")
    rooflines = [mapping.roofline(served) for mapping in mappings]
    seqs, prompts, past, new = np.array(
        list(itertools.product((0, 1, 24, 500), (0, 1, 3, 16), (0, 700, 9000), (1, 64, 5000))), dtype=np.float64
    ).T
    kv = seqs * 3000
    grid = RooflineGrid(served.shape, rooflines, 1).seconds(seqs=seqs, kv=kv, prompts=prompts, past=past, new=new)
    for row, roofline in zip(grid, rooflines, strict=True):
        for got, *each in zip(row, seqs, prompts, past, new, strict=True):
            count, together, before, tokens = (int(value) for value in each)
            if count + together == 0:
                continue
            chunks = [(before, tokens)] * together
            work = work_of(chunks, count * 3000, count, served.shape.reads, roofline.replicas)
            assert got == pytest.approx(roofline.seconds(work), rel=1e-9)


def test_arrays_give_what_the_engine_s_timing_gives() -> None:
    mapping = ParallelMapping(4)
    served = ServedModel(shape_of(model_named("Llama-3.1-8B")), GPUS["h100"], "bf16", "bf16")
    timing = RooflineTiming(mapping.roofline(served))
    grid = RooflineGrid(served.shape, [mapping.roofline(served)], 1)
    decode = grid.seconds(seqs=np.array([1.0, 64.0]), kv=np.array([900.0, 200_000.0]))
    assert decode[0] * SECOND == pytest.approx([timing.decode(900, 1), timing.decode(200_000, 64)])
    prompt = grid.seconds(prompts=np.ones(1), new=np.array([4096.0]))
    assert prompt[0, 0] * SECOND == pytest.approx(timing.prefill(4096))


def test_a_pass_takes_longer_through_a_pipeline_by_the_way_between_its_stages() -> None:
    shape, gpu = shape_of(model_named("Llama-3.1-70B")), GPUS["h100"]
    whole = Roofline(shape, gpu, Calibration(), tensor_parallel_size=2)
    split = Roofline(shape, gpu, Calibration(), tensor_parallel_size=2, pipeline_parallel_size=8)
    work = work_of([(0, 4096)], 0, 0, None)
    assert (whole.gpus, split.gpus) == (2, 16)
    assert whole.seconds(work) < split.seconds(work) < 1.1 * whole.seconds(work)


def test_later_parts_of_a_prompt_expand_a_latent_cache_again_and_no_other_one() -> None:
    for model, again in (("DeepSeek-R1", True), ("Llama-3.1-70B", False)):
        roofline = Roofline(shape_of(model_named(model)), GPUS["b200"], Calibration(), tensor_parallel_size=8)
        assert (roofline.costs.past > 0.0) is again
    # DeepSeek's 512 numbers become K and V of 128 + 128 for each of 128 heads.
    assert shape_of(model_named("DeepSeek-R1")).past_flops == 2 * 128 * 512 * 256
