"""Does the command write what it found, and are simulated scenarios and energy what they say?"""

import csv
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.kernel.errors import ConfigError
from penstock_lab.cli.study import command
from penstock_lab.profiler.design_space import simulated_rows
from penstock_lab.profiler.design_space.energy_rows import energy_section, powers_of
from penstock_lab.profiler.design_space.simulated_rows import plan_of, scenarios, simulated_section
from penstock_lab.profiler.design_space.study_command import DesignOptions, main
from penstock_lab.simulate.simulation_plan import checked

HEAD = "model,hardware,prompt_size,average_power,peak_power"


def test_the_command_writes_a_page_with_its_data_beside_it(tmp_path: Path) -> None:
    docs = tmp_path / "page.md"
    docs.write_text("# Mine\n\nby hand\n\n<!-- begin measured -->\nold\n<!-- end measured -->\nfoot\n")
    arguments = ["disaggregation", "--model", "Llama-3.1-70B", "--traffic", "16k/2k", "--no-simulate"]
    result = CliRunner().invoke(command, [*arguments, "--out", str(tmp_path / "out"), "--docs", str(docs)])
    assert result.exit_code == 0, result.output
    with (tmp_path / "out" / "frontiers.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert {row["kind"] for row in rows} >= {"disaggregated", "co-located"}
    for kind in {row["kind"] for row in rows}:
        front = [row for row in rows if row["kind"] == kind]
        speed, density = ([float(row[key]) for row in front] for key in list(front[0])[3:5])
        assert speed == sorted(speed, reverse=True)
        assert density == sorted(density)
    assert "Left out: no measured/splitwise_perf_model.csv" in result.output
    text = docs.read_text()
    assert text.startswith("# Mine\n\nby hand") and text.endswith("foot\n") and "old" not in text
    assert "What a split gains" in text
    assert "Frontiers" in (tmp_path / "out" / "study.html").read_text()


@pytest.mark.parametrize(
    ("more", "match"),
    [({"models": ("gpt-9",)}, "gpt-9"), ({"traffic": ("9k/9k",)}, "16k/2k"), ({"gpu": "h9000"}, "h9000")],
)
def test_what_is_not_known_is_an_error_that_names_it(tmp_path: Path, more: dict[str, object], match: str) -> None:
    given = {"gpu": "gb200", "models": (), "traffic": (), **more}
    options = DesignOptions(out=tmp_path, docs=None, ttft=2.0, traces=None, simulated=False, **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        main(options)
    assert match in f"{error.value} {error.value.hint}"


def test_scenarios_are_what_they_say() -> None:
    plans = {scenario.name: plan_of(scenario, "5P3D") for scenario in scenarios(None)}
    assert len(plans) == 7, "the trace's is left out without traces"
    for plan in plans.values():
        assert checked(plan) is plan
        assert {name: (pool.role, pool.replicas) for name, pool in plan.pools.items()} == {
            "first": ("prefill", 5),
            "second": ("decode", 3),
        }
    base, slow = plans["long prompts"], plans["links of a tenth"]
    links = [plan.pools["first"].sim.transfer.bandwidth for plan in (base, slow)]
    assert links[1] == pytest.approx(links[0] / 10)
    mixed = plans["half of the GPUs are H200, for decoding"]
    assert mixed.pools["second"].sim.blocks > 2 * mixed.pools["first"].sim.blocks, "an H200 has more memory"
    offloaded = plans["KV is offloaded (agents)"]
    assert all(pool.cache.host and pool.cache.disk for pool in offloaded.pools.values())
    assert [fault.worker for fault in plans["an engine dies"].faults] == ["first-0", "second-0"]


def test_a_scenario_is_simulated_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_rows, "REQUESTS", 25)
    section = simulated_section(None)
    assert "are left out" in section.text[0]
    rows = [row.cells for row in section.tables[0].rows]
    assert len(rows) == 7 * 4
    assert all(0.0 < float(row[3]) <= float(row[4]) for row in rows)
    agents = [row for row in rows if "agents" in row[0]]
    assert all(int(row[6].rstrip("%")) > 20 for row in agents), "their prompts come again"


def test_energy_is_of_measured_power_only(tmp_path: Path) -> None:
    path = tmp_path / "power.csv"
    rows = ["llama2-70b,a100-80gb,4096,0.2,0.9", "llama2-70b,a100-80gb,256,0.4,0.6", "llama2-70b,a100-80gb,256,0,0"]
    path.write_text("\n".join([HEAD, *rows, "llama2-70b,h100-80gb,256,0.7,0.8"]))
    assert powers_of(path) == pytest.approx((0.9, 0.4)), "a 0 is a run without power, and an H100 another GPU"
    joules = [(float(row.cells[1]), float(row.cells[3])) for row in energy_section(path).tables[0].rows]
    assert joules[0][0] > joules[-1][0], "long prompts cost more"
    path.write_text(f"{HEAD}\nllama2-70b,a100-80gb,256,0,0\n")
    with pytest.raises(ConfigError, match="no power"):
        powers_of(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="model"):
        powers_of(path)
