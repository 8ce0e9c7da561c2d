"""Engines that crash are started again soon."""

import pytest


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch):
    monkeypatch.setattr("penstock.adapters.connectors.replica_lifecycle.RESTART_BACKOFF_MAX", 0.05)
