"""Do requests that are drawn from ServeGen's tables keep their rates and lengths?"""

import itertools
import math
import random
import statistics

import pytest

from penstock.kernel.errors import ConfigError
from penstock_lab.traffic.formats.servegen import (
    WINDOW,
    RateRows,
    ServegenClient,
    ServegenSpan,
    ServegenWindow,
    draw,
    make_client,
    rate_over_time,
    read_spans,
)
from penstock_lab.traffic.formats.trace_rows import BadRow
from penstock_lab.traffic.lengths import Empirical

LENGTHS = [ServegenSpan(0.0, Empirical([10, 20], [0.5, 0.5]), Empirical([3]))]


def client(
    *windows: tuple[float, float, str, float], name: str = "chunk-0", spans: list[ServegenSpan] = LENGTHS
) -> ServegenClient:
    return make_client(name, [ServegenWindow(*window) for window in windows], spans)


def test_rows_are_windows() -> None:
    lines = ["0,5.25,0.9,Gamma,1.17,0.16", b"600,0,0,,0,0\n", "1200,1.5,8.6,Weibull,0.375,0.39"]
    assert list(RateRows(lines)) == [
        ServegenWindow(0.0, 5.25, "Gamma", 1.17),
        ServegenWindow(600.0, 0.0, "", 1.0),
        ServegenWindow(1200.0, 1.5, "Weibull", 0.375),
    ]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("0,1,1,Gamma,1", "(whole row)"),
        ("x,1,1,Gamma,1,1", "start"),
        ("0,-1,1,Gamma,1,1", "rate"),
        ("0,nan,1,Gamma,1,1", "rate"),
        ("0,1,1,Normal,1,1", "family"),
        ("0,1,1,Gamma,0,1", "shape"),
        ("0,1,1,Weibull,0.04,1", "shape"),
        ("0,1,1,Gamma,inf,1", "shape"),
        ("0,1,1,Gamma,,1", "shape"),
    ],
)
def test_a_bad_window_is_named(row: str, field: str) -> None:
    with pytest.raises(BadRow, match=r"^a\.csv line 1, field ") as caught:
        list(RateRows([row], name="a.csv"))
    assert caught.value.field == field
    skipping = RateRows([row, "0,1,1,Gamma,1,1"], skip_bad=True)
    assert (len(list(skipping)), skipping.skipped) == (1, 1)


def test_spans_are_read_from_the_text_of_dicts() -> None:
    text = b"""{"21600": {"input_tokens": "{7: 0.25, 8: 0.75}", "output_tokens": "{0: 0.5, 2: 0.5}"},
               "0": {"input_tokens": "{1: 1.0}", "output_tokens": "{5: 1.0}"},
               "43200": {"input_tokens": "{}", "output_tokens": "{}"}}"""
    first, second = read_spans(text, "d.json")
    assert (first.start, first.prompt.values, first.answer.values) == (0.0, [1], [5])
    assert (second.start, second.prompt.values, second.prompt.weights) == (21600.0, [7, 8], [0.25, 0.75])
    assert second.answer.values == [2]  # nobody asks for no answer


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[]", r"^d\.json: Expected `object`"),
        (b'{"0": {"input_tokens": "{a: 1}", "output_tokens": "{}"}}', r"^d\.json: span 0, field input_tokens"),
        (b'{"0": {"input_tokens": "{}", "output_tokens": "{1: }"}}', r"^d\.json: span 0, field output_tokens"),
        (b'{"0": {"input_tokens": "{}"}}', r"^d\.json: span 0, field output_tokens"),
        (b'{"x": {"input_tokens": "{1: 1}", "output_tokens": "{1: 1}"}}', r"^d\.json: span x"),
    ],
)
def test_a_bad_histogram_is_named(text: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_spans(text, "d.json")


def test_time_without_a_window_has_no_requests() -> None:
    made = client((1200.0, 2.0, "Gamma", 1.0), (600.0, 1.0, "Gamma", 1.0), (3000.0, 4.0, "Gamma", 1.0))
    found = [made.rate.factor(at) for at in (0.0, 599.0, 600.0, 1200.0, 1800.0, 2999.0, 3000.0, 3600.0, 1e9)]
    assert found == [0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 4.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="chunk-0 has no window"):
        client()
    with pytest.raises(ConfigError, match="two windows that begin at 600 s"):
        client((600.0, 1.0, "Gamma", 1.0), (600.0, 2.0, "Gamma", 1.0))


@pytest.mark.parametrize(("family", "shape"), [("Gamma", 0.3), ("Gamma", 2.0), ("Weibull", 0.45), ("Weibull", 1.2)])
def test_every_window_has_its_rate_on_average(family: str, shape: float) -> None:
    """Over 300 seeds, within 4 standard errors; the windows of a slow bursty client are where a bias would show."""
    made = client((0.0, 0.02, family, shape), (600.0, 0.2, family, shape), (1200.0, 0.0, "", 1.0))
    counts: list[tuple[int, int]] = []
    for seed in range(300):
        times = [each.at for each in draw([made], random.Random(seed))]
        assert times == sorted(times)
        assert not times or times[-1] < 1200.0
        counts.append((sum(at < 600.0 for at in times), sum(at >= 600.0 for at in times)))
    for place, wanted in ((0, 12.0), (1, 120.0)):
        found = [count[place] for count in counts]
        error = statistics.pstdev(found) / math.sqrt(len(found))
        assert statistics.fmean(found) == pytest.approx(wanted, abs=4 * error)


@pytest.mark.parametrize(("family", "shape", "cv"), [("Gamma", 0.25, 2.0), ("Weibull", 0.5, math.sqrt(5.0))])
def test_gaps_are_as_bursty_as_the_fitted_family(family: str, shape: float, cv: float) -> None:
    made = client((0.0, 30.0, family, shape))
    times = [each.at for each in draw([made], random.Random(1))]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.1)


def test_clients_are_merged_each_with_its_own_lengths_and_stream() -> None:
    own = client((0.0, 1.0, "Gamma", 1.0), name="a", spans=[ServegenSpan(0.0, Empirical([7]), Empirical([8]))])
    other = client((0.0, 3.0, "Gamma", 1.0), name="b", spans=[])
    found = list(draw([own, other], random.Random(3)))
    assert [each.at for each in found] == sorted(each.at for each in found)
    assert {each.kind for each in found} == {"a", "b"}
    assert {(each.isl, each.osl) for each in found} == {(7, 8)}  # b has no lengths of its own
    assert found == list(draw([own, other], random.Random(3)))
    assert found != list(draw([own, other], random.Random(4)))
    alone = [each for each in found if each.kind == "a"]
    assert alone == list(draw([own], random.Random(3)))


def test_lengths_follow_the_spans_and_others_are_weighted_by_rate() -> None:
    spans = [ServegenSpan(600.0, Empirical([1]), Empirical([1])), ServegenSpan(1200.0, Empirical([2]), Empirical([2]))]
    made = client(
        (0.0, 1.0, "Gamma", 1.0), (600.0, 1.0, "Gamma", 1.0), (1200.0, 3.0, "Gamma", 1.0), name="a", spans=spans
    )
    assert {(each.at >= 1200.0, each.isl) for each in draw([made], random.Random(1))} == {(False, 1), (True, 2)}
    lengthless = client((0.0, 10.0, "Gamma", 1.0), name="b", spans=[])
    drawn = [each.isl for each in draw([made, lengthless], random.Random(2)) if each.kind == "b"]
    assert drawn.count(2) / len(drawn) == pytest.approx(0.75, abs=0.03)
    with pytest.raises(ConfigError, match="no client has lengths"):
        draw([lengthless], random.Random(0))


def test_a_part_is_drawn_and_scaled() -> None:
    made = client((0.0, 1.0, "Gamma", 1.0), (600.0, 5.0, "Gamma", 1.0))
    found = [each.at for each in draw([made], random.Random(1), start=600.0, end=900.0, factor=2.0)]
    assert len(found) == pytest.approx(3000, abs=300)
    assert 0.0 <= found[0] < 1.0
    assert 299.0 < found[-1] < 300.0


def test_rates_are_summed_up_over_the_clients() -> None:
    one, other = client((0.0, 1.0, "Gamma", 1.0)), client((0.0, 2.0, "Gamma", 1.0), (WINDOW, 4.0, "Gamma", 1.0))
    assert rate_over_time([one, other]) == [(0.0, 3.0), (600.0, 4.0), (1200.0, 0.0)]
