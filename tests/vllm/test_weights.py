"""A vLLM server takes its weights from a sibling, or reads its files where the sibling is gone or sends other bytes."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.listen_address import free_port
from penstock_kv.inside.weights.weight_protocol import LOAD_FORMAT, WEIGHTS_ENV
from tests.kv.transfer.test_weights import Flipping
from tests.live.cluster import post
from tests.vllm.server import MODEL, VllmServer

SECRET = {"PENSTOCK_CLUSTER_SECRET": "a secret of this test only"}
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def weight_process(checkpoint: Path, socket: Path, *words: str) -> Iterator[dict[str, Any]]:
    """Run a weight process; yield what it says."""
    command = [sys.executable, "-m", "penstock", "weights", "serve", str(checkpoint), "--socket", str(socket), *words]
    process = subprocess.Popen(command, env={**os.environ, **SECRET}, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield {**json.loads(process.stdout.readline()), "process": process}
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def flipping(port: int) -> Iterator[int]:
    """Forward a port with one byte turned on the way back, in a thread."""
    loop, cable = asyncio.new_event_loop(), Flipping(port, after=200_000)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(cable.start(), loop).result(10)
        assert cable.flips == 1, "nothing passed"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def text_of(venv: Path, checkpoint: Path, log: Path, socket: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return a server's text at temperature 0, and its log."""
    plugins = log.parent / "plugins" / "penstock-0.dist-info"
    plugins.mkdir(parents=True, exist_ok=True)
    (plugins / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock\nVersion: 0\n")
    (plugins / "entry_points.txt").write_text(
        "[vllm.general_plugins]\npenstock = penstock_kv.inside.weights.vllm_weights:register\n"
    )
    with monkeypatch.context() as of_the_engine:  # these entry points would hide those of this environment
        of_the_engine.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{plugins.parent}")
        of_the_engine.setenv(WEIGHTS_ENV, str(socket))
        server = VllmServer(venv, checkpoint, free_port(), log, flags=["--load-format", LOAD_FORMAT])
    try:
        server.wait_ready()
        body = {"model": MODEL, "prompt": "the river of stone", "max_tokens": 24, "temperature": 0}
        status, answer, _ = post(server.url + "/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"], log.read_text(errors="replace")
    finally:
        server.stop()


def test_the_text_is_the_same_from_a_sibling_and_from_the_files(
    venv: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "w" / "mine.sock"
    with weight_process(checkpoint, tmp_path / "h" / "holder.sock", "--listen", "127.0.0.1:0") as holder:
        sibling = f"127.0.0.1:{holder['port']}"
        with weight_process(checkpoint, mine, "--sibling", sibling):
            text, log = text_of(venv, checkpoint, tmp_path / "sibling.log", mine, monkeypatch)
            assert f"Weights came from {sibling}" in log and "read from the files" not in log
        with (
            flipping(holder["port"]) as port,
            weight_process(checkpoint, mine, "--sibling", f"127.0.0.1:{port}"),
        ):
            damaged, log = text_of(venv, checkpoint, tmp_path / "damaged.log", mine, monkeypatch)
            assert "Weights are read from the files" in log and "Weights came from" not in log
    with weight_process(checkpoint, mine, "--sibling", sibling):  # the holder is gone
        alone, log = text_of(venv, checkpoint, tmp_path / "alone.log", mine, monkeypatch)
        assert "Weights are read from the files" in log and "can't be reached" in log
    assert text and text == damaged == alone
