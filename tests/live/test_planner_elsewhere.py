"""A planner for somebody else's orchestrator: metrics in a real Prometheus, decisions in a real etcd, our example."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.cluster import Served, served, until
from tests.servers import Etcd, Prometheus

pytestmark = pytest.mark.live
ROOT = Path(__file__).resolve().parents[2]

CONFIG = """
models:
  sim:
    pools:
      main: {{engine: vllm, replicas: 1}}
discovery: {{etcd: {{urls: ["{etcd}"]}}}}
planner:
  policy: static
  load_interval: 500ms
  throughput_interval: 1s
  source: prometheus
  connector: virtual
  budget: {{max_gpus: 6}}
  prometheus: {{url: "{prometheus}", window: 2s}}
  virtual: {{namespace: live}}
  plugins:
    use:
      follow: {{module: tests.live.following, name: Follow, stage: propose, options: {{rate: "2", window: "2"}}}}
"""


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    server = Etcd(tmp_path / "etcd")
    server.start()
    yield server
    server.kill()


class Load(threading.Thread):
    """Asks all the time, about ten times per second."""

    def __init__(self, cluster: Served) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.05):
            self.cluster.chat("Hello", max_tokens=4)

    def stop(self) -> None:
        self.over.set()
        self.join()


class Scaler:
    """The example of an external scaler, as a process."""

    def __init__(self, etcd: Etcd) -> None:
        words = [sys.executable, str(ROOT / "examples" / "external_scaler.py"), etcd.url, "live", "--every", "0.05"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.decisions: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.decisions.append(json.loads(line))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.slow
def test_it_reads_a_prometheus_and_somebody_else_carries_its_decisions_out(tmp_path, etcd):
    scaler = Scaler(etcd)
    with served(tmp_path, "up", "--set", "frontend.port=0", "--models.sim.pools.main.replicas", "1") as cluster:
        metrics = Prometheus(tmp_path / "prometheus", [cluster.url.removeprefix("http://")])
        metrics.start()
        load = Load(cluster)
        load.start()
        (tmp_path / "alone.yaml").write_text(CONFIG.format(etcd=etcd.url, prometheus=metrics.url))
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        planner = subprocess.Popen(
            [sys.executable, "-m", "penstock", "planner", "alone.yaml"],
            cwd=tmp_path,
            env=env,
            stdout=(tmp_path / "said").open("w"),
            stderr=subprocess.STDOUT,
        )

        def said() -> str:
            return (tmp_path / "said").read_text()

        try:
            until(
                lambda: planner.poll() is not None or any(d["num_decode_workers"] >= 3 for d in scaler.decisions),
                60,
                said,
            )
            assert planner.poll() is None, said()
            load.stop()
            until(lambda: scaler.decisions[-1]["num_decode_workers"] == 1, 60, said)
        finally:
            load.stop()
            planner.send_signal(signal.SIGINT)
            planner.wait(30)
            metrics.kill()
            scaler.close()
    ids = [decision["decision_id"] for decision in scaler.decisions]
    assert ids == sorted(set(ids))
    assert all(decision["num_prefill_workers"] == 0 for decision in scaler.decisions)
    assert "Prometheus at http://127.0.0.1:" in said()
    assert planner.returncode == 0
