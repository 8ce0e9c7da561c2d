"""Every scenario draws its own constants of the router; afterwards they are as they were."""

import pytest

from penstock.router import model_pool
from penstock.router.workers import roster


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    for name in ("FALLBACK_SHARE", "FALLBACK_BURST"):
        monkeypatch.setattr(model_pool, name, getattr(model_pool, name))
    monkeypatch.setattr(roster, "OPEN_MAX", 2.0)
