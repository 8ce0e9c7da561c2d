"""Does the disaggregation bench run what it says, judge it rightly, and tabulate what came out? On tiny workloads."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.config.reading.load import load
from penstock_lab.traffic.formats.mooncake import MooncakeTrace

ROOT = Path(__file__).resolve().parents[3]
BENCH = ROOT / "bench" / "disaggregation"
NAMES = ("plan", "workloads", "cell", "sweep", "parity", "live", "table", "run")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The bench's modules, which are imported as its script imports them."""
    monkeypatch.syspath_prepend(str(BENCH))
    import importlib

    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name, None)


def measured(bench: dict[str, ModuleType], layout: Any, rate: float = 16.0, work: str = "long prompts") -> Any:
    found = next(one for one in bench["plan"].WORKS if one.name == work)
    return bench["cell"].measure(bench["cell"].Cell(found, layout, rate, 1), None, 120)


def test_every_layout_has_the_same_number_of_workers(bench: dict[str, ModuleType]) -> None:
    plan = bench["plan"]
    assert {sum(layout.workers.values()) for layout in plan.LAYOUTS} == {plan.WORKERS}
    assert [layout.name for layout in plan.SPLITS] == ["1P7D", "2P6D", "3P5D", "4P4D", "5P3D", "6P2D", "7P1D"]
    assert {layout.family for layout in plan.LAYOUTS} == {"aggregated", "split", "mix"}
    assert len({layout.name for layout in plan.LAYOUTS}) == len(plan.LAYOUTS)


def test_a_looser_pair_keeps_no_fewer_requests_and_the_same_seed_gives_the_same(bench: dict[str, ModuleType]) -> None:
    work = bench["plan"].WORKS[0]
    found = measured(bench, bench["plan"].MIXES[0])
    assert found == measured(bench, bench["plan"].MIXES[0])
    for one, share in zip(work.pairs, found.shares, strict=True):
        for other, more in zip(work.pairs, found.shares, strict=True):
            if other[0] >= one[0] and other[1] >= one[1]:
                assert more >= share


def test_a_split_decodes_undisturbed_and_all_workers_together_prefill_sooner(bench: dict[str, ModuleType]) -> None:
    plan = bench["plan"]
    whole = measured(bench, plan.AGGREGATED[1])
    split = measured(bench, plan.SPLITS[3])
    assert split.itl_mean < whole.itl_mean
    assert whole.ttft_mean < split.ttft_mean
    assert split.handed == split.ok and whole.handed == 0


def test_a_mix_hands_some_prompts_off_and_keeps_others(bench: dict[str, ModuleType]) -> None:
    found = measured(bench, bench["plan"].MIXES[1])
    assert found.handed and found.local
    assert found.handed + found.local == found.ok


def test_a_slow_link_makes_the_first_token_later(bench: dict[str, ModuleType]) -> None:
    split = bench["plan"].SPLITS[3]
    off, *others = [split, *bench["sweep"].variants(split, bench["plan"].WORKS[0])]
    slow = next(one for one in others if one.link < 1)
    assert measured(bench, slow).ttft_mean > measured(bench, off).ttft_mean


def test_a_layout_that_is_overloaded_is_not_run_under_more_load(bench: dict[str, ModuleType]) -> None:
    plan, sweep = bench["plan"], bench["sweep"]
    work = plan.WORKS[0]
    layouts = (plan.SPLITS[0], plan.AGGREGATED[0])
    climbs = [sweep.Climb("sweep", work, layout, 1, (12.0, 48.0, 96.0), None, 300) for layout in layouts]
    rows = [row for found in sweep.run(climbs, processes=1) for row in found]
    assert {sweep.key_of(row) for row in rows} == {climb.key for climb in climbs}, "what is done is known again"
    ran = {name: [row["rate"] for row in rows if row["layout"] == name] for name in ("1P7D", "chunk 512")}
    assert len(ran["1P7D"]) < len(ran["chunk 512"])
    assert bench["table"].share_of(rows, "1P7D", 11, 96.0) == 0.0
    text = bench["run"].tables(rows)
    assert "**Long prompts, load held**" in text
    assert text.count("| 3, 30 |") == 2, "one line in the table of loads, one in that of shares"


def rows_of(shares: dict[str, tuple[float, ...]], rates: tuple[float, ...], pairs: int) -> list[dict[str, Any]]:
    """Rows of one seed: layout -> its share at each rate, the same by every pair."""
    family = {"chunk 512": "aggregated", "4P4D": "split", "2P2D4A": "mix"}
    return [
        {"layout": name, "family": family[name], "rate": rate, "seed": 1, "shares": [share] * pairs}
        for name, found in shares.items()
        for rate, share in zip(rates, found, strict=False)
    ]


def test_the_load_that_is_held_lies_on_a_line_between_two_that_were_run(bench: dict[str, ModuleType]) -> None:
    load = bench["table"].load
    assert load([(4, 1.0), (8, 0.8)]) == pytest.approx(6.0)
    assert load([(4, 1.0), (8, 0.95)]) == 8
    assert load([(4, 0.85), (8, 0.95)]) == 0.0


def test_the_table_names_the_best_layout_of_each_family_and_who_holds_most(bench: dict[str, ModuleType]) -> None:
    work = bench["plan"].WORKS[0]
    shares = {"chunk 512": (1.0, 0.8, 0.5, 0.2), "4P4D": (1.0, 1.0, 1.0, 0.9), "2P2D4A": (0.5,)}
    rows = rows_of(shares, work.rates, len(work.pairs))
    line = bench["table"].held(rows, work).splitlines()[2]
    assert line == "| 0.5, 8 | 10/s (chunk 512) | 24/s (4P4D) | - | split |"
    assert "| 100% / **100%** / 50% |" in bench["table"].shares(rows, work).replace(
        "**100%** / **100%**", "100% / **100%**"
    )
    assert bench["table"].winner({"a": (10.0, ""), "b": (9.7, ""), "c": (5.0, "")}) == "a, b"
    assert bench["table"].winner({"a": (0.0, ""), "b": (0.0, "")}) == "none"


def test_both_sides_time_to_first_token_is_taken_apart_by_request(bench: dict[str, ModuleType]) -> None:
    mine = [{"arrival": 1.0, "isl": 10, "osl": 2, "ttft": 0.5, "legs": [{"last": 1.4}]}]
    other = [
        {"arrival_time_ms": 900.0, "input_length": 10, "output_length": 2, "source_held_ms": 0.0, "ttft_ms": 0.0},
        {"arrival_time_ms": 1000.0, "input_length": 10, "output_length": 2, "source_held_ms": 1600.0, "ttft_ms": 650.0},
    ]
    found = bench["parity"].traced(mine, other)
    assert found["ours"]["prefill"] == pytest.approx(0.4) and found["ours"]["after"] == pytest.approx(0.1)
    assert found["peer"]["prefill"] == pytest.approx(0.6) and found["peer"]["after"] == pytest.approx(0.05)
    assert found["ours"]["equal"] == 0


def test_the_live_config_is_valid_and_runs_the_simulated_layout(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    live = bench["live"]
    for layout in live.LAYOUTS:
        path = tmp_path / "cluster.yaml"
        path.write_text(live.config(layout, tmp_path))
        pools = load(str(path), (), {}).settings.models["sim"].pools
        assert {pool.role: pool.replicas for pool in pools.values()} == dict(layout.workers)
    traffic = bench["workloads"].requests_of(live.WORK, 8.0, 1, None, 5)
    live.write(tmp_path / "trace.jsonl", traffic)
    with (tmp_path / "trace.jsonl").open("rb") as lines:
        again = list(MooncakeTrace(lines))
    assert [(one.isl, one.osl, one.hash_ids) for one in again] == [(one.isl, one.osl, one.hash_ids) for one in traffic]


def test_the_order_of_the_families_is_told_of_what_ran_live(bench: dict[str, ModuleType]) -> None:
    def row(who: str, layout: str, family: str, tight: float, loose: float) -> dict[str, Any]:
        shares = {"tight": tight, "loose": loose, "ttft": 0.1, "itl": 0.01}
        return {"part": "live", "who": who, "layout": layout, "family": family, **shares}

    rows = [
        row("simulated", "2P2D", "split", 0.9, 0.3),
        row("simulated", "chunk 512", "aggregated", 0.2, 0.9),
        row("live", "2P2D", "split", 0.8, 0.95),
        row("live", "chunk 512", "aggregated", 0.3, 0.9),
    ]
    tight, loose = bench["table"].order(rows)
    assert "best simulated is 2P2D, best live 2P2D" in tight and "does not hold" not in tight
    assert "best simulated is chunk 512, best live 2P2D" in loose and "does not hold" in loose


def test_a_folder_of_results_makes_the_page_again(
    bench: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of({"chunk 512": (1.0,)}, (8.0,), 12)
    lines = (json.dumps({**row, "part": "sweep", "work": "long prompts"}) + "\n" for row in rows)
    (tmp_path / "results.jsonl").write_text("".join(lines))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin measured -->\n| of yesterday |\n<!-- end measured -->\nafter\n")
    assert bench["run"].main(["--resume", str(tmp_path), "--part", "--docs", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "yesterday" not in text
    assert "| long prompts | 12 | 0 | 0 | 0 | 0 | 12 | 0 | 0 | 48 |" in text, (
        "by all pairs, in the one load that was run"
    )
    (held,) = (tmp_path / "page").glob("*-load-held.csv")
    assert "8.4/s (chunk 512)" in held.read_text() and "8.4/s (chunk 512)" in capsys.readouterr().out
