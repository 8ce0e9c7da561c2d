"""A release of a version to come, in a fresh environment outside the checkout, used as a stranger uses it."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.live.cluster import Served, post, until
from tests.release.release_script import ROOT, copied

pytestmark = pytest.mark.slow
VERSION = "9.9.9"
PLAN = "plan --model Qwen3-8B --gpu h200 --ttft 500ms --itl 20ms --rate 5 --isl 3000 --osl 300 --requests 50 --json"
SIMULATE = "simulate quick.yaml --workload chat --rate 2 --duration 20s --no-html --json"


def clean() -> dict[str, str]:
    """Return this environment without what would lead to the checkout."""
    led = re.compile(r"PENSTOCK_|PYTHON|VIRTUAL_ENV|HATCH")
    return {name: value for name, value in os.environ.items() if not led.match(name)}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a release, made in a copy of the checkout that has another version; no image."""
    python = ROOT / ".venv-release/bin/python"
    if not python.exists():
        skip_or_fail("release", "there is no .venv-release: make .venv-release/.installed")
    folder = tmp_path_factory.mktemp("release")
    checkout = copied(folder / "checkout")
    changes = checkout / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("\n## ", f"\n## {VERSION}\n\nOne line.\n\n## ", 1))
    env = clean() | {"PATH": str(folder)}  # without buildah, whose base is on a registry
    words = [str(python), "deploy/release.py", VERSION]
    for more in ("--set",), ("--dist", str(folder / "dist")):
        done = subprocess.run([*words, *more], cwd=checkout, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: the image: no buildah" in done.stdout
    return folder / "dist" / VERSION


@pytest.fixture(scope="module")
def penstock(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in a new environment that has the wheel and what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("stranger")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], env=clean(), check=True)
    pip = [folder / "venv/bin/python", "-m", "pip", "install", "-q", *dist.glob("*.whl")]
    done = subprocess.run(pip, cwd=folder, env=clean(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "quick.yaml").write_text((ROOT / "examples/quick.yaml").read_text())
    return folder / "venv/bin/penstock"


@pytest.fixture(scope="module")
def cluster(penstock: Path) -> Iterator[Served]:
    folder = penstock.parents[2]
    arguments = ["up", "quick.yaml", "--frontend.port", "0"]
    cluster = Served(arguments, folder, before=("env", "-u", "PYTHONPATH"), program=(str(penstock),))
    try:
        yield cluster.wait_up()
    finally:
        cluster.stop()


def output(penstock: Path, *words: str) -> str:
    folder = penstock.parents[2]
    env = clean() | {"PENSTOCK_STATE_DIR": str(folder / "state")}
    done = subprocess.run([penstock, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_files_are_there_and_their_sums_are_right(dist: Path) -> None:
    names = {path.name for path in dist.iterdir()}
    wheel, archive = f"penstock-{VERSION}-py3-none-any.whl", f"penstock-{VERSION}.tar.gz"
    assert {wheel, archive, "NOTES.md", "SHA256SUMS"} <= names
    assert (dist / "NOTES.md").read_text() == "One line.\n"
    sums = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert sums == {name: hashlib.sha256((dist / name).read_bytes()).hexdigest() for name in names - {"SHA256SUMS"}}
    with zipfile.ZipFile(dist / wheel) as inner:
        assert not [name for name in inner.namelist() if not name.startswith("penstock")]
        assert "penstock_lab/sim/data/tokenizer.json" in inner.namelist()
    if (dist / f"penstock-{VERSION}.tgz").exists():
        with tarfile.open(dist / f"penstock-{VERSION}.tgz") as inner:
            chart = inner.extractfile("penstock/Chart.yaml")
            assert chart is not None and chart.read().decode().count(VERSION) == 2


def test_it_says_its_version_and_its_commands(penstock: Path) -> None:
    assert VERSION in output(penstock, "--version")
    assert "simulate" in output(penstock, "--help")


def test_configs_are_checked_and_documented(penstock: Path) -> None:
    assert output(penstock, "config", "check", "quick.yaml")
    assert "speed_up" in output(penstock, "config", "docs")


def test_it_plans_and_simulates_without_a_network(penstock: Path) -> None:
    assert json.loads(output(penstock, *PLAN.split()))["feasible"]
    assert json.loads(output(penstock, *SIMULATE.split()))["variants"]


def test_it_serves_explains_and_stops(penstock: Path, cluster: Served) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    status, answer, headers = post(f"{cluster.url}/v1/chat/completions", body)
    assert status == 200 and answer["usage"]["completion_tokens"] == 4
    here = ("--url", cluster.url)
    assert len(json.loads(output(penstock, "status", "--json", *here))["workers"]) == 2
    until(lambda: headers["x-penstock-request-id"] in output(penstock, "explain", *here), 10.0)
    assert headers["x-penstock-worker"] in output(penstock, "explain", headers["x-penstock-request-id"], *here)
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(30) in (0, 130), cluster.text
