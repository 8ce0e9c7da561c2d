"""The double of a whole cluster as a process: API server, controllers, nodes and pods."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.conftest import skip_or_fail
from tests.suites import ROOT


class ClusterProcess(NamedTuple):
    """A cluster that runs, and the process that is it."""

    kubeconfig: Path
    folder: Path
    process: "subprocess.Popen[str]"


def need_namespaces() -> None:
    """Skip a test by name where pods can't have networks of their own."""
    missing = [name for name in ("ip", "nsenter", "openssl") if shutil.which(name) is None]
    if missing:
        skip_or_fail("namespaces", f"the command {missing[0]} is not here")
    if os.geteuid() != 0:
        skip_or_fail("namespaces", "pods with networks of their own need root")
    probe = ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "add", "v0", "type", "veth"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        skip_or_fail("namespaces", "this machine gives no network namespaces or no veth devices")


@contextmanager
def running_cluster(folder: Path, **script: object) -> Iterator[ClusterProcess]:
    """Run a cluster with a script's fields."""
    need_namespaces()
    (folder / "script.json").write_text(json.dumps(whole(script)))
    command = [sys.executable, "-m", "tests.doubles.kubernetes", "--folder", str(folder), "--kubelet"]
    command += ["--script", str(folder / "script.json")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline() or "{}")
        assert first, (folder / "log").read_text()
        yield ClusterProcess(Path(first["kubeconfig"]), folder, process)
    finally:
        process.terminate()
        process.wait(20)


def whole(script: Mapping[str, object]) -> dict[str, object]:
    """Return a script with an image that can't be pulled."""
    return {"images": {"absent": {"failures": -1}}, **script}
