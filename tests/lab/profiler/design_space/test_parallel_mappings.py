"""Are mappings those that a link domain, a model's heads and experts, and the memory of the GPUs allow?"""

import msgspec
import pytest

from penstock_lab.engine.kv_capacity import kv_blocks_of, reserved_of
from penstock_lab.engine.timing.gpus import GPUS
from penstock_lab.engine.timing.known_models import model_named
from penstock_lab.engine.timing.model_shape import shape_of
from penstock_lab.profiler.design_space.serving_points import (
    GPUS_MAX,
    RANK_SEQS,
    RANK_TOKENS,
    ParallelMapping,
    ServedModel,
    mappings_of,
)


def served(model: str, domain: int = 8) -> ServedModel:
    gpu = msgspec.structs.replace(GPUS["gb200"], link_gpus=domain)
    return ServedModel(shape_of(model_named(model)), gpu, "fp4", "fp8")


@pytest.mark.parametrize("mapping", [ParallelMapping(1, 8), ParallelMapping(8), ParallelMapping(2, 4)], ids=str)
def test_the_cache_is_as_large_as_the_engine_s(mapping: ParallelMapping) -> None:
    model = served("DeepSeek-R1")
    blocks = kv_blocks_of(
        model.shape,
        model.gpu,
        block_size=1,
        tensor_parallel_size=mapping.tensor,
        expert_parallel_size=mapping.experts,
        weight_dtype=model.weight_dtype,
        kv_cache_dtype=model.kv_cache_dtype,
        reserved=reserved_of(model.shape, model.gpu, RANK_TOKENS, RANK_SEQS, mapping.tensor),
    )
    assert int(mapping.kv_tokens(model)) == blocks


def test_all_mappings_fit_their_domain_and_memory() -> None:
    for domain in (8, 64):
        model = served("DeepSeek-R1", domain)
        mappings = list(mappings_of(model, 20_000))
        assert len(set(mappings)) == len(mappings)
        for mapping in mappings:
            assert mapping.tensor * mapping.replicas <= domain
            assert mapping.gpus <= GPUS_MAX
            assert mapping.kv_tokens(model) >= 20_000 * mapping.replicas
            mapping.roofline(model)  # raises where the GPUs can't share the model
    assert ParallelMapping(1) not in mappings, "its weights take more than one GPU has"
    assert ParallelMapping(1, stages=4) in mappings


def test_a_dense_model_has_no_ranks_of_attention() -> None:
    assert {mapping.replicas for mapping in mappings_of(served("Llama-3.1-70B", 64), 10_000)} == {1}
