"""Transformers' own server, as it comes with vLLM's environment: is it taken by the name of its model alone?

One is pinned to the model and has no cache of the hub: its list answers 500. One loads what it is asked for and has an
empty cache: its list is empty. Both answer chats.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.adapters.listen_address import free_port
from tests.conftest import skip_or_fail
from tests.live.cluster import Served, post, request, served, stream, until

START_LIMIT = 240.0
"""Seconds: 22 on an idle machine, two at a time."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


class TransformersServer:
    """One ``transformers serve``; without a ``model`` it loads those that requests name."""

    def __init__(self, venv: Path, folder: Path, model: Path | None) -> None:
        self.url, self._log = f"http://127.0.0.1:{(port := free_port())}", folder / "log"
        command = [venv / "bin" / "transformers", "serve", *(() if model is None else (model,))]
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **OFFLINE, "HF_HOME": str(folder / "hub")},
            )

    def wait_ready(self) -> None:
        until(lambda: self.process.poll() is not None or self._answers(), START_LIMIT, self._log.read_text)
        assert self.process.poll() is None, self._log.read_text()

    def _answers(self) -> bool:
        try:
            return request(f"{self.url}/health")[0] == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def servers(
    venv: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TransformersServer, TransformersServer]]:
    probe = [venv / "bin" / "python", "-c", "import accelerate"]
    if subprocess.run(probe, capture_output=True, check=False, timeout=60).returncode:
        skip_or_fail(
            "vllm", f"accelerate, which `transformers serve` needs, is not in {venv}: `make test-vllm` adds it"
        )
    empty = tmp_path_factory.mktemp("empty")
    (empty / "hub" / "hub").mkdir(parents=True)
    pinned = TransformersServer(venv, tmp_path_factory.mktemp("pinned"), checkpoint)
    free = TransformersServer(venv, empty, None)
    try:
        for server in (pinned, free):
            server.wait_ready()
        yield pinned, free
    finally:
        for server in (pinned, free):
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def front(
    servers: tuple[TransformersServer, TransformersServer], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    urls = [server.url for server in servers]
    arguments = ["attach", *urls, "--model", str(checkpoint), "--frontend.port", "0"]
    with served(tmp_path_factory.mktemp("attach"), *arguments) as cluster:
        yield cluster


def test_without_a_name_attach_says_that_one_is_needed(
    servers: tuple[TransformersServer, TransformersServer], tmp_path: Path
) -> None:
    for server, why in zip(servers, ("answers with status 500", "lists no model"), strict=True):
        command = [sys.executable, "-m", "penstock", "attach", server.url, "--frontend.port", "0"]
        said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        assert said.returncode == 1 and f"/v1/models {why} (give --model NAME" in said.stderr


def test_both_answer_as_they_do_by_themselves(
    servers: tuple[TransformersServer, TransformersServer], front: Served, checkpoint: Path
) -> None:
    workers = set()
    for number in range(12):  # an idle pool takes turns where caches say nothing
        status, answer, headers = front.chat(f"{number} ba ke", model=str(checkpoint), max_tokens=6)
        assert status == 200, answer
        body = {"model": str(checkpoint), "messages": [{"role": "user", "content": f"{number} ba ke"}], "max_tokens": 6}
        _, own, _ = post(f"{servers[0].url}/v1/chat/completions", body)
        assert (answer["choices"], answer["usage"]) == (own["choices"], own["usage"])
        workers.add(headers["x-penstock-worker"])
    assert workers == {"attached-0", "attached-1"}
    body = {"model": str(checkpoint), "messages": [{"role": "user", "content": "ba ke"}], "max_tokens": 6}
    lines = list(stream(f"{front.url}/v1/chat/completions", {**body, "stream": True}))
    text = "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines if line != "[DONE]")
    assert text == post(f"{servers[0].url}/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
    status, answer, _ = front.chat(model=str(checkpoint), nonsense=1)
    assert (status, answer) == (422, {"detail": "Unexpected fields in the request: {'nonsense'}"})


def test_status_and_doctor_say_that_the_lists_are_of_no_use(front: Served, checkpoint: Path) -> None:
    findings = [each["text"] for each in front.get("/admin/status")[1]["findings"]]
    for worker in ("attached-0", "attached-1"):
        assert any(text.startswith(f"{worker} serves {checkpoint} by the word of the settings") for text in findings)
    command = [sys.executable, "-m", "penstock", "doctor", "--url", front.url, "--json"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert [each for each in json.loads(said.stdout)["findings"] if each["level"] == "error"] == []


def test_one_that_is_killed_is_missed_and_requests_go_on(
    servers: tuple[TransformersServer, TransformersServer], front: Served, checkpoint: Path
) -> None:
    servers[1].process.kill()
    for number in range(6):
        status, answer, headers = front.chat(f"{number} li mo", model=str(checkpoint), max_tokens=2)
        assert (status, headers.get("x-penstock-worker")) == (200, "attached-0"), answer

    def missed() -> bool:
        return [row["id"] for row in front.get("/admin/status")[1]["workers"]] == ["attached-0"]

    until(missed, 60.0)
