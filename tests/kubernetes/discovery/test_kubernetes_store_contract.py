"""The store in Kubernetes keeps the contract."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.testing.store_contract import *  # noqa: F403
from penstock.testing.store_contract import StoreHarness
from tests.kubernetes.conftest import RunningApi
from tests.kubernetes.discovery.conftest import harness

SIGNED = pytest.param("the secret of the contract suite", id="signed", marks=pytest.mark.slow)


@pytest.fixture(params=[pytest.param("", id="plain"), SIGNED])
async def stores(
    request: pytest.FixtureRequest, entries: RunningApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StoreHarness]:
    handles = await harness(entries, tmp_path, monkeypatch, request.param)
    yield handles
    await handles.close()
