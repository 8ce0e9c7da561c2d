"""Extensions are found by entry points alone, ours as a stranger's, and one that is broken breaks nothing else."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from penstock import extension
from penstock.extension import Extension
from penstock.kernel.errors import ConfigError
from penstock.testing.installed_extensions import extension_installed, project_installed

ROOT = Path(__file__).resolve().parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

GOOD = Extension(name="good", entries={"scorer": {"one": "penstock.kernel.plurals:counted", "two": "no.such:thing"}})
TWIN = Extension(name="twin", entries={"scorer": {"one": "x:y"}})
SAME = Extension(name="good")
STRANGE = Extension(name="strange", entries={"nowhere": {"one": "x:y"}})  # type: ignore[dict-item]
WRONG = "not an extension"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    with ExitStack() as stack:
        for number, name in enumerate(("GOOD", "TWIN", "SAME", "STRANGE", "WRONG", "ABSENT")):
            folder = tmp_path / name
            folder.mkdir()
            stack.enter_context(extension_installed(folder, f"p{number}", f"{__name__}:{name}"))
        yield


def test_one_that_is_broken_is_left_out_with_the_reason(world: None) -> None:
    state = extension.installed()
    assert state.extensions["good"] is GOOD
    assert {name: why for name, why in state.faults.items() if name.startswith("p")} == {
        "p1": "its scorer one has the name of one of good",
        "p2": "another extension is called good",
        "p3": f"it has entries for 'nowhere', which is not one of {', '.join(extension.SEAMS)}",
        "p4": "it is a str, not a penstock.extension.Extension",
        "p5": f"{__name__}:ABSENT can't be imported: AttributeError: module '{__name__}' has no attribute 'ABSENT'",
    }


def test_an_entry_is_imported_when_it_is_used(world: None) -> None:
    assert extension.entry("scorer", "one")(2, "worker") == "2 workers"
    assert "two" in extension.names("scorer") and extension.offers("scorer", "two")
    with pytest.raises(ConfigError, match=r"a\.b: no\.such:thing can't be imported: .*the extension good needs"):
        extension.entry("scorer", "two", "a.b")


def test_an_unknown_name_lists_the_known_ones_and_what_is_left_out(world: None) -> None:
    with pytest.raises(ConfigError, match=r"no installed .* the scorer 'three' .known: one, two; p1 is left"):
        extension.entry("scorer", "three")


def test_the_example_is_found_by_its_own_project_file(tmp_path: Path) -> None:
    with project_installed(ROOT / "examples" / "extension", tmp_path):
        assert {"label-cost"} <= set(extension.names("scorer")) and "by-label" in extension.installed().extensions
    assert "by-label" not in extension.installed().extensions


def test_the_entry_points_of_this_environment_are_those_of_the_project_file() -> None:
    for group, points in DECLARED.items():
        ours = {point.name: point.value for point in entry_points(group=group) if point.dist is not None
                and point.dist.name == "penstock"}  # fmt: skip
        assert ours == points, "pip install -e . writes them anew"


def test_help_and_status_read_no_entry_points() -> None:
    code = (
        "import sys; from penstock.cli.main import main; main(['--help']); main(['status', '--help']); "
        "assert not {'penstock.extension', 'importlib.metadata'} & set(sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_no_module_of_the_server_names_a_companion_in_an_import() -> None:
    (contract,) = [each for each in CONTRACTS if each["name"].startswith("The server imports no companion")]
    assert contract["layers"][-1] == "penstock" and "ignore_imports" not in contract


SETTINGS = """
from typing import Annotated

from penstock.extension import Extension
from penstock.kernel.settings import Knob, Settings


class Limits(Settings, frozen=True, kw_only=True):
    \"\"\"What acme limits.\"\"\"

    low: Annotated[int, Knob("Fewest of them.", unit="count", ge=0)] = 1
    high: Annotated[int, Knob("Most of them.", unit="count", ge=0)] = 9


def check(settings):
    limits = settings.extensions.acme
    if limits.low > limits.high:
        yield ("extensions", "acme", "low"), f"is {limits.low}, above high {limits.high}", "lower it"


import click


@click.command("acme")
def command():
    click.echo("acme speaks")


EXTENSION = Extension(name="acme", entries={
    "settings": {"acme": Limits}, "check": {"acme": check}, "command": {"acme": command},
    "store": {"acme-store": "acme:no"},
})
"""


def test_settings_checks_and_commands_of_a_stranger_are_as_the_server_s_own(tmp_path: Path) -> None:
    (tmp_path / "acme.py").write_text(SETTINGS)
    info = tmp_path / "acme-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[penstock.extensions]\nacme = acme:EXTENSION\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}

    def penstock(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "penstock", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    shown = penstock("config", "show", "--set", "extensions.acme.low=3")
    assert "low: 3" in shown.stdout, shown.stderr
    crossed = penstock("config", "check", "--set", "extensions.acme.low=10")
    assert crossed.returncode == 2 and "extensions.acme.low: is 10, above high 9" in crossed.stderr
    outside = penstock("config", "check", "--set", "extensions.acme.low=-1")
    assert outside.returncode == 2 and "out of range: 0 or more" in outside.stderr
    assert '"Limits"' in penstock("config", "schema").stdout and "acme-store" in penstock("config", "schema").stdout
    assert penstock("acme").stdout == "acme speaks\n"
    assert "no command 'acmee'" in penstock("acmee").stderr
