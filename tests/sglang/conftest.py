"""Where do the SGLang tests get their environment, their model and the servers that they share? Else they are skipped.

`make test-sglang` makes the first two. Two plain servers serve the whole session; the pair and the children of
`penstock serve` are started by the files that need them, one after the other.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.adapters.engine_ports import free_port
from tests.conftest import skip_or_fail
from tests.engine_venv import ROOT, made
from tests.sglang.server import SglangServer, events_config

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


@pytest.fixture(scope="session")
def servers(
    venv: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SglangServer, SglangServer]]:
    """Two servers that somebody else started. Who uses them leaves nothing running in them."""
    folder = tmp_path_factory.mktemp("servers")
    first, second = (
        SglangServer(
            venv, checkpoint, free_port(), folder / f"{n}.log", flags=("--kv-events-config", events_config(free_port()))
        )
        for n in range(2)
    )
    try:
        first.wait_ready()
        second.wait_ready()
        yield first, second
    finally:
        first.stop()
        second.stop()
