"""Build hook: writes the commit into a wheel, and compiles the modules of the hot rooms with mypyc where it is to.

A wheel is pure Python by default. `make fast`, or HATCH_BUILD_HOOKS_ENABLE=1 with any builder, compiles; that needs a C
compiler. Results are the same to the last digit: `make test-compiled` runs the suites above them on it.
"""

import ast
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOMS = (
    *("penstock/kernel", "penstock/router"),
    *("penstock_lab/engine", "penstock_lab/runs", "penstock_lab/simulate", "penstock_lab/traffic"),
)
"""Where a simulation and a routing decision spend their time. A gateway gains little (docs/why/compiled-build.md)."""
LEFT_OUT = {
    "errors.py": "errors of other rooms derive from its own",
    "observer.py": "its methods are replaced by whoever simulates a metric that lies",
    "simulated_cluster.py": "it is there to be subclassed",
}
"""File -> why it stays Python although it could be compiled."""
OPTIMISATION = "2"
"""Of the C compiler: 3 takes a third longer and was no faster."""


class Build(BuildHookInterface[Any]):
    """Put the commit into a wheel or a source archive, and machine code of `ROOMS` into a wheel."""

    def dependencies(self) -> list[str]:
        # mypyc reads the types of what the modules import.
        return ["mypy>=2.4,<3", "setuptools", *self.metadata.core.dependencies] if compiles() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # beside sources that are edited, both would be of yesterday
        wheel = self.target_name == "wheel"
        if (text := revision(self.root)) is not None:
            with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as file:
                file.write(f"{text}\n")
            self._revision = Path(file.name)
            build_data["force_include"][file.name] = "penstock/build.txt" if wheel else "src/penstock/build.txt"
        if not wheel or not compiles():
            return
        source = Path(self.root, "src")
        modules = sorted(str(path.relative_to(source)) for path in compilable(source))
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-compiled-")  # goes with the builder's process
        build = Path(self._folder.name)
        here = Path.cwd()
        os.chdir(source)
        try:
            compile_into(build, modules, Path(self.root, "pyproject.toml"))
        finally:
            os.chdir(here)
        found = {str(path): str(path.relative_to(build / "lib")) for path in (build / "lib").rglob("*.so")}
        build_data["pure_python"], build_data["infer_tag"] = False, True
        build_data["force_include"].update(found)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_revision"):
            self._revision.unlink(missing_ok=True)


def compiles() -> bool:
    """Return whether machine code is wanted."""
    return os.environ.get("HATCH_BUILD_HOOKS_ENABLE", "") in ("1", "true", "yes")


def revision(root: str) -> str | None:
    """Return the commit and its date, from PENSTOCK_COMMIT or the checkout; None where neither knows them.

    Of a source archive, whose file goes into the wheel as it is, there is none.
    """
    if given := os.environ.get("PENSTOCK_COMMIT"):
        return f"commit {given}"
    if not Path(root, ".git").exists():
        return None
    git = ("git", "-C", root)
    try:
        commit = subprocess.check_output((*git, "describe", "--always", "--dirty", "--exclude=*"), text=True)
        date = subprocess.check_output((*git, "log", "-1", "--format=%cs"), text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"commit {commit.strip()} of {date.strip()}"


def compilable(package: Path) -> Iterator[Path]:
    """Yield the modules to compile: all but those that define what mypyc would change.

    A compiled `msgspec.Struct` loses ``tag``, ``array_like`` and ``frozen`` without a word, so that its bytes on the
    wire change; a compiled Protocol can't be `runtime_checkable`.
    """
    for room in ROOMS:
        for path in (package / room).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            if path.name not in ("__init__.py", *LEFT_OUT) and not any(map(is_left_out, nodes)):
                yield path


def is_left_out(node: ast.AST) -> bool:
    if not isinstance(node, ast.ClassDef):
        return False
    struct = node.keywords or any(ast.unparse(base).endswith("Struct") for base in node.bases)
    return bool(struct) or any(ast.unparse(by) == "runtime_checkable" for by in node.decorator_list)


def compile_into(build: Path, modules: list[str], config: Path) -> None:
    """Compile modules, named from the current folder, into ``build``/lib as one library with an entry for each."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    extensions = mypycify(
        ["--config-file", str(config), *modules],
        opt_level=OPTIMISATION,
        debug_level="0",
        target_dir=str(build / "c"),
        multi_file=True,  # in one file they take the compiler twice as long, and 1.8 GB
    )
    distribution = Distribution({"name": "penstock", "ext_modules": extensions})
    command = distribution.get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(build / "lib"), str(build / "temp")
    command.ensure_finalized()
    command.run()
