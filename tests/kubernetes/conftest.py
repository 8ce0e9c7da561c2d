"""Programs that the tests of Kubernetes and of gateways run for real; without them those tests are skipped by name.

`make test-kubernetes` fetches them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kubernetes.api_client import ApiClient
from tests.kubernetes.programs import program
from tests.suites import ROOT


@pytest.fixture(scope="session")
def kubectl() -> Path:
    """kubectl."""
    return program("kubectl")


@pytest.fixture(scope="session")
def helm() -> Path:
    """helm."""
    return program("helm")


class RunningApi(NamedTuple):
    """An API server that tests talk to: the double in a process of its own, or the one of PENSTOCK_KUBECONFIG."""

    url: str
    """Where it answers without a token (``kubectl proxy`` before a real one)."""
    kubeconfig: Path
    real: bool = False


@contextmanager
def running_double(folder: Path, *options: str) -> Iterator[RunningApi]:
    """Run the double as a process."""
    command = [sys.executable, "-m", "tests.doubles.kubernetes", "--folder", str(folder), *options]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline() or "{}")
        assert first, (folder / "log").read_text()
        yield RunningApi(first["url"], Path(first["kubeconfig"]))
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def proxied(kubeconfig: Path) -> Iterator[RunningApi]:
    """Run ``kubectl proxy`` before a real API server."""
    command = [str(program("kubectl")), "--kubeconfig", str(kubeconfig), "proxy", "--port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        yield RunningApi(f"http://{address}", kubeconfig, real=True)
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApi]:
    """One API server for a session's tests: each takes a namespace of its own."""
    if named := os.environ.get("PENSTOCK_KUBECONFIG"):
        with proxied(Path(named).expanduser()) as server:
            yield server
        return
    with running_double(tmp_path_factory.mktemp("api-server")) as server:
        yield server


@pytest.fixture
def double(api_server: RunningApi) -> RunningApi:
    """The API server where it is our double: a real one has no faults on demand."""
    if api_server.real:
        pytest.skip("double: PENSTOCK_KUBECONFIG names a real API server, which has no faults on demand")
    return api_server


@pytest.fixture
def api(api_server: RunningApi) -> Iterator[ApiClient]:
    """Plain HTTP to the API server."""
    with ApiClient(api_server.url) as client:
        yield client


@pytest.fixture
def namespace(api: ApiClient) -> Iterator[str]:
    """A namespace of one test."""
    name: str = api.post("/api/v1/namespaces", {"metadata": {"generateName": "penstock-test-"}})["metadata"]["name"]
    yield name
    api.send("DELETE", f"/api/v1/namespaces/{name}")
