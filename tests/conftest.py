"""What all tests share: how a missing outside server is skipped by name, or failed where it is required."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.depth import deep

pytest.register_assert_rewrite("penstock.testing", "tests.kv.transfer")
os.environ.pop("COLUMNS", None)  # tests side by side get one, and commands would break their lines at it

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


def pytest_addoption(parser: pytest.Parser) -> None:
    # An option: the product takes no variable of the environment that it does not know.
    parser.addoption("--outcome", type=Path, help="file into which tests.run wants what came of the tests")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how a test failed that passed the second time, and tell `tests.run` what came of all of them."""
    first_failures: dict[str, str] = {}
    for report in terminalreporter.getreports("rerun"):
        first_failures.setdefault(report.nodeid, report.longreprtext)
    for test, failure in first_failures.items():
        terminalreporter.section(f"first failure of {test}", "-")
        terminalreporter.write_line(failure)
    path: Path | None = terminalreporter.config.getoption("--outcome")
    if path is not None:
        failed = {report.nodeid for outcome in ("failed", "error") for report in terminalreporter.getreports(outcome)}
        passed_later = {test: failure for test, failure in first_failures.items() if test not in failed}
        counts = {outcome: len(terminalreporter.getreports(outcome)) for outcome in ("passed", "skipped")}
        counts |= {"failed": len(failed), "rerun": len(passed_later)}
        path.write_text(json.dumps({"counts": counts, "first_failures": passed_later}))
