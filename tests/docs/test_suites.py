"""The map of suites is whole, what changed decides what the gate runs, and the nightly's table is what it wrote."""

import sys
from pathlib import Path

import pytest

from tests import house, nightly, run
from tests.docs.pages import GENERATED
from tests.nightly import Results, Row
from tests.suites import ROOT, SUITES, covers, known

SHARED = ("tests/__init__.py", "tests/conftest.py", "tests/depth.py")
"""Files whose change counts as a change of everything."""
NAMED = {suite.name: suite for suite in SUITES}


def tracked() -> list[str]:
    return nightly.git("ls-files").splitlines()


def row(commit: str, failed: int = 0) -> Row:
    return Row(commit, "2026-11-28", passed=3, failed=failed, rerun=0, skipped=1, seconds=9)


def test_every_file_of_tests_is_in_a_suite() -> None:
    files = [file for file in tracked() if Path(file).name.startswith("test_") and file.endswith(".py")]
    lost = []
    for file in files:
        suites = [suite for suite in SUITES if covers(suite.tests, file) and f"--ignore={file}" not in suite.options]
        slow = "mark.slow" in (ROOT / file).read_text()
        if not any("not slow" in suite.select or not suite.select or suite.group == "vllm" for suite in suites):
            lost += [file] if not slow else []
        if slow and not any(suite.select in ("slow", "") for suite in suites):
            lost.append(f"{file} (its slow tests)")
    assert lost == []


def test_every_source_folder_is_some_suites_subject() -> None:
    sources = {str(Path(file).parent) for file in tracked() if file.startswith("src/") and file.endswith(".py")}
    assert [folder for folder in sorted(sources) if not known(f"{folder}/new.py") and folder != "src/penstock"] == []


def test_no_file_of_the_project_is_unknown_but_what_all_tests_share() -> None:
    unknown = [file for file in tracked() if not known(file)]
    assert [file for file in unknown if not covers(("tests/*.py",), file) or "/" in file.removeprefix("tests/")] == []
    assert set(SHARED) <= set(unknown)


def test_the_table_names_what_exists_and_a_gate_part_is_a_part() -> None:
    for suite in SUITES:
        for path in (*suite.tests, *suite.gate, *suite.subject):
            assert "*" in path or (ROOT / path).exists(), f"{suite.name}: {path} does not exist"
        assert [path for path in suite.gate if not covers(suite.tests, path)] == []
        assert [path for path in suite.tests if f"--ignore={path}" in suite.options] == [], (
            "pytest runs it all the same"
        )


def plans(monkeypatch: pytest.MonkeyPatch, changed: list[str] | None, results: Results) -> dict[str, run.Plan]:
    monkeypatch.setattr(nightly, "changed_files", lambda commit: changed)
    return {plan.suite.name: plan for plan in run.gate_plans(results)}


def green() -> Results:
    return Results(suites={suite.name: row("c0ffee") for suite in SUITES})


def test_the_gate_runs_its_parts_where_nothing_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = plans(monkeypatch, [], green())
    assert planned["operate"].full and planned["storm"].full
    assert not planned["vllm"].full and planned["vllm"].tests == NAMED["vllm"].gate
    assert planned["compiled-pure"].depth == 0.4
    assert "llamacpp" not in planned and "soak" not in planned and "pure" not in planned
    assert "llamacpp is left out: nothing it is about changed since c0ffee" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "suites"),
    [
        ("src/penstock/router/router.py", {"compiled-pure", "compiled-random", "compiled-shell", "simulations"}),
        ("hatch_build.py", {"compiled-pure", "compiled-random", "compiled-shell", "image", "release"}),
        ("tests/doubles/kubernetes/kubelet/new.py", {"double"}),
        ("src/penstock_kv/transfer/new.py", {"nixl", "slow", "vllm"}),
        ("src/penstock/adapters/engines/dialects/llamacpp.py", {"llamacpp", "slow", "vllm", "vllm-attached"}),
        ("src/penstock/adapters/engines/dialects/sglang.py", {"sglang", "slow", "vllm", "vllm-attached"}),
        ("src/penstock_lab/profiler/measurement/new.py", {"vllm-planner", "simulations"}),
        ("tests/vllm/server.py", {suite.name for suite in SUITES if suite.group == "vllm"}),
        ("README.md", set()),
    ],
)
def test_a_change_brings_the_suites_about_it_in_full(
    monkeypatch: pytest.MonkeyPatch, file: str, suites: set[str]
) -> None:
    planned = plans(monkeypatch, [file], green())
    assert {name for name, plan in planned.items() if plan.full and plan.suite.ring == "nightly"} == suites


@pytest.mark.parametrize("changed", [["some/new/place.txt"], ["README.md", "tests/conftest.py"], None])
def test_what_is_unknown_counts_as_everything(monkeypatch: pytest.MonkeyPatch, changed: list[str] | None) -> None:
    planned = plans(monkeypatch, changed, green())
    assert {suite.name for suite in SUITES if suite.ring in ("gate", "nightly")} == planned.keys()
    assert all(plan.full for plan in planned.values())


def test_a_suite_that_failed_or_never_ran_is_in_the_gate_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    results = green()
    results.suites["nixl"] = row("c0ffee", failed=1)
    del results.suites["llamacpp"]
    planned = plans(monkeypatch, [], results)
    assert planned["nixl"].full and planned["llamacpp"].full and not planned["vllm"].full


def test_an_engine_that_is_not_required_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REQUIRE", "chromium,llamacpp")
    assert not run.is_required(NAMED["vllm"])
    assert run.is_required(NAMED["llamacpp"]) and run.is_required(NAMED["compiled-pure"])
    assert run.required() == {"chromium"}
    monkeypatch.delenv("PENSTOCK_REQUIRE")
    assert run.is_required(NAMED["vllm"])


def test_a_run_counts_what_passed_the_second_time_and_keeps_its_first_failure(tmp_path: Path) -> None:
    test = tmp_path / "test_sometimes.py"
    test.write_text(
        "from pathlib import Path\nimport pytest\n"
        "def test_sometimes():\n"
        "    mark = Path(__file__).with_suffix('.ran')\n"
        "    if not mark.exists():\n"
        "        mark.touch()\n"
        "        raise AssertionError('the first time')\n"
        "def test_never():\n    assert not 'good'\n"
        "def test_left():\n    pytest.skip('gone')\n"
        "def test_always():\n    pass\n"
    )
    outcome = run.Outcome()
    options = ["-p", "tests.conftest", "--rootdir", str(tmp_path), "--reruns", "1", "-n", "0"]
    run.pytest(outcome, Path(sys.executable), {}, [str(test), *options])
    assert (outcome.passed, outcome.failed, outcome.rerun, outcome.skipped) == (2, 1, 1, 1)
    ((name, failure),) = outcome.first_failures.items()
    assert name.endswith("test_sometimes") and "the first time" in failure


def test_a_run_without_tests_has_failed(tmp_path: Path) -> None:
    outcome = run.Outcome()
    run.pytest(outcome, Path(sys.executable), {}, [str(tmp_path), "--rootdir", str(tmp_path)])
    assert outcome.failed == 1
    assert run.summary({"none": outcome}) == 1


def test_the_site_shows_what_the_last_nightly_wrote() -> None:
    assert nightly.table(nightly.read()) in GENERATED["reference/nightly.md"]


def test_a_nightly_writes_its_row_and_its_flakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nightly, "FILE", tmp_path / "nightly.json")
    outcome = run.Outcome(
        passed=5, rerun=1, seconds=2.4, first_failures={"tests/test_a.py::test_b": "x" * 9_000 + f"{ROOT}/tests"}
    )
    nightly.write("pure", outcome, "c0ffee")
    results = nightly.read()
    assert results.green("pure") == "c0ffee"
    assert results.suites["pure"].rerun == 1 and results.suites["pure"].seconds == 2
    failure = results.flakes["tests/test_a.py::test_b"].failure
    assert len(failure) == nightly.KEPT and failure.endswith("x./tests"), "no folder of this machine"
    assert nightly.repeated() == 0
    assert "| `pure` |" in nightly.table(results)
    results.flakes["tests/test_a.py::test_b"].dates.insert(0, "2026-01-01")
    assert results.flaky_twice == ["tests/test_a.py::test_b"]


def test_no_test_was_flaky_in_two_nightlies() -> None:
    """Mend the test or its subject, or take the test away, and its entry in nightly.json."""
    assert nightly.read().flaky_twice == []


PAGE = "| `router/` | {router} |\n| `fleet/` | {fleet} |\n"


@pytest.mark.parametrize(
    ("router", "fleet", "ledger", "faults"),
    [
        (100, 50, "", []),
        (110, 39, "", []),  # the total fell
        (110, 40, "", ["router"]),
        (110, 50, "| 2026-11-28 | `router/` | 10 | panic rule |", []),
        (110, 60, "| 2026-11-28 | `router/` | 10 | panic rule |", ["fleet"]),
    ],
)
def test_a_folder_grows_for_a_smaller_total_or_a_written_reason(
    router: int, fleet: int, ledger: str, faults: list[str]
) -> None:
    before = ("before", PAGE.format(router=100, fleet=50), "")
    now = ("now", PAGE.format(router=router, fleet=fleet), ledger)
    assert [fault.split()[1] for fault in house.growth([before, now])] == faults


def test_the_linter_of_the_house_finds_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src/penstock"
    for path, text in {
        "router/a.py": '"""Does a thing."""\nfrom penstock.fleet import b\nclass Twice:\n    isl: int\n',
        "fleet/b.py": '"""Is this a question?"""\nfrom penstock.router import a\nclass Twice:\n    found: int\n',
        "cli/main.py": '"""Runs."""\n',
        "report/main_page.py": '"""Shows."""\nclass Replica:\n    id: str\n    state: str\n    gpus: int\n',
    }.items():
        file = package / path
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(text)
    (tmp_path / "ARCHITECTURE.md").write_text(
        "| `penstock/fleet/` | engines |\n| `gone/` | nothing |\n\n| `penstock/` | 1 |\n"
    )
    (tmp_path / "lines.md").write_text("")
    for name, value in {
        "SRC": package.parent,
        "PAGE": tmp_path / "ARCHITECTURE.md",
        "LEDGER": tmp_path / "lines.md",
    }.items():
        monkeypatch.setattr(house, name, value)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "PRONOUN_ENGLISH_LEFT", {})
    for cached in (house.tree_of, house.files, house.classes):
        cached.cache_clear()
    try:
        faults = "\n".join(fault for check in house.CHECKS for fault in check())
    finally:
        monkeypatch.undo()
        for cached in (house.tree_of, house.files, house.classes):
            cached.cache_clear()
    for part in (
        "the class name Twice stands in",
        "fleet/b.py: found",
        "penstock.router.a is in a circle",
        "fleet/b.py: 'Is this a question?'",
        "penstock/router has no row in ARCHITECTURE.md",
        "a row for gone",
        "lines of code, 1 in ARCHITECTURE.md",
    ):
        assert part in faults
