"""Builds llama.cpp's Python package, with its server, into an environment of its own; does only what is missing.

usage: python install.py VENV

The package comes as source: it needs a C++ compiler and some five minutes of two cores.
"""

import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.3.36"
PACKAGES = (f"llama-cpp-python[server]=={VERSION}", "gguf==0.19.0")
CMAKE = "-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAVA_BUILD=OFF -DCMAKE_C_FLAGS_RELEASE=-O1 -DCMAKE_CXX_FLAGS_RELEASE=-O1"
"""Flags of the build type, which the compiler is given last: an -O1 before them had no effect."""
NO_COMPILER = "test-llamacpp builds llama.cpp and found no C++ compiler (c++). Install one (Debian: g++)."
NO_PACKAGE = """\
llama-cpp-python {version} could not be built into {venv}: pip's output above says why. It needs a C++ compiler and
room for 1 GB; cmake and ninja come from the package index."""


def main(venv: Path) -> int:
    """Return the exit status: 2 where something is missing, which is said."""
    python = venv / "bin" / "python"
    if not python.exists():
        print(f"== making {venv}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    asked = "import importlib.metadata as m; print(m.version('llama-cpp-python')); import gguf, uvicorn"
    found = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=False)
    if found.returncode == 0 and found.stdout.strip() == VERSION:
        return 0
    if shutil.which("c++") is None:
        print(NO_COMPILER, file=sys.stderr)
        return 2
    print(f"== building llama-cpp-python {VERSION}: about five minutes", flush=True)
    pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check", "install", *PACKAGES]
    if subprocess.run(["env", f"CMAKE_ARGS={CMAKE}", "CMAKE_BUILD_PARALLEL_LEVEL=2", *pip], check=False).returncode:
        print(NO_PACKAGE.format(version=VERSION, venv=venv), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).expanduser().absolute()))
