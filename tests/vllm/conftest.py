"""Where do the vLLM tests get their environment and their model from? Without them they are skipped by name.

`make test-vllm` makes both. ``attached`` runs two servers that Penstock did not start and ``seeing`` one, ``children``,
``handoff`` and ``planned`` some that it did, ``profiled`` measures one of the former (its soak one of the latter), and
``tiers`` has one after the other. But for a while in ``handoff`` no more than two are up at once: each takes 2 GB, and
up to three minutes to start.
"""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
VENV = os.environ.get("PENSTOCK_VLLM_VENV")
if not VENV:
    collect_ignore = [
        "attached",
        "children",
        "handoff",
        "planned",
        "profiled",
        "seeing",
        "tiers",
        "test_publisher.py",
    ]  # one skip says it for all: test_environment.py


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def venv() -> Path:
    """The environment with vLLM in it."""
    if not VENV:
        skip_or_fail("vllm", "these tests start real servers: run `make test-vllm`, which makes what they need")
    found = Path(str(VENV)).expanduser()
    if not (found / "bin" / "vllm").exists():
        skip_or_fail("vllm", f"there is no vLLM in PENSTOCK_VLLM_VENV={VENV}: `make test-vllm` puts it there")
    return found


@pytest.fixture(scope="session")
def checkpoint(venv: Path) -> Path:
    """The folder of the tiny model: made once, and again when its recipe changes."""
    return made(venv, "checkpoint.py", "vllm-model")


@pytest.fixture(scope="session")
def seeing(venv: Path) -> Path:
    """The folder of the tiny model that sees."""
    return made(venv, "vision.py", "vllm-seeing")


def made(venv: Path, name: str, prefix: str) -> Path:
    """Return the folder that a recipe makes."""
    recipe = HERE / "setup" / name
    digest = hashlib.sha256(recipe.read_bytes()).hexdigest()[:12]
    folder = ROOT / "build" / f"{prefix}-{digest}"
    if not folder.is_dir():
        done = subprocess.run(
            [venv / "bin" / "python", recipe, folder], capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, f"{recipe} failed:\n{done.stdout}{done.stderr}"
    return folder
