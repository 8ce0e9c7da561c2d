"""Which HTTP carries a test's frontend? Tests that ask for ``http`` run on the hand-written one and the plain one."""

import pytest

from tests.frontend import stand


@pytest.fixture(params=["fast", "plain"])
def http(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of the HTTP that a stand is served by."""
    monkeypatch.setattr(stand, "HTTP", request.param)
    return str(request.param)
