"""The page in a real headless browser: it loads, shows the cluster, and needs nothing from elsewhere."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.live.cluster import served

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=5000"),
]


@pytest.fixture(scope="module")
def browser() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        skip_or_fail("chromium", "no Chromium on this machine")
    assert found is not None
    return found


def dom(browser: str, folder: Path, url: str, *flags: str) -> str:
    """Return a page's document after its scripts have run."""
    done = subprocess.run(
        [browser, *FLAGS, f"--user-data-dir={folder}", *flags, "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_the_page_and_the_report_show_what_happened(browser: str, tmp_path: Path) -> None:
    fast = ["--frontend.port", "0", "--set", "models.sim.pools.main.sim.timing.speed_up=20"]
    with served(tmp_path, "up", *fast) as cluster:
        for number in range(12):
            assert cluster.chat(f"question {number % 3} " * 60)[0] == 200
        page = dom(browser, tmp_path / "profile", f"{cluster.url}/ui")
        for word in ("main-0", "main-3", "kv routing", "exact", "blocks cached"):
            assert word in page, word
        assert not re.search(r"(src|href)=.https?://(?!127\.0\.0\.1)|@import|url\(http", page)
        for size in ("--window-size=420,800", "--window-size=1600,1000"):
            shot = tmp_path / f"{size[-4:]}.png"
            dom(browser, tmp_path / "profile", f"{cluster.url}/ui", size, f"--screenshot={shot}")
            assert shot.stat().st_size > 5_000
        run = cluster.run
    assert "Report: " in cluster.text
    report = dom(browser, tmp_path / "profile", (run / "report.html").as_uri())
    assert "Time to first token" in report and "12 requests" in report
