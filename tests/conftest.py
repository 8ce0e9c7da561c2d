"""What all tests share: how a missing outside server is skipped by name, or failed where it is required."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.depth import deep

pytest.register_assert_rewrite("penstock.testing")

settings.register_profile(
    "penstock",
    max_examples=deep(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
settings.load_profile("penstock")

REQUIRED = {name for name in os.environ.get("PENSTOCK_REQUIRE", "").split(",") if name}


def skip_or_fail(name: str, reason: str) -> None:
    """Skip a test whose outside thing is missing; fail it where PENSTOCK_REQUIRE names that thing."""
    if name in REQUIRED:
        pytest.fail(f"PENSTOCK_REQUIRE names {name}, but {reason}")
    pytest.skip(f"{name}: {reason}")


def traces_folder() -> Path | None:
    """Return the folder with public traces: PENSTOCK_TRACES, or ../shared/traces beside the checkout."""
    here = Path(__file__).resolve().parents[1]
    for candidate in (os.environ.get("PENSTOCK_TRACES"), here.parent / "shared" / "traces"):
        if candidate and Path(candidate).is_dir():
            return Path(candidate)
    return None


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder with public traces; tests that need it skip where it is absent."""
    found = traces_folder()
    if found is None:
        pytest.skip("traces: no folder with public traces; set PENSTOCK_TRACES")
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how a test failed that passed the second time: else nobody could say whether the machine was at fault."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"first failure of {report.nodeid}", "-")
        terminalreporter.write_line(report.longreprtext)
