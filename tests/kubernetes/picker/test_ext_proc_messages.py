"""Our coding of ext_proc's messages, held to the compiled ones of xds-protos in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.kubernetes.programs import python_packages

ORACLE = Path(__file__).with_name("ext_proc_oracle.py")


def test_our_coding_is_that_of_the_compiled_messages() -> None:
    folder = python_packages("xds", "envoy/service/ext_proc/v3")
    paths = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ORACLE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    root = ORACLE.parents[3]
    done = subprocess.run(words, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
