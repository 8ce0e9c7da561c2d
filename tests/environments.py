"""What suites need beside `.venv`: environments and programs, each made in the background where it can be."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Environment:
    """Something that a command makes; run again, the command does only what is missing.

    Args:
        command: makes it, from the repository's root.
        python: what runs the tests with it, where that is not `.venv`'s.
        variables: of the environment -> its value, the path of what was made.
        beside: whether it can be made while tests run: not where `.venv` itself changes.
        asked: whether the rings `gate` and `nightly` need PENSTOCK_REQUIRE to name it.
        optional: whether the tests skip by name without it.
    """

    command: tuple[str, ...]
    python: Path = ROOT / ".venv/bin/python"
    variables: dict[str, str] = field(default_factory=dict)
    beside: bool = True
    asked: bool = False
    optional: bool = False


def folder(variable: str, default: str) -> str:
    """Return where something is made: where a variable of the environment says, or below the repository's root."""
    return str((ROOT / Path(os.environ.get(variable) or default).expanduser()).absolute())


@cache
def newest_python() -> str:
    """Return the newest Python at hand: the compiled build is tried on another than the rest."""
    managed = sorted(Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob("versions/3.1[23].*/bin/python3"))
    for candidate in ("python3.13", "python3.12", *map(str, managed)):
        found = shutil.which(candidate)  # pyenv's stand-in for one that is not switched on is found, and does not run
        if found and subprocess.run([found, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return found
    return "python3"


VLLM = folder("PENSTOCK_VLLM_VENV", ".venv-vllm")
SGLANG = folder("PENSTOCK_SGLANG_VENV", ".venv-sglang")
LLAMACPP = folder("PENSTOCK_LLAMACPP_VENV", ".venv-llamacpp")
PROGRAMS = folder("PENSTOCK_K8S_PROGRAMS", ".programs")
AGENTS = str(ROOT / "build/agents")
CODING_AGENTS = ("@openai/codex@0.171.0", "@anthropic-ai/claude-code@2.1.197")
PYTHON = str(ROOT / ".venv/bin/python")
ENVIRONMENTS = {
    "clients": Environment(("make", ".venv/.clients"), beside=False),
    "nat": Environment(
        ("make", ".venv-nat/.installed"), variables={"PENSTOCK_NAT": str(ROOT / ".venv-nat/bin/nat")}, optional=True
    ),
    "agents": Environment(
        ("npm", "install", "--prefix", AGENTS, "--no-audit", "--no-fund", *CODING_AGENTS),
        variables={f"PENSTOCK_{name.upper()}": f"{AGENTS}/node_modules/.bin/{name}" for name in ("codex", "claude")},
        optional=True,
    ),
    "docs": Environment(("make", ".venv-docs/.installed")),
    "release": Environment(("make", ".venv-release/.installed")),
    "kubernetes": Environment(
        (PYTHON, "tests/kubernetes/setup/install.py", PROGRAMS),
        variables={"PENSTOCK_K8S_PROGRAMS": PROGRAMS},
        asked=True,
    ),
    "compiled": Environment(
        ("make", f"PYTHON={newest_python()}", ".venv-fast/.dev"), python=ROOT / ".venv-fast/bin/python"
    ),
    "vllm": Environment(
        (PYTHON, "-m", "tests.vllm.setup.install", VLLM), variables={"PENSTOCK_VLLM_VENV": VLLM}, asked=True
    ),
    "sglang": Environment(
        (PYTHON, "-m", "tests.sglang.setup.install", SGLANG), variables={"PENSTOCK_SGLANG_VENV": SGLANG}, asked=True
    ),
    "llamacpp": Environment(
        (PYTHON, "tests/llamacpp/setup/install.py", LLAMACPP),
        variables={"PENSTOCK_LLAMACPP_VENV": LLAMACPP},
        asked=True,
    ),
    "nixl": Environment(("make", "nixl"), beside=False, asked=True),
}


class Environments:
    """The environments of a run, made one after the other at the lowest priority while the first suites run."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(dict.fromkeys(names))
        self._making: dict[str, subprocess.Popen[bytes]] = {}
        self._made: dict[str, bool] = {}

    def __enter__(self) -> "Environments":
        for name in self._names:
            if ENVIRONMENTS[name].beside:
                self._making[name] = self._start(name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._making.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def ready(self, name: str) -> bool:
        """Wait until an environment is made; say whether tests can run, and show its log where they can't."""
        if name not in self._made:
            process = self._making.pop(name, None) or self._start(name)
            self._made[name] = process.wait() == 0
            if not self._made[name]:
                print(_log(name).read_text(errors="replace"), file=sys.stderr, flush=True)
        return self._made[name] or ENVIRONMENTS[name].optional

    def of(self, names: Iterable[str]) -> tuple[Path, dict[str, str]]:
        """Return the Python and the variables with which tests run in environments that are ready."""
        python, variables = Path(PYTHON), dict[str, str]()
        for name in names:
            if self._made[name]:
                variables |= ENVIRONMENTS[name].variables
                if ENVIRONMENTS[name].python != Path(PYTHON):
                    python = ENVIRONMENTS[name].python
        return python, variables

    def _start(self, name: str) -> "subprocess.Popen[bytes]":
        log = _log(name)
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as file:
            return subprocess.Popen(
                ["nice", "-n", "19", *ENVIRONMENTS[name].command],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its compilers and installers end with it
            )


def _log(name: str) -> Path:
    return ROOT / "build" / f"{name}.log"
