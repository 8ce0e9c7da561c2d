"""Does the double say what it needs where that is missing?"""

import subprocess
import sys

from tests.suites import ROOT

RUN = "import runpy, sys; sys.modules[{0!r}] = None; runpy.run_module('tests.doubles.kubernetes', run_name='__main__')"


def test_a_missing_package_is_named_with_its_installation() -> None:
    for package in ("lightkube", "jsonpatch"):
        command = [sys.executable, "-c", RUN.format(package), "--folder", "/nonexistent"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 1
        assert ended.stderr.startswith(f"the doubles of Kubernetes need {package}: make dev")
