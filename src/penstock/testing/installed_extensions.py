"""Extensions in tests: a package's entry points as pip would install them, without pip."""

import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock import extension


@contextmanager
def extension_installed(folder: Path, name: str, target: str) -> Iterator[None]:
    """Have an extension, within the block, as if a distribution of that name declared it.

    Args:
        folder: where to write the distribution's metadata; modules in it can be imported as well.
        target: ``module:attribute`` of its `penstock.extension.Extension`.
    """
    info = folder / f"{name.replace('-', '_')}-0.0.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(f"[{extension.GROUP}]\n{name} = {target}\n")
    sys.path.insert(0, str(folder))
    extension.installed.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        extension.installed.cache_clear()


@contextmanager
def project_installed(project: Path, folder: Path) -> Iterator[None]:
    """Have the extensions, within the block, that a project's ``pyproject.toml`` declares.

    Args:
        project: its folder, in which its modules can be imported; ``folder``: where to write metadata.
    """
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    ((_, target),) = declared["entry-points"][extension.GROUP].items()
    sys.path.insert(0, str(project))
    try:
        with extension_installed(folder, declared["name"], target):
            yield
    finally:
        sys.path.remove(str(project))
