"""Environments of real engines: a Python for one, packages in it, and lines of theirs that are to be others.

Engines never are dependencies of Penstock: each has an environment of gigabytes, with other versions of libraries. The
script that makes one does only what is missing, and ends with status 2 where something can't be had.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NIXL = "1.5.1"
"""What carries KV between servers; of its builds one that loads without CUDA, and none of its requirements."""
NIXL_PACKAGES = (f"nixl=={NIXL}", f"nixl-cu12=={NIXL}")
NIXL_FILE = "nixl_cu12/_api.py"
NIXL_THREAD = ("agent_config.pthrDelay = 0\n", "agent_config.pthrDelay = 1000\n")
"""What NIXL's Python layer sets, and what it is to be: the microseconds for which the thread that drives UCX may sleep.
At 0 it never sleeps, and two servers keep both cores of a small machine busy for nothing: one does not hear the other
then within the five seconds that vLLM waits for a handshake."""

NO_PYTHON = """\
{what} needs Python 3.11, for which the engine's CPU build has its torch wheel, and found none.
  Install it (Debian: python3.11 and python3.11-venv; pyenv: pyenv install 3.11), or name one that you have:
  make {what} PYTHON311=PATH
"""
NO_PACKAGE = """\
{package} could not be installed into {venv}.
  It needs torch's CPU wheel (torch==...+cpu). Where pip does not find that by itself, say where it is with
  PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS. The environment takes 3.5 GB while it is made.
"""
VERSIONS = """\
import importlib.metadata as metadata, json
print(json.dumps({d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}))
"""


class Failed(Exception):
    """The environment can't be made; the message says why and what to do."""


def main(install: Callable[[Path], None], arguments: Sequence[str]) -> int:
    """Make the environment that the first argument names; return the exit status."""
    try:
        install(Path(arguments[0]).expanduser().absolute())
    except Failed as error:
        print(error, file=sys.stderr)
        return 2
    return 0


class EngineVenv:
    """An environment of Python 3.11 in a folder, made where it is not there.

    Args:
        what: the target of the Makefile that wants it.
    Raises:
        Failed: there is no Python 3.11.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        if not self.python.exists():
            base = python311(what)
            print(f"== making {folder} with {base}", flush=True)
            if run([base, "-m", "venv", str(folder)]):
                raise Failed(f"{base} -m venv {folder} failed: Debian has the module in python3.11-venv")

    def versions(self) -> dict[str, str]:
        """Return what is installed: name in lower case -> version."""
        said = subprocess.run([str(self.python), "-c", VERSIONS], capture_output=True, text=True, check=False)
        if said.returncode:
            raise Failed(f"{self.python} does not work; remove its folder and try again:\n{said.stderr.strip()}")
        found: dict[str, str] = json.loads(said.stdout)
        return found

    def room(self, bytes_needed: int) -> None:
        """Raise `Failed` where the disk has no room for what the installation takes for a while."""
        free = shutil.disk_usage(self.folder).free
        if free < bytes_needed:
            needs = f"needs {bytes_needed >> 30} GiB of disk while it is made"
            raise Failed(f"{self.folder} {needs}, and {free >> 30} GiB are free")

    def pip(self, *arguments: str) -> int:
        """Run pip in it; return its exit status."""
        return run([str(self.python), "-m", "pip", "-q", "--disable-pip-version-check", *arguments])

    def patch(self, patches: Mapping[str, tuple[str, str]]) -> None:
        """Change lines of installed files: file -> a line as it comes, and as it is to be."""
        for name, (comes, wanted) in patches.items():
            (file,) = self.folder.glob(f"lib/python3*/site-packages/{name}")
            text = file.read_text()
            if wanted in text:
                continue
            if comes not in text:
                raise Failed(f"{file} has no line {comes.strip()!r}, which the installed version has: see {__file__}")
            file.write_text(text.replace(comes, wanted))


def made(venv: Path, recipe: Path, prefix: str) -> Path:
    """Return the folder that a recipe, a script run in an environment, makes: once, and again when it changes."""
    digest = hashlib.sha256(recipe.read_bytes()).hexdigest()[:12]
    folder = ROOT / "build" / f"{prefix}-{digest}"
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes may run tests
        if not folder.is_dir():
            done = subprocess.run(
                [venv / "bin" / "python", recipe, folder], capture_output=True, text=True, check=False, timeout=300
            )
            assert done.returncode == 0, f"{recipe} failed:\n{done.stdout}{done.stderr}"
    return folder


def python311(what: str) -> str:
    """Return a Python 3.11: PYTHON311, this one, the one in PATH, or a version manager's.

    Raises:
        Failed: there is none.
    """
    managed = sorted(
        (Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions").glob("3.11*/bin/python3.11")
    )
    wanted = os.environ.get("PYTHON311")
    for candidate in [wanted] if wanted else [sys.executable, shutil.which("python3.11"), *map(str, managed)]:
        if candidate and not run(
            [candidate, "-c", "import sys; sys.exit(sys.version_info[:2] != (3, 11))"], quiet=True
        ):
            return candidate
    text = NO_PYTHON.format(what=what)
    raise Failed(text if not wanted else f"PYTHON311={wanted} is no Python 3.11\n{text}")


def run(command: Sequence[str], *, quiet: bool = False) -> int:
    """Run a command; return its exit status, 127 where it can't be started."""
    try:
        out = subprocess.DEVNULL if quiet else None
        return subprocess.run(command, stdout=out, stderr=out, check=False).returncode
    except OSError:
        return 127
