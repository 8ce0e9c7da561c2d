"""The results of `make nightly`: docs/reference/nightly.json, its table on the site, and what changed since."""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs/reference/nightly.json"
COLUMNS = ("passed", "failed", "rerun", "skipped", "seconds")
KEPT = 4_000
"""Characters of a first failure that are kept: its end, where the error stands."""


@dataclass
class Outcome:
    """What came of a suite."""

    passed: int = 0
    failed: int = 0
    """Errors of set-up and tear-down are failures, and so is a run that broke off."""
    rerun: int = 0
    """Tests that passed the second time only."""
    skipped: int = 0
    seconds: float = 0.0
    first_failures: dict[str, str] = field(default_factory=dict)
    """Test that was run a second time -> how it failed the first time."""


@dataclass
class Row:
    """The last nightly run of a suite."""

    commit: str
    date: str
    passed: int
    failed: int
    rerun: int
    skipped: int
    seconds: int


@dataclass
class Flake:
    """A test that passed only in its second run.

    It stays here until the commit that mends it, or takes it away, takes this out.
    """

    dates: list[str]
    failure: str
    """How it failed the first time, in its last such run."""


@dataclass
class Results:
    """What docs/reference/nightly.json holds: the last run of all, and of each suite, since one can be run again."""

    commit: str = ""
    date: str = ""
    machine: str = ""
    suites: dict[str, Row] = field(default_factory=dict)
    flakes: dict[str, Flake] = field(default_factory=dict)

    def green(self, suite: str) -> str:
        """Return the commit at which a suite last ran, if all of it passed then; else nothing."""
        row = self.suites.get(suite)
        return row.commit if row and row.passed and not row.failed else ""

    @property
    def flaky_twice(self) -> list[str]:
        """Tests that passed only in their second run on two days: to be mended, or to go."""
        return sorted(test for test, flake in self.flakes.items() if len(flake.dates) > 1)


def read() -> Results:
    if not FILE.exists():
        return Results()
    data: dict[str, Any] = json.loads(FILE.read_text())
    data["suites"] = {name: Row(**row) for name, row in data["suites"].items()}
    data["flakes"] = {test: Flake(**flake) for test, flake in data["flakes"].items()}
    return Results(**data)


def write(suite: str, came: Outcome, commit: str) -> None:
    """Put what came of a suite into the file; ``commit``: that at its start."""
    results = read()
    today = time.strftime("%Y-%m-%d")
    results.commit, results.date, results.machine = commit, today, machine()
    results.suites[suite] = Row(commit, today, came.passed, came.failed, came.rerun, came.skipped, round(came.seconds))
    for test, failure in came.first_failures.items():
        flake = results.flakes.setdefault(test, Flake([], ""))
        flake.dates = sorted({*flake.dates, today})
        flake.failure = placeless(failure)[-KEPT:]
    FILE.write_text(json.dumps(asdict(results), indent=1) + "\n")


def placeless(text: str) -> str:
    """Return a text without the folders of this machine."""
    for place, name in ((str(ROOT), "."), (tempfile.gettempdir(), "$TMPDIR"), (sys.base_prefix, "$PYTHON")):
        text = text.replace(place, name)
    return text


def table(results: Results) -> str:
    """Return the results as a page of the site shows them."""
    lines = [f"{results.date}, {results.machine}", "", f"| suite | commit | {' | '.join(COLUMNS)} |"]
    lines.append("|---|---|" + "---:|" * len(COLUMNS))
    for name, row in results.suites.items():
        cells = " | ".join(f"{getattr(row, column):,}" for column in COLUMNS)
        lines.append(f"| `{name}` | {row.commit[:9]} | {cells} |")
    total = " | ".join(f"{sum(getattr(row, column) for row in results.suites.values()):,}" for column in COLUMNS)
    lines.append(f"| all | | {total} |")
    if results.flakes:
        lines += ["", "Passed in their second run only: " + ", ".join(f"`{test}`" for test in sorted(results.flakes))]
    return "\n".join(lines)


def repeated() -> int:
    """Name the tests that were flaky in two nightly runs; return the exit status that they are worth."""
    twice = read().flaky_twice
    for test in twice:
        print(
            f"{test} passed only in its second run on two days: mend it or take it away, and its entry in {FILE.name}"
        )
    return 1 if twice else 0


def uncommitted() -> list[str]:
    """Return what differs from the commit that a nightly would name, but for documents."""
    lines = git("status", "--porcelain", "--", ".", ":!docs").splitlines()
    return [line.split(maxsplit=1)[1] for line in lines]


@cache
def changed_files(commit: str) -> list[str] | None:
    """Return the files that differ from a commit, or None where that is not in this repository's history."""
    if subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True).returncode:
        return None
    tracked = git("diff", "--name-only", "--no-renames", commit).splitlines()
    return sorted({*tracked, *git("ls-files", "--others", "--exclude-standard").splitlines()})


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\n")


def machine() -> str:
    """Describe this machine: processor, cores, memory."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models: Iterable[str] = re.findall(r"^model name\s*: (.*)$", text, re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    processor = next(iter(models), platform.machine())
    return f"{processor}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}"
