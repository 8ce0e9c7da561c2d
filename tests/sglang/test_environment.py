"""Is a stock SGLang there, in an environment of its own, in the state that the other tests need?"""

import subprocess
from pathlib import Path

from tests.engine_venv import NIXL, EngineVenv
from tests.sglang.setup.install import SERVER_ENV, SGLANG

ASK = """\
import sgl_kernel, torchvision.transforms
for call in (sgl_kernel.rmsnorm, torchvision.transforms.ToTensor):
    try:
        call()
    except NotImplementedError as error:
        print(error)
"""


def test_sglang_is_there(venv: Path) -> None:
    found = EngineVenv(venv, "test-sglang").versions()
    assert found["sglang"] == SGLANG and found["nixl"] == NIXL
    assert "torchvision" not in found, "its build in the package index is for CUDA, and keeps SGLang from starting"


def test_a_stand_in_says_what_it_can_not_do(venv: Path) -> None:
    said = subprocess.run(
        [venv / "bin" / "python", "-c", ASK], capture_output=True, text=True, env=SERVER_ENV, check=True
    )
    assert "sgl_kernel.rmsnorm has no stand-in" in said.stdout and "ToTensor of torchvision has none" in said.stdout
