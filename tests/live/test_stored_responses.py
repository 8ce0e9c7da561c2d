"""Stored responses, files and batches outlive the frontends of a machine, and responses a killed supervisor."""

import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

from penstock.adapters.listen_address import free_port
from penstock.runtime.records.response_folder import response_folder
from tests.live.cluster import Served, alive, post, request, served, until

SECRET_WORDS = "the walrus hides under the third pier"
FAST = ["--set", "models.sim.pools.main.sim.timing.speed_up=20", "--set", "models.sim.pools.main.replicas=1"]


def respond(url: str, text: str, **fields: Any) -> dict[str, Any]:
    status, body, _ = post(f"{url}/v1/responses", {"model": "sim", "input": text, "max_output_tokens": 4, **fields})
    assert status == 200, body
    found: dict[str, Any] = body
    return found


def upload(url: str) -> str:
    """Upload a file; return its id."""
    parts = (
        '--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--b\r\ncontent-disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n{"a": 1}\n\r\n--b--\r\n'
    )
    headers = {"content-type": "multipart/form-data; boundary=b"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/files", data=parts.encode(), headers=headers), timeout=20
    ) as answer:
        import json

        return str(json.load(answer)["id"])


def kill_frontends(cluster: Served) -> None:
    frontends = cluster.children_named(b"frontend", b"--index")
    for pid in frontends:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in frontends), 10)

    def answers() -> bool:
        try:
            return request(f"{cluster.url}/health")[1]["models"]["sim"] > 0
        except (OSError, KeyError):
            return False

    until(answers, 30)


def test_they_outlive_all_frontends_and_leave_nothing_behind(tmp_path: Path) -> None:
    words = ["up", "--frontend.port", str(free_port()), "--frontend.processes", "2", *FAST]
    with served(tmp_path, *words) as cluster:
        first = respond(cluster.url, SECRET_WORDS)
        deleted = respond(cluster.url, "other")["id"]
        assert request(f"{cluster.url}/v1/responses/{deleted}")[0] == 200
        sent = urllib.request.Request(f"{cluster.url}/v1/responses/{deleted}", method="DELETE")
        with urllib.request.urlopen(sent, timeout=20) as answer:
            assert answer.status == 200
        unstored = respond(cluster.url, "never", store=False)["id"]
        file = upload(cluster.url)
        kill_frontends(cluster)
        status, body = request(f"{cluster.url}/v1/responses/{first['id']}")
        assert status == 200 and body["output"] == first["output"]
        again = respond(cluster.url, "and then?", previous_response_id=first["id"])
        items = request(f"{cluster.url}/v1/responses/{again['id']}/input_items")[1]["data"]
        assert SECRET_WORDS in str(items)
        for id in (deleted, unstored):
            assert request(f"{cluster.url}/v1/responses/{id}")[0] == 404
        assert request(f"{cluster.url}/v1/files/{file}")[0] == 200
        run = cluster.run
        assert response_folder(run).exists()
        texts = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET_WORDS.encode() in path.read_bytes()]
        assert texts == [], "no conversation is on a disk"
    assert not response_folder(run).exists(), "an orderly end leaves none behind"


def test_the_next_supervisor_has_those_of_a_killed_one(tmp_path: Path) -> None:
    state = {"PENSTOCK_STATE_DIR": str(tmp_path / "state")}
    words = ["up", "--frontend.port", str(free_port()), *FAST]
    first = Served(words, tmp_path, env=state).wait_up()
    made = respond(first.url, SECRET_WORDS)
    first.process.kill()
    first.process.wait(10)
    with served(tmp_path, *words, env=state) as second:
        assert request(f"{second.url}/v1/responses/{made['id']}")[0] == 200
