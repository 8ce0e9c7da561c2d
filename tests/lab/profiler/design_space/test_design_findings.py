"""Does the search have the orders that the published study reports, and notice where one is missing?"""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest

from penstock.kernel.values import RequestShape
from penstock_lab.engine.timing.gpus import GPUS
from penstock_lab.profiler.design_space.design_study import (
    GENERATION_HEAVY,
    MODELS,
    PREFILL_HEAVY,
    TRAFFIC,
    DesignCase,
    DesignSpace,
    cases,
    findings,
)
from penstock_lab.profiler.design_space.serving_points import EnginePoints, ParallelMapping


@pytest.fixture(scope="module")
def spaces() -> list[DesignSpace]:
    return [DesignSpace(case) for case in cases(GPUS["gb200"])]


def test_all_orders_of_the_published_study_are_there(spaces: list[DesignSpace]) -> None:
    found = findings(spaces)
    assert [each.name[:2].strip(":") for each in found] == ["6", "7", "8", "9", "10", "11", "11", "11"]
    assert [each for each in found if not each.holds] == []


@pytest.mark.parametrize("ttft", [1.0, 5.0])
def test_the_orders_of_models_and_traffic_do_not_hang_on_the_ttft(ttft: float) -> None:
    found = findings([DesignSpace(case) for case in cases(GPUS["b200"], ttft=ttft)])
    assert {each.name[:1]: each.holds for each in found if each.name[:1] in "78"} == {"7": True, "8": True}


def test_an_order_that_is_not_there_is_told(spaces: list[DesignSpace]) -> None:
    names = {PREFILL_HEAVY: GENERATION_HEAVY, GENERATION_HEAVY: PREFILL_HEAVY}
    swapped = [copy(space) for space in spaces]
    for space in swapped:
        space.case = replace(space.case, traffic=names.get(space.case.traffic, space.case.traffic))
    kept = {each.name.split(":")[0]: each.holds for each in findings(swapped)}
    assert not kept["8"]


def test_a_frontier_s_deployments_say_what_they_are(spaces: list[DesignSpace]) -> None:
    space = next(one for one in spaces if (one.case.model, one.case.traffic) == (MODELS[-1], PREFILL_HEAVY))
    number = space.at(space.disaggregated, 50.0)
    assert number is not None
    assert "EP" in space.layout_of(space.disaggregated, number)
    assert space.at(space.disaggregated, 1e6) is None
    egress, ingress = space.transfer_at(50.0) or (0.0, 0.0)
    ratio = space.ratio_at(50.0) or 0.0
    assert egress * ratio == pytest.approx(ingress)
    # What a GPU of context can send at most: its own prompts, as fast as it computes them.
    rate = (space.context.rate / space.context.gpus).max()
    most = rate * space.case.request.isl * space.served.shape.kv_bytes("fp8")
    assert 0 < egress <= most * (1 + 1e-9)


def test_transfer_needs_fall_with_longer_prompts_and_with_longer_answers() -> None:
    """Attention makes a long prompt's time grow faster than its KV; a long answer leaves more time for its KV."""
    spaces = {
        name: DesignSpace(DesignCase("Llama-3.1-405B", name, GPUS["gb200"], 64, 10.0))
        for name in ("16k/2k", "1k/1k", "1k/8k")
    }
    needs = {name: space.transfer_at(20.0) for name, space in spaces.items()}
    assert all(needs.values())
    assert needs["16k/2k"][0] < needs["1k/1k"][0]  # type: ignore[index]
    assert needs["1k/8k"][1] < needs["1k/1k"][1]  # type: ignore[index]


def test_a_chunked_pipeline_answers_sooner_than_whole_prompts_and_keeps_most_of_the_rate() -> None:
    served = DesignCase("Llama-3.1-405B", PREFILL_HEAVY, GPUS["gb200"], 64, 100.0).served()
    mappings = [ParallelMapping(8, stages=8)]
    context = EnginePoints(served, mappings, RequestShape(256 * 1024, 64)).context()
    whole, chunked = context.take(context.chunk == 0), context.take(context.chunk > 0)
    good = chunked.take(chunked.rate > 0.8 * whole.rate.max())
    assert good.ttft.min() < 0.4 * whole.ttft.min()


def test_two_cores_search_a_million_points_in_seconds(spaces: list[DesignSpace]) -> None:
    assert sum(space.size for space in spaces) > 1_000_000
    assert set(TRAFFIC) == {space.case.traffic for space in spaces}
    assert all(np.isfinite(space.disaggregated.density).all() for space in spaces)
