"""Build revision: the commit that this Penstock was made of, and its date."""

import subprocess
from pathlib import Path

import penstock

GIT_TIMEOUT = 5.0


def build_revision() -> str:
    """Return the commit and its date: as the wheel's builder wrote them, else as git has them beside the sources."""
    package = Path(penstock.__file__).parent
    try:
        return package.joinpath("build.txt").read_text().strip()
    except OSError:
        return _of_checkout(package.parents[1]) or "unknown commit"


def _of_checkout(root: Path) -> str | None:
    """Return the commit of a checkout, with whether its files differ from it; None where it is none."""
    git = ("git", "-C", str(root))
    if not (root / ".git").exists():
        return None
    try:
        commit = subprocess.run(
            (*git, "describe", "--always", "--dirty", "--exclude=*"),
            capture_output=True, text=True, timeout=GIT_TIMEOUT, check=True,
        )  # fmt: skip
        date = subprocess.run(
            (*git, "log", "-1", "--format=%cs"), capture_output=True, text=True, timeout=GIT_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"commit {commit.stdout.strip()} of {date.stdout.strip()}"
