"""Does a fit find the constants that made the points, also where some points are wrong?"""

from dataclasses import replace

import pytest

from bench.roofline.roofline_fit import (
    NAMES,
    START,
    MeasuredPoint,
    PredictedPoint,
    fit,
    predicted,
    predicted_tpot,
)
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import RequestShape
from penstock_lab.engine.settings import Calibration
from penstock_lab.engine.timing.gpus import named
from penstock_lab.engine.timing.model_shape import shape_of
from tests.lab.engine.models import LLAMA_8B, LLAMA_70B, MIXTRAL_8X7B

TRUE = Calibration(
    bandwidth_efficiency=0.7,
    compute_efficiency=0.45,
    narrow_efficiency=0.75,
    expert_efficiency=0.3,
    expert_layer_overhead_ms=0.02,
    widening_efficiency=0.6,
    link_efficiency=0.3,
    link_latency_ms=0.02,
    layer_overhead_ms=0.03,
    pass_overhead_ms=1.2,
    sequence_overhead_ms=0.01,
)


def points() -> list[MeasuredPoint]:
    """Return points of all kinds, whose TPOT is what the true constants give."""
    found = []
    for config, widths in ((LLAMA_8B, (1, 2)), (LLAMA_70B, (4, 8)), (MIXTRAL_8X7B, (2, 4))):
        for gpu in ("h100", "b200"):
            for tensor in widths:
                for dtype in ("bf16", "fp4"):
                    for clients, isl, osl in ((1, 500, 500), (16, 1000, 100), (64, 4000, 200), (200, 300, 900)):
                        blank = MeasuredPoint(
                            shape=shape_of(config),
                            gpu=named(gpu),
                            tensor_parallel_size=tensor,
                            expert_parallel_size=1,
                            weight_dtype=dtype,
                            kv_cache_dtype=None,
                            request=RequestShape(isl, osl),
                            concurrency=clients,
                            prefill_first=clients == 64,
                            tpot=1.0,
                        )
                        found.append(with_tpot(blank, predicted_tpot(blank, TRUE)))
    return found


def with_tpot(point: MeasuredPoint, tpot: float) -> MeasuredPoint:
    return replace(point, tpot=tpot)


def test_constants_are_found_again() -> None:
    found = fit(points())
    for name in NAMES:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name


def test_what_the_points_do_not_show_stays_where_a_prior_has_it() -> None:
    """Dense models on one GPU say nothing of experts and links; with a prior those keep their usual values."""
    dense = [point for point in points() if not point.shape.experts and point.tensor_parallel_size == 1]
    alone, kept = fit(dense), fit(dense, prior=0.7)
    for name in ("expert_efficiency", "link_efficiency", "link_latency_ms", "expert_layer_overhead_ms"):
        assert getattr(kept, name) == pytest.approx(getattr(START, name), rel=1e-3), name
    off = sorted(abs(predicted_tpot(point, kept) / point.tpot - 1) for point in dense)
    assert off[len(off) // 2] < 0.1
    assert max(abs(predicted_tpot(point, alone) / point.tpot - 1) for point in dense) < 0.01


def test_what_a_request_takes_besides_is_not_taken_for_its_pass() -> None:
    """The TTFT of these points is their pass and 30 ms; a fit that knows of the 30 ms finds the same constants."""
    late = []
    for point in points():
        made = predicted(point, TRUE)
        late.append(replace(point, ttft=made.prompt + 0.03, beside=0.03))
    found = fit(late, START, [PredictedPoint(1.0, 1.0)] * len(late))
    blind = fit([replace(point, beside=0.0) for point in late], START, [PredictedPoint(1.0, 1.0)] * len(late))
    for name in NAMES:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
    assert blind.compute_efficiency < found.compute_efficiency


def test_a_few_wrong_points_do_not_bend_the_rest() -> None:
    bad = [with_tpot(point, point.tpot * (5 if i % 12 == 0 else 1)) for i, point in enumerate(points())]
    found = fit(bad)
    off = sorted(abs(predicted_tpot(point, found) / point.tpot - 1) for point in points())
    assert off[len(off) // 2] < 0.05 and off[-1] < 0.2


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ConfigError, match="10 measured points"):
        fit(points()[:10])


def test_a_cache_that_is_too_small_holds_fewer_sequences() -> None:
    point = points()[0]
    crowd, more = with_clients(point, 10_000), with_clients(point, 100_000)
    assert predicted_tpot(point, TRUE) < predicted_tpot(crowd, TRUE) < 2 * predicted_tpot(more, TRUE)
    assert predicted_tpot(crowd, TRUE) == predicted_tpot(more, TRUE)


def with_clients(point: MeasuredPoint, clients: int) -> MeasuredPoint:
    return replace(point, concurrency=clients)


def test_requests_that_end_together_wait_for_half_of_the_others_prompts() -> None:
    alone = predicted_tpot(with_clients(points()[1], 1), TRUE)
    mixed = predicted_tpot(replace(points()[1], prefill_first=False), TRUE)
    first = predicted_tpot(replace(points()[1], prefill_first=True), TRUE)
    assert alone < first < mixed
