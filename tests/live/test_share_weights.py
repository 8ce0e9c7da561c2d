"""A pool that shares its weights: an engine of another supervisor takes them from the first one's weight process."""

import os
import shutil
from pathlib import Path

import pytest

from tests.kv.transfer.test_weights import checkpoint
from tests.live.cluster import Served, served, until
from tests.live.test_operate import penstock
from tests.live.test_serve_vllm import model, program  # noqa: F401  # fixtures


def test_a_simulated_replica_that_joins_a_serving_one_starts_sooner(tmp_path: Path) -> None:
    """The planner takes its start-up times from the records that are looked at here."""
    knobs = {"replicas": 1, "share_weights": "true", "sim.load_time": 2.0, "sim.sibling_load_time": 0.1}
    words = [word for name, value in knobs.items() for word in ("--set", f"models.sim.pools.main.{name}={value}")]
    with served(tmp_path, "up", *words, "--set", "frontend.port=0") as up:
        penstock(up, "scale", "main=2")
        first, joined = (each["start"] for each in up.get("/admin/desired")[1]["pools"][0]["replicas"])
        assert first["phases"]["weights"] >= 2.0 > 1.0 > joined["phases"]["weights"] >= 0.1


@pytest.mark.slow
def test_an_engine_that_joins_takes_its_weights_from_a_sibling(
    tmp_path: Path,
    program: Path,  # noqa: F811
    model: Path,  # noqa: F811
) -> None:
    checkpoint(tmp_path / "weights")
    for path in (tmp_path / "weights").iterdir():
        shutil.copy(path, model)
    copy = tmp_path / "elsewhere" / model.name
    shutil.copytree(model, copy)
    plugins = tmp_path / "plugins" / "penstock-0.dist-info"
    plugins.mkdir(parents=True)
    (plugins / "entry_points.txt").write_text("[vllm.general_plugins]\npenstock = a:b\n")
    python = os.pathsep.join(each for each in (os.environ.get("PYTHONPATH", ""), str(plugins.parent)) if each)
    env = {**os.environ, "FAKE_PATIENCE": "1"}
    pool = ["--engine", "vllm", "--command", str(program), "--block_size", "32", "--share_weights", "true"]
    pool += ["--env", f"{{PYTHONPATH: '{python}'}}"]  # of the engines alone: it hides our entry points
    with served(tmp_path, "serve", str(model), *pool, "--frontend.port", "0", env=env) as up:
        assert up.chat("Hello", model=model.name)[0] == 200
        assert "weights from the files" in (up.run / "logs" / "main-0.log").read_text()
        until(lambda: bool(up.keys("weights/")), 30.0, lambda: up.text)
        words = ["join", "--run", str(up.run), "--model", model.name, "--model_path", str(copy), *pool]
        joined = Served(words, tmp_path, env={**env, "FAKE_PATIENCE": "60"})
        try:
            logs = up.run / "logs"
            until(
                lambda: "tensors" in "".join(p.read_text() for p in logs.glob("*joined*.log")),
                40.0,
                lambda: joined.text,
            )
            text = "".join(path.read_text() for path in logs.glob("*joined*.log"))
            assert "weights from 127.0.0.1:" in text and "10 tensors" in text
        finally:
            joined.stop()
        until(lambda: len(up.keys("weights/")) == 1, 30.0)
