"""Does anything made from our own description, valid or not, get an answer that the description does not name?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.live.cluster import served, until

SECONDS = int(os.environ.get("PENSTOCK_FUZZ_SECONDS", "45"))
CHECKS = (
    "status_code_conformance",  # a 500 is never described, so one fails
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "negative_data_rejection",
)


def program() -> str:
    found = Path(sys.executable).parent / "schemathesis"
    if not found.exists():
        skip_or_fail("schemathesis", "it is not installed; pip install 'penstock[fuzz]'")
    return str(found)


@pytest.mark.slow
def test_answers_conform_to_the_description(tmp_path: Path) -> None:
    fuzzer = program()
    (tmp_path / "c.yaml").write_text(
        "frontend: {port: 0}\n"
        "models: {sim: {tokenizer: 'builtin:sim', pools: {main: {replicas: 2, sim: {timing: {speed_up: 100}}}}}}\n"
    )
    with served(tmp_path, "up", "c.yaml") as cluster:
        done = subprocess.run(
            [
                fuzzer,
                *("run", f"{cluster.url}/openapi.json", "--checks", ",".join(CHECKS)),
                *("--max-examples", "25", "--max-time", str(SECONDS), "--seed", "1", "--continue-on-failure"),
                *("--request-timeout", "20", "--no-color"),
            ],
            capture_output=True,
            text=True,
            timeout=10 * SECONDS + 120,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert cluster.chat("and afterwards")[0] == 200
        until(lambda: cluster.get("/admin/status")[1]["requests"]["http_inflight"] == 0, 30)
        status = cluster.get("/admin/status")[1]
        assert status["requests"]["inflight"] == 0 and status["router_faults"] == 0, status
        # The log, as the counts of a frontend end with it: the fuzzer asks for restarts too.
        logs = "".join(path.read_text() for path in (cluster.run / "logs").iterdir())
        assert logs.count(" outcome=ok ") > 1 and " outcome=rejected " in logs, logs[-4000:]
        assert "bug of ours" not in logs and "Traceback" not in logs
