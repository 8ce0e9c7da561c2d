"""Where do the SGLang tests get their environment and their model? Else they are skipped.

`make test-sglang` makes them. Each file starts two servers and ends them: a server takes a GB, and its start most of a
core for half a minute.
"""

import os
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.engine_venv import ROOT, made

HERE = Path(__file__).parent
VENV = os.environ.get("PENSTOCK_SGLANG_VENV")
if not VENV:
    collect_ignore_glob = ["test_[!e]*"]  # one skip says it for all: test_environment.py


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session")
def venv() -> Path:
    """The environment with SGLang in it."""
    if not VENV:
        skip_or_fail("sglang", "these tests start real servers: run `make test-sglang`, which makes what they need")
    found = Path(str(VENV)).expanduser()
    if not (found / "bin" / "sglang").exists():
        skip_or_fail("sglang", f"there is no SGLang in PENSTOCK_SGLANG_VENV={VENV}: `make test-sglang` puts it there")
    return found


@pytest.fixture(scope="session")
def checkpoint(venv: Path) -> Path:
    """The folder of the tiny model that the tests of vLLM serve as well."""
    return made(venv, ROOT / "tests/vllm/setup/checkpoint.py", "sglang-model")
