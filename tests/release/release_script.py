"""deploy/release.py as a module, and a copy of the checkout in which a test may change versions."""

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_script", ROOT / "deploy/release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copied(folder: Path, *paths: str) -> Path:
    """Copy what git knows of these paths, or of everything, into a folder; the copy has no history."""
    listed = subprocess.check_output(["git", "-C", ROOT, "ls-files", *paths], text=True).splitlines()
    for name in listed:
        if (ROOT / name).is_file():  # one that is about to be committed as gone is listed, too
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder
