"""Are durations what the formulas say, alone and summed over a run, and do they never fall as load grows?"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.errors import ConfigError
from penstock_lab.engine.settings import TimingSettings
from penstock_lab.engine.timing.timing_model import TimingModel, timing_of
from tests.lab.engine.models import LLAMA_8B, SLOW, TINY, profile

CAPACITY = 64 * 1000
TABLE = {
    "prefill_isl": [100.0, 1000.0, 8000.0],
    "prefill_ttft_ms": [10.0, 9.0, 200.0],
    "decode_active_kv_tokens": [1000.0, 30_000.0, 60_000.0],
    "decode_context_length": [100.0, 4000.0],
    "decode_itl": [[5.0, 6.0], [7.0, 6.5], [20.0, 30.0]],
}
KINDS = {
    "level": TimingSettings(prefill=(0.0, 0.02, 5.0), decode=(0.0, 0.0, 10.0)),
    "polynomial": TimingSettings(),
    "low": TimingSettings(decode=(0.0, 54.01, 0.2)),
    "table": TimingSettings(kind="table", profile="given"),
    "fast": TimingSettings(speed_up=8.0),
    "roofline": TimingSettings(kind="roofline", model="given", gpu="h100"),
    "windowed": TimingSettings(kind="roofline", model="given", gpu="given", tensor_parallel_size=2, speed_up=3.0),
    "operators": TimingSettings(kind="operators", model="given", profile="given"),
    "operators over two": TimingSettings(
        kind="operators", model="given", profile="given", gpu="h100", tensor_parallel_size=2
    ),
}
FILES = {
    "roofline": {"model": LLAMA_8B},
    "windowed": {"model": TINY, "gpu": SLOW},
    "operators": profile(),
    "operators over two": profile(),
}


def timing(kind: str) -> TimingModel:
    return timing_of(KINDS[kind], CAPACITY, FILES.get(kind, TABLE))


def test_the_polynomial_is_the_published_one() -> None:
    model = timing("polynomial")
    assert model.prefill(0) == 0.0
    assert model.prefill(4000) == pytest.approx(1e6 * (4.209989e-07 * 16e6 + 1.518344e-02 * 4000 + 16.50142))
    assert model.decode(CAPACITY // 2, 9) == pytest.approx(1e6 * (-25.74 / 4 + 54.01 / 2 + 5.74))
    assert model.decode(9 * CAPACITY, 9) == model.decode(CAPACITY, 9)
    assert timing("fast").prefill(4000) == pytest.approx(model.prefill(4000) / 8)
    assert timing("low").decode(0, 1) == 1e6


@pytest.mark.parametrize("kind", KINDS)
@given(kv=st.integers(1, 2 * CAPACITY), seqs=st.integers(1, 300), steps=st.integers(1, 400), data=st.data())
def test_a_run_is_the_sum_of_its_steps(kind: str, kv: int, seqs: int, steps: int, data: st.DataObject) -> None:
    model = timing(kind)
    run = model.run(kv, seqs, steps)
    ends = np.cumsum([model.decode(kv + i * seqs, seqs) for i in range(steps)])
    count = data.draw(st.integers(0, steps))
    assert run.after(count) == pytest.approx(ends[count - 1] if count else 0.0, abs=2.0, rel=1e-12)
    duration = data.draw(st.integers(0, int(ends[-1] * 1.2)))
    within = run.within(duration)
    assert 0 <= within <= steps
    assert run.after(within) <= duration
    assert within == steps or run.after(within + 1) > duration


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 2 * CAPACITY), st.integers(1, CAPACITY))
def test_more_work_never_takes_less(kind: str, tokens: int, more: int, kv: int, more_kv: int) -> None:
    model = timing(kind)
    assert model.prefill(tokens) <= model.prefill(tokens + more) * (1 + 1e-12)
    assert model.decode(kv, 8) <= model.decode(kv + more_kv, 8) * (1 + 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 3000)), max_size=4),
    kv=st.integers(1, CAPACITY),
    seqs=st.integers(0, 64),
    past=st.integers(0, 2000),
)
def test_a_pass_takes_at_least_what_its_parts_take(
    kind: str, chunks: list[tuple[int, int]], kv: int, seqs: int, past: int
) -> None:
    model = timing(kind)
    tokens, kv = sum(new for _, new in chunks), kv if seqs else 0
    mixed = model.mixed(tokens, iter(chunks), kv, seqs) * (1 + 1e-9)
    if kind.startswith("operators"):  # measured attention need not rise along both axes: without it
        assert mixed >= 0.0
        return
    assert mixed >= model.decode(kv, seqs)
    assert not chunks or mixed >= model.mixed(tokens, iter(chunks), 0, 0)
    deeper = [(before + past, new) for before, new in chunks]
    assert model.mixed(tokens, iter(deeper), kv, seqs) * (1 + 1e-9) >= model.mixed(tokens, iter(chunks), kv, seqs)


def test_models_that_know_no_mixed_pass_add_its_parts_exactly() -> None:
    for kind in ("level", "polynomial", "table"):
        model = timing(kind)
        assert model.mixed(700, iter([(5, 700)]), 9000, 9) == model.prefill(700) + model.decode(9000, 9)
        assert model.mixed(700, iter([(5, 700)]), 0, 0) == model.prefill(700)


def test_what_the_table_does_not_cover_is_counted() -> None:
    model = timing("table")
    assert model.prefill(1000) == pytest.approx(10e6)  # 9 ms would be faster than the shorter prompt
    assert (model.lookups, model.extrapolated) == (1, 0)
    assert model.prefill(15_000) == pytest.approx(390e6)
    model.run(59_990, 100, 20)
    assert (model.lookups, model.extrapolated) == (22, 20)
    assert model.decode(30_000, 10) == pytest.approx(1e6 * (7.0 * (1000 / 3900) + 7.0 * (2900 / 3900)))


@pytest.mark.parametrize(
    "change",
    [
        {"prefill_isl": [1.0]},
        {"prefill_isl": [5.0, 4.0, 3.0]},
        {"prefill_ttft_ms": [1.0]},
        {"decode_itl": [[1.0, 2.0]]},
        {"decode_itl": [[1.0, 2.0], [1.0, float("nan")], [1.0, 2.0]]},
    ],
)
def test_a_malformed_table_is_refused(change: dict) -> None:
    with pytest.raises(ConfigError):
        timing_of(KINDS["table"], CAPACITY, {**TABLE, **change})


def test_a_table_that_is_absent_or_lacks_an_array_is_refused() -> None:
    with pytest.raises(ConfigError):
        timing_of(KINDS["table"], CAPACITY, None)
    with pytest.raises(ConfigError, match="decode_itl"):
        timing_of(KINDS["table"], CAPACITY, {key: value for key, value in TABLE.items() if key != "decode_itl"})


def test_a_polynomial_that_falls_is_refused() -> None:
    with pytest.raises(ConfigError, match="polynomial falls"):
        timing_of(TimingSettings(decode=(-25.74, 50.0, 5.74)), CAPACITY)
