"""An API server that knows our resources, and handles on a store in it."""

import json
import os
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.cable import Cable
from tests.kubernetes.conftest import RunningApi
from tests.kubernetes.discovery.api_cables import KubernetesHarness, through

pytest.importorskip("lightkube")

CRD = Path(__file__).parents[3] / "deploy/helm/penstock/files/crds/penstockentries.yaml"


@pytest.fixture(scope="session")
def entries(api_server: RunningApi) -> RunningApi:
    """An API server with the resource of the discovery store."""
    install(api_server.kubeconfig, CRD)
    return api_server


def install(kubeconfig: Path, crd: Path) -> None:
    """Create a CRD, unless it is there."""
    from lightkube import ApiError, Client, KubeConfig
    from lightkube.resources.apiextensions_v1 import CustomResourceDefinition

    client = Client(config=KubeConfig.from_file(kubeconfig).get())
    try:
        client.create(CustomResourceDefinition.from_dict(yaml.safe_load(crd.read_text())))
    except ApiError as error:
        if error.status.code != 409:
            raise
    finally:
        client.close()


def fault(api: RunningApi, **fields: object) -> None:
    """Begin a fault of the API server's double; without fields end all of them."""
    if api.real:
        pytest.skip("an API server that is not ours has no faults on demand")
    body = json.dumps(fields).encode() if fields else None
    request = urllib.request.Request(f"{api.url}/faults", body, method="POST" if fields else "DELETE")
    urllib.request.urlopen(request, timeout=5).close()


async def harness(
    api: RunningApi, folder: Path, monkeypatch: pytest.MonkeyPatch, secret: str = ""
) -> KubernetesHarness:
    """Return handles on a store of its own, behind a cable."""
    address = urlsplit(api.url)
    cable = await Cable(address.hostname or "127.0.0.1", address.port or 443).start()
    monkeypatch.setenv("KUBECONFIG", str(through(api.kubeconfig, cable.port, folder)))
    cluster = folder.name.replace("_", "-").strip("-.")[:60]
    return KubernetesHarness(cable, api.kubeconfig, os.environ, cluster, secret)


@pytest.fixture
async def kubernetes(
    entries: RunningApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[KubernetesHarness]:
    """Handles on a store in Kubernetes."""
    handles = await harness(entries, tmp_path, monkeypatch)
    yield handles
    await handles.close()
