"""Processes of this version and of the two before it can work in one cluster: each reads what the other writes.

data/ has what those versions wrote, and the schemas of what they read (`record_messages.py`). Where this checkout has
their history, their own code reads our messages as well, and one of their frontends runs beside one of ours.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from penstock.adapters.listen_address import free_port
from tests.contracts.versions.record_messages import JSON, KINDS, message, type_of
from tests.live.cluster import holders, post, request, served, stream, until

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
VERSIONS = sorted(path.stem for path in (HERE / "data").glob("*.json"))
RECORDED: dict[str, dict[str, Any]] = {
    version: json.loads((HERE / "data" / f"{version}.json").read_text())["kinds"] for version in VERSIONS
}
CASES = [(version, kind) for version in VERSIONS for kind in RECORDED[version]]
READ = """
import base64, json, sys
from record_messages import KINDS, type_of
failed = {}
for kind, text in json.load(sys.stdin).items():
    cls = type_of(kind)
    if cls is not None:
        try:
            KINDS[kind][2].decode(base64.b64decode(text), type=cls)
        except Exception as error:
            failed[kind] = repr(error)
print(json.dumps(failed))
"""


def raw(version: str, kind: str) -> bytes:
    text: str = RECORDED[version][kind]["message"]
    return text.encode() if KINDS[kind][2] is JSON else base64.b64decode(text)


def plain(data: Any) -> Any:
    return json.loads(msgspec.json.encode(data))


def missing(before: Any, after: Any, path: str = "") -> list[str]:
    """Return what of a message got lost when it was read and written again."""
    if isinstance(before, dict):
        return [
            lost
            for name, value in before.items()
            for lost in ([f"{path}.{name}"] if name not in after else missing(value, after[name], f"{path}.{name}"))
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [lost for one, other in zip(before, after, strict=True) for lost in missing(one, other, f"{path}[]")]
    return [] if before == after else [path]


def test_two_versions_are_recorded() -> None:
    assert len(VERSIONS) == 2


def test_we_read_all_that_an_earlier_version_wrote() -> None:
    faults = [f"{version}, {kind}: {fault}" for version, kind in CASES for fault in reading_faults(version, kind)]
    assert not faults, "\n".join(faults)


def reading_faults(version: str, kind: str) -> list[str]:
    codec, cls = KINDS[kind][2], type_of(kind)
    if cls is None:
        return ["a kind that an earlier version sends is no longer read"]
    try:
        decoded = codec.decode(raw(version, kind), type=cls)
    except msgspec.DecodeError as error:
        return [str(error)]
    return [f"{path} got lost" for path in missing(plain(codec.decode(raw(version, kind))), plain(decoded))]


def test_what_we_write_is_what_an_earlier_version_reads() -> None:
    faults = [f"{version}, {kind}: {fault}" for version, kind in CASES for fault in writing_faults(version, kind)]
    assert not faults, "\n".join(faults)


def writing_faults(version: str, kind: str) -> Iterator[str]:
    written = message(kind)
    if written is None:
        yield "is no longer written"
        return
    ours = KINDS[kind][2].decode(written)
    theirs = KINDS[kind][2].decode(raw(version, kind))
    if isinstance(ours, dict) and ours.get("version") != theirs.get("version"):
        yield "a new version is refused by those before it"
    schema = RECORDED[version][kind]["schema"]
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    for error in validator(schema).iter_errors(plain(ours)):
        yield f"{error.json_path}: {error.message}"


@pytest.fixture(params=VERSIONS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the sources of an earlier version, from this checkout's history."""
    archive = subprocess.run(
        ["git", "archive", request.param, "src"], cwd=ROOT, capture_output=True, check=False, timeout=60
    )
    if archive.returncode:
        pytest.skip(f"version {request.param} is not in this checkout's history")
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=archive.stdout, check=True, timeout=60)
    return tmp_path / "src"


def test_the_code_of_an_earlier_version_reads_our_messages(old: Path) -> None:
    ours = {kind: base64.b64encode(written).decode() for kind in KINDS if (written := message(kind)) is not None}
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=json.dumps(ours),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{old}:{HERE}"},
    )
    assert json.loads(done.stdout) == {}


@pytest.mark.slow
def test_an_earlier_frontend_runs_beside_ours_in_one_cluster(old: Path, tmp_path: Path) -> None:
    words = ["up", "--frontend.port", str(free_port()), "--frontend.processes", "2"]
    with served(tmp_path, *words) as cluster:
        # A run folder of its own, for a config without what that version does not know; the store is the cluster's.
        run = tmp_path / "old-run"
        run.mkdir()
        (run / "config.yaml").write_text(f"frontend:\n  port: {free_port()}\n  processes: 2\n")
        (run / "discovery").symlink_to(cluster.run / "discovery")
        for name in ("run.json", "cluster.secret"):
            shutil.copy(cluster.run / name, run / name)
        with (run / "log").open("wb") as log:
            theirs = subprocess.Popen(
                [sys.executable, "-m", "penstock.frontend.frontend_process", "--run", str(run), "--index", "1"],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(old)},
            )
        try:
            assert theirs.stdout is not None
            url = json.loads(theirs.stdout.readline())["url"]
            until(lambda: len(cluster.get("/admin/status")[1]["frontends"]) == 3, 10)
            prompt = "a prompt that both frontends get " * 100
            body = {"model": "sim", "messages": [{"role": "user", "content": prompt}], "max_tokens": 8}
            status, _, headers = post(f"{url}/v1/chat/completions", body)
            assert status == 200
            chosen = request(f"{url}/admin/explain/{headers['x-request-id']}")[1]["decisions"][-1]["chosen"][0]
            until(lambda: holders(cluster, prompt) == {chosen}, 10)
            events = stream(f"{url}/v1/chat/completions", {**body, "stream": True, "max_tokens": 300})
            next(events)
            until(lambda: any(worker["active_blocks"] for worker in cluster.get("/admin/status")[1]["workers"]), 5)
            assert list(events)[-1] == "[DONE]"
            for state in (cluster.get("/admin/status")[1], request(f"{url}/admin/status")[1]):
                assert not [finding for finding in state["findings"] if "release" in finding["text"]]
        finally:
            theirs.terminate()
            theirs.wait(30)
