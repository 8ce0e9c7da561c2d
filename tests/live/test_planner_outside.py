"""A served cluster whose planner has a plugin in another process: it registers, bounds, is killed and comes back."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.live.cluster import until
from tests.live.test_planner import AGGREGATED, ROOT, logs, planned, ready

pytestmark = [pytest.mark.live, pytest.mark.slow]
TOKEN = "a-token-of-the-live-tests"
EXAMPLE = ROOT / "examples" / "planner-plugin" / "price_of_day.py"

CONFIG = """
planner:
  policy: static
  load_interval: 500ms
  throughput_interval: 1s
  manual_hold: 0
  start: {{assumed: 2s}}
  tensorboard: {folder}/board
  report: {{interval: 2s}}
  plugins:
    listen: unix://{folder}/plugins.sock
    tokens: {{price-of-day: {token}}}
    heartbeat: 3s
    use:
      want: {{module: tests.live.wanting, name: Want, stage: propose, options: {{replicas: "3"}}}}
"""


@contextmanager
def plugin(folder: Path, log: str, token: str = TOKEN) -> Iterator[subprocess.Popen[bytes]]:
    """The example's cap of two replicas, at every hour."""
    words = ["cap", "--registry", f"unix://{folder}/plugins.sock", "--table", "main=0-24:2"]
    with (folder / log).open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, EXAMPLE, *words], env={**os.environ, "PLUGIN_TOKEN": token}, stderr=file
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def said(run: Path, word: str) -> bool:
    return word in (run / "planner.jsonl").read_text()


def test_a_plugin_in_another_process_bounds_what_is_started(tmp_path: Path) -> None:
    with planned(tmp_path, AGGREGATED + CONFIG.format(folder=tmp_path, token=TOKEN)) as cluster:
        until(lambda: ready(cluster) == {"main": 3}, 30, lambda: logs(cluster))
        with plugin(tmp_path, "wrong.log", token="not-the-right-token-at-all") as wrong:
            assert wrong.wait(30) != 0
            assert "auth_failed" in (tmp_path / "wrong.log").read_text()
        with plugin(tmp_path, "plugin.log") as first:
            until(lambda: ready(cluster) == {"main": 2}, 30, lambda: logs(cluster))
            assert said(cluster.run, "the price allows 2")
            first.send_signal(signal.SIGKILL)
        # Put out once it has been silent for long enough, so that it bounds no more.
        until(lambda: ready(cluster) == {"main": 3}, 30, lambda: logs(cluster))
        assert "price-of-day" in logs(cluster)
        with plugin(tmp_path, "again.log") as again:
            until(lambda: ready(cluster) == {"main": 2}, 30, lambda: logs(cluster))
            again.terminate()
            assert again.wait(30) == 0
        until(lambda: ready(cluster) == {"main": 3}, 30, lambda: logs(cluster))
        report = cluster.run / "planner-report.html"
        until(report.exists, 30, lambda: logs(cluster))
        assert TOKEN not in (cluster.run / "config.yaml").read_text()
        run = cluster.run
    text = report.read_text()
    assert "the price allows 2" in text and TOKEN not in text
    assert said(run, "takes part no more") or said(run, '"result":"error"')  # those ticks went on without it
    (events,) = (tmp_path / "board").iterdir()
    assert b"target/main" in events.read_bytes()
