"""Build hook of a compiled wheel: turns the modules of the hot rooms into machine code with mypyc.

Off by default: a wheel is pure Python. `make fast`, or HATCH_BUILD_HOOKS_ENABLE=1 with any builder, turns it on; it
needs a C compiler. Results are the same to the last digit: `make test-compiled` runs the suites above them on it.
"""

import ast
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOMS = ("kernel", "router", "engine", "simulate", "traffic")
"""Where a simulation and a routing decision spend their time. A gateway's time goes into sockets and libraries."""
LEFT_OUT = {
    "errors.py": "errors of other rooms derive from its own",
    "observer.py": "its methods are replaced by whoever simulates a metric that lies",
    "simulated_cluster.py": "it is there to be subclassed",
}
"""File -> why it stays Python although it could be compiled."""
OPTIMISATION = "2"
"""Of the C compiler: 3 takes a third longer and was no faster."""


class CompiledModules(BuildHookInterface[Any]):
    """Compile the modules of `ROOMS` that can be compiled, and put them into the wheel beside their sources."""

    def dependencies(self) -> list[str]:
        # mypyc reads the types of what the modules import.
        return ["mypy>=2.4,<3", "setuptools", *self.metadata.core.dependencies]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return  # beside sources that are edited, machine code would be of yesterday
        source = Path(self.root, "src")
        modules = sorted(str(path.relative_to(source)) for path in compilable(source / "penstock"))
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
    )
    distribution = Distribution({"name": "penstock", "ext_modules": extensions})
    command = distribution.get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(build / "lib"), str(build / "temp")
    command.ensure_finalized()
    command.run()
