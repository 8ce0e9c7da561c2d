"""Programs of others that tests run: in the folder that PENSTOCK_K8S_PROGRAMS names, or on the path; and packages."""

import os
import shutil
from pathlib import Path

from tests.conftest import skip_or_fail

DEBIAN = ("buildah", "mmdebstrap")
"""Those that a package of Debian has, and no wheel."""


def program(name: str) -> Path:
    """Return a program, or skip the test by its name."""
    folder = os.environ.get("PENSTOCK_K8S_PROGRAMS")
    if folder and (path := Path(folder).expanduser() / "bin" / name).exists():
        return path
    if (there := shutil.which(name)) is None:
        hint = f"apt-get install {name}" if name in DEBIAN else "run `make test-kubernetes`, which fetches it"
        skip_or_fail(name, f"it is not here: {hint}")
    return Path(str(there))


def python_packages(name: str, package: str) -> Path:
    """Return the folder of packages that may not be installed beside ours, or skip the test by a name."""
    folder = os.environ.get("PENSTOCK_K8S_PROGRAMS")
    if not folder or not (path := Path(folder).expanduser() / "python").joinpath(package).is_dir():
        skip_or_fail(name, f"{package} is not here: run `make test-kubernetes`, which fetches it")
    return path
