"""Every test with a whole frontend runs twice: on the hand-written HTTP and on the plain one, its oracle."""

import inspect

import pytest

from tests.frontend import stand

ON_BOTH = ("access", "admin_routes", "completions", "migration", "nasty_input", "nodelay", "telemetry")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition("test_")[2]
    if name in ON_BOTH and inspect.iscoroutinefunction(metafunc.function):
        metafunc.parametrize("http", ["fast", "plain"], indirect=True)


@pytest.fixture(autouse=True)
def http(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which HTTP carries both sides of the stand."""
    kind = getattr(request, "param", "fast")
    monkeypatch.setattr(stand, "HTTP", kind)
    return str(kind)
