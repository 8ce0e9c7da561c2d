"""Does the simulated engine behave as a process? One line with its URL, SIGTERM drains, bad settings end with 2."""

import json
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.live
COMMAND = [sys.executable, "-m", "penstock_lab.sim.sim_process"]


@contextmanager
def engine(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], 30)
        assert ready, "no URL within 30 s"
        yield process, json.loads(process.stdout.readline())["url"]
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def test_it_tells_its_url_serves_and_finishes_what_runs_when_it_is_terminated() -> None:
    settings = {"timing": {"prefill": (0.0, 0.02, 5.0), "decode": (0.0, 0.0, 20.0)}}
    with engine("--model", "m", "--settings", json.dumps(settings)) as (process, url):
        body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 20, "ignore_eos": True, "stream": True}).encode()
        sent = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(sent, timeout=30) as answer:
            assert answer.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            lines = [line for line in answer if line.strip()]
        assert lines[-1].strip() == b"data: [DONE]"
        assert process.wait(20) == 0


def test_its_role_says_which_leg_of_a_bootstrap_it_takes() -> None:
    with engine("--role", "prefill") as (_, url):
        fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7}
        body = json.dumps({"prompt": "x", "max_tokens": 20, "ignore_eos": True, **fields}).encode()
        sent = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(sent, timeout=30) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("settings", "word"),
    [("{", "JSON"), ('{"kv_blocks": "many"}', "kv_blocks"), ('{"max_num_seqs": 9000}', "max_num_batched_tokens")],
)
def test_settings_that_can_not_be_used_end_it_with_2(settings: str, word: str) -> None:
    done = subprocess.run([*COMMAND, "--settings", settings], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and word in done.stderr and not done.stdout
