"""Where do the SGLang tests get their environment, their model and their servers? Else they are skipped.

`make test-sglang` makes the first two. Each file has servers of its own, and ends them: a server takes a GB, and its
start most of a core for half a minute.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.engine_venv import ROOT, made
from tests.live.cluster import Served
from tests.sglang.fronts import attached
from tests.sglang.server import SglangServer

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


@pytest.fixture(scope="module")
def servers(
    request: pytest.FixtureRequest, venv: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SglangServer, ...]]:
    """The servers of a file, which says in ``SERVERS`` what further flags each has."""
    folder = tmp_path_factory.mktemp("servers")
    each_flags = enumerate(request.module.SERVERS)
    found = tuple(SglangServer(venv, checkpoint, folder / f"{n}.log", flags=flags) for n, flags in each_flags)
    try:
        for server in found:
            server.wait_ready()
        yield found
    finally:
        for server in found:
            server.kill()


@pytest.fixture(scope="module")
def front(servers: tuple[SglangServer, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A frontend that is told nothing but the servers' URLs."""
    with attached(servers, tmp_path_factory.mktemp("attach")) as cluster:
        yield cluster
