"""The recipes are what their command plans, the page has all of them, and each runs simulated as it stands."""

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.config.reading.load import load
from tests.docs.pages import ROOT
from tests.live.cluster import served

_spec = importlib.util.spec_from_file_location("recipes_bench", ROOT / "bench/recipes.py")
assert _spec is not None and _spec.loader is not None
bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)
FOLDER = ROOT / "examples/recipes"
PAGE = ROOT / "docs/guides/recipes.md"
REGENERATED = "llama-3.1-8b-instruct-h200"
NAMES = [recipe.name for recipe in bench.RECIPES]


def rows() -> dict[str, dict[str, str]]:
    with PAGE.with_suffix("").joinpath("all-recipes.csv").open() as file:
        return {row["config"]: row for row in csv.DictReader(file)}


def test_there_are_eight_models_on_three_gpus_and_the_page_has_each() -> None:
    files = {f"{name}.yaml" for name in NAMES}
    assert (len(bench.MODELS), len(bench.GPUS), len(files)) == (8, 3, 24)
    assert {path.name for path in FOLDER.iterdir()} == files == rows().keys()
    assert all(f"(../../examples/recipes/{file})" in PAGE.read_text() for file in files)


@pytest.mark.parametrize("recipe", bench.RECIPES, ids=NAMES)
def test_a_recipe_says_its_command_and_the_source_and_error_of_its_times_and_is_valid(recipe: Any) -> None:
    path = FOLDER / recipe.file
    head = path.read_text().partition("\nmodels:")[0]
    assert f"#   {recipe.command}\n" in head and f"#   penstock up examples/recipes/{recipe.file}\n" in head
    assert "roofline of" in head and "% in TPOT and" in head and "% in TTFT" in head
    checked = CliRunner().invoke(cli, ["config", "check", str(path), "--set", "frontend.port=0"])
    assert checked.exit_code == 0, checked.output
    (model,) = load(path, (), {}).settings.models.values()
    engines = sum(pool.replicas * pool.sim.timing.gpus for pool in model.pools.values())
    assert engines == int(rows()[recipe.file]["GPUs"])


def test_a_recipe_is_what_its_command_plans_today(tmp_path: Path) -> None:
    assert bench.main(["--only", REGENERATED, "--out", str(tmp_path)]) == 0
    made = (tmp_path / f"{REGENERATED}.yaml").read_text()
    assert made == (FOLDER / f"{REGENERATED}.yaml").read_text(), "run: make recipes"


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_serves_as_it_stands(name: str, tmp_path: Path) -> None:
    path = FOLDER / f"{name}.yaml"
    with served(tmp_path, "up", str(path), "--frontend.port", "0") as cluster:
        (model,) = load(path, (), {}).settings.models
        status, answer, _ = cluster.chat(model=model)
        assert status == 200 and answer["usage"]["completion_tokens"] == 8
