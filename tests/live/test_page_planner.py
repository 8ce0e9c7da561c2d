"""The planner's part of the page in a real browser: over a recorded run whose planner's records are known."""

import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.lab.report.planner_runs import wave
from tests.live.browser import Page, chromium
from tests.live.test_page import recorded

ROWS = "document.querySelectorAll('#planner-decisions tbody tr').length"
DRAWN = "document.getElementById('{}')?.figure.plot?.data.slice(1).flat().some(one => one != null)"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run of four minutes, and what a planner would have written beside it."""
    chromium()
    folder = tmp_path_factory.mktemp("simulated")
    words = ["simulate", "--workload", "chat", "--rate", "4", "--duration", "240", "--workers", "2", "--json"]
    subprocess.run(
        [sys.executable, "-m", "penstock", *words, "--out", str(folder)], check=True, capture_output=True, timeout=120
    )
    (found,) = folder.iterdir()
    return found


async def test_a_run_without_a_planner_has_no_part_of_it(run: Path, tmp_path: Path) -> None:
    (run / "planner.jsonl").unlink(missing_ok=True)
    async with recorded(run, tmp_path) as page:
        await page.until("!!document.querySelector('#chart-demand canvas')")
        assert await page.ask("document.getElementById('planner').hidden")


async def test_what_the_planner_did_follows_the_moment(run: Path, tmp_path: Path) -> None:
    ticks = wave(48, lambda n: 10 + 8 * math.sin(n / 6))
    (run / "planner.jsonl").write_bytes(b"".join(msgspec.json.encode(tick) + b"\n" for tick in ticks))
    async with recorded(run, tmp_path) as page:
        for name in ("chart-planner-demand-m", "chart-planner-pool-decode", "chart-planner-gpus"):
            await page.until(DRAWN.format(name))
        changed = [tick for tick in ticks if tick.outcome == "apply"]
        await page.until(f"{ROWS} === {min(12, len(changed))}")
        assert await page.ask(
            "document.querySelector('#planner-decisions td.wrap').textContent.includes('replicas bear')"
        )
        first = changed[0].at
        await _go(page, first + 1.0)
        await page.until(f"{ROWS} === 1")
        assert f"tick {changed[0].tick} at" in await page.text("#planner-about")
        wanted = changed[0].pools["decode"].target
        keys = "[...document.querySelectorAll('#chart-planner-pool-decode .key')].map(key => key.textContent)"
        assert f"wanted {wanted}" in json.dumps(await page.ask(keys))
        assert page.complaints == []


async def _go(page: Page, at: float) -> None:
    """Move the slider, as a person does."""
    script = (
        "const slider = document.getElementById('moment'); slider.value = {}; slider.dispatchEvent(new Event('input'))"
    )
    await page.ask(f"(() => {{ {script.format(at)} }})()")
