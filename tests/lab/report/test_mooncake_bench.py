"""Does the routing bench cut, tabulate and judge as it says? Without starting a cluster."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.config.reading.load import load
from penstock_lab.traffic.formats.mooncake import MooncakeTrace
from penstock_lab.traffic.hit_rate_bound import infinite_cache_bound

BENCH = Path(__file__).resolve().parents[3] / "bench" / "mooncake"
NAMES = ("plan", "cluster", "table", "run")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The bench's modules, which are imported as its script imports them."""
    monkeypatch.syspath_prepend(str(BENCH))
    import importlib

    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name, None)


def outcome(hit: float, ttft: float, **changes: Any) -> dict[str, Any]:
    points = {f"{name}_{point}_s": ttft for name in ("ttft", "itl") for point in ("mean", "p50", "p90", "p99")}
    return {
        "valid": True,
        "hit_rate": hit,
        "hit_rate_bound": 0.5,
        "hit_rate_share_of_bound": hit / 0.5,
        "requests": {"rejected": 1, "failed": 0, "expired": 2},
        "goodput_share": 0.9,
        "cpu_mean": 0.4,
        "verdict": "valid",
        **points,
        **changes,
    }


def results(kv_ttft: tuple[float, ...]) -> list[dict[str, Any]]:
    return [
        {"trace": "conversation", "blocks": 2048, "mode": mode, "repeat": repeat, "attempt": 0, "bench": found}
        for repeat, ttft in enumerate(kv_ttft)
        for mode, found in (("kv", outcome(0.4, ttft)), ("random", outcome(0.2, 0.1)))
    ]


def test_the_table_shows_medians_with_ranges_in_the_engines_time(bench: dict[str, ModuleType]) -> None:
    text = bench["table"].tables(results((0.01, 0.02, 0.06)))
    row = next(line for line in text.splitlines() if line.startswith("| kv |"))
    assert "| 40.0% | 80.0% | 100 (50..300) |" in row
    assert "| 90.0% | 1 | 2 | 3 |" in row
    assert "2,048 blocks" in text
    assert "| conversation, 2,048 | 40.0%, 100 ms | " in text
    assert "no exception" in text
    assert "kv is best in 6 of 6" in text


def test_a_broken_order_is_said(bench: dict[str, ModuleType]) -> None:
    first, *rest = bench["table"].order(results((0.01, 0.2, 0.06)))
    assert "5 of 6" in first
    assert rest == [
        "conversation, 2,048 blocks, repeat 1: best mean TTFT is random (500 ms), kv has 1,000 ms",
    ]


def test_invalid_runs_are_counted_and_not_compared(bench: dict[str, ModuleType]) -> None:
    runs = results((0.01,))
    runs[0]["bench"]["valid"] = False
    text = bench["table"].tables(runs)
    assert "0 (1 invalid)" in text
    assert "1 repeats could not be compared" in text


def test_a_resumed_folder_is_tabulated(
    bench: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [*results((0.01, 0.02)), {"trace": "conversation", "broken": True, "bench": {"valid": False}}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert bench["run"].main(["--tables", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "1 runs did not start" in printed
    assert "| kv |" in printed
    assert bench["run"].main(["--tables", str(tmp_path / "none")]) == 1


def test_without_traces_it_says_so(
    bench: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench["run"], "find_traces", lambda named: None)
    assert bench["run"].main(["--out", str(tmp_path)]) == 77
    assert "skipped" in capsys.readouterr().out


def test_its_config_is_one_that_the_cluster_takes(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    for mode in bench["plan"].MODES:
        path.write_text(bench["cluster"].config(mode, 2048, 1, tmp_path))
        settings = load(str(path), [], {}).settings
        assert settings.router.mode == mode
        assert settings.models["sim"].pools["main"].sim.kv_blocks == 2048
        assert settings.models["sim"].pools["main"].sim.timing.speed_up == 5.0


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_slices_keep_the_traces_rate_and_reuse(
    bench: dict[str, ModuleType], traces: Path, tmp_path: Path, name: str
) -> None:
    plan = bench["plan"]
    whole = plan.read_trace(traces, name)
    rate = len(whole) / whole[-1].at
    bound = infinite_cache_bound(whole, 64)
    for repeat in range(plan.REPEATS):
        part = plan.cut(name, whole, repeat)
        assert len(part.requests) / part.requests[-1].at == pytest.approx(rate, rel=0.15)
        assert part.bound == pytest.approx(bound, abs=0.08)
        assert all(request.isl + request.osl <= plan.MAX_LEN for request in part.requests)
        path = tmp_path / f"{repeat}.jsonl"
        plan.write_slice(path, part.requests)
        with path.open("rb") as lines:
            again = list(MooncakeTrace(lines))
        assert [each.hash_ids for each in again] == [each.hash_ids for each in part.requests]
        assert [each.at for each in again] == pytest.approx([each.at for each in part.requests], abs=1e-5)
