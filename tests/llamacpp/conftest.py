"""Where do the llama.cpp tests get their server and their model from? Without them they are skipped by name.

`make test-llamacpp` makes both.
"""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail

ROOT = Path(__file__).resolve().parents[2]
SIM_TOKENIZER = ROOT / "src/penstock_lab/sim/data/tokenizer.json"
VENV = os.environ.get("PENSTOCK_LLAMACPP_VENV")


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python in whose environment llama-cpp-python is."""
    if not VENV:
        skip_or_fail(
            "llamacpp", "these tests start real servers: run `make test-llamacpp`, which builds what they need"
        )
    found = Path(str(VENV)).expanduser() / "bin" / "python"
    if not found.exists():
        skip_or_fail("llamacpp", f"there is no PENSTOCK_LLAMACPP_VENV={VENV}: `make test-llamacpp` makes it")
    return found


@pytest.fixture(scope="session")
def gguf(python: Path) -> Path:
    """The file of the tiny model: made once, and again when its recipe changes."""
    recipe = Path(__file__).parent / "setup" / "model.py"
    digest = hashlib.sha256(recipe.read_bytes()).hexdigest()[:12]
    out = ROOT / "build" / f"tiny-{digest}.gguf"
    if not out.exists():
        out.parent.mkdir(exist_ok=True)
        words = [python, recipe, SIM_TOKENIZER, out]
        made = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
        assert made.returncode == 0, f"{recipe} failed:\n{made.stdout}{made.stderr}"
    return out
