"""Run suites of tests, say how long each took, and end with one line that counts passes, failures and skips.

usage: python -m tests.run [RING | SUITE ...]

Without names it runs ring "test". `gate` runs what `.ci/run` needs beyond that, `nightly` everything at full depth, and
writes docs/reference/nightly.json. A suite's name runs it in full, and so does the part of it before a dash: `vllm`
stands for all suites of real vLLM, `nightly vllm` writes their results down as well.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.kernel.numeric_threads import ONE_THREAD
from tests import nightly
from tests.environments import ENVIRONMENTS, Environments
from tests.nightly import Outcome
from tests.suites import ROOT, SUITES, Suite, known, touched

COUNTED = ("passed", "failed", "rerun", "skipped")


@dataclass(frozen=True)
class Plan:
    """A suite to run, and how much of it."""

    suite: Suite
    full: bool = True
    reason: str = ""

    @property
    def tests(self) -> tuple[str, ...]:
        return self.suite.tests if self.full else self.suite.gate

    @property
    def depth(self) -> float | None:
        return self.suite.depth if self.full else self.suite.gate_depth


def main(names: Sequence[str]) -> int:
    # A shell that runs this in the background ignores Ctrl-C for it, and for what tests start and end by that signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ring, *rest = names or ["test"]
    writes = ring == "nightly"
    if writes and (changed := nightly.uncommitted()):
        print(f"commit first, since the table names the commit that was tested: {', '.join(changed[:5])}")
        return 2
    if ring == "gate":
        plans = gate_plans(nightly.read())
    elif ring in ("test", "nightly"):
        plans = [Plan(suite) for suite in named(rest, ring)]
    else:
        plans = [Plan(suite) for suite in named(names, "")]
    if ring in ("gate", "nightly"):
        plans = [plan for plan in plans if is_required(plan.suite)]
    outcomes: dict[str, Outcome] = {}
    with Environments([need for plan in plans for need in plan.suite.needs]) as environments:
        for plan in plans:
            print(f"== {plan.suite.name}{' (' + plan.reason + ')' if plan.reason else ''}", flush=True)
            commit = nightly.git("rev-parse", "HEAD") if writes else ""
            outcomes[plan.suite.name] = run(plan, environments)
            if writes:
                nightly.write(plan.suite.name, outcomes[plan.suite.name], commit)
    return summary(outcomes) or (nightly.repeated() if writes else 0)


def named(names: Sequence[str], ring: str) -> Iterator[Suite]:
    """Yield the suites of a ring, or those that are named by themselves or by the part before a dash."""
    unknown = [name for name in names if not any(name in (suite.name, suite.group) for suite in SUITES)]
    if unknown:
        raise SystemExit(f"there is no suite {unknown[0]!r}; there are {', '.join(suite.name for suite in SUITES)}")
    for suite in SUITES:
        if names:
            if suite.name in names or suite.group in names:
                yield suite
        elif ring == "nightly" or suite.ring == ring:
            yield suite


def gate_plans(results: nightly.Results) -> Iterator[Plan]:
    """Yield what a landing needs beyond ring "test"; name what is left out, and why that may be.

    A suite runs in full where files of its subject, or of its tests, changed since the commit of its last green run, or
    where there is no such run. A changed file that is in no suite's subject counts as a change of all.
    """
    for suite in SUITES:
        if suite.ring in ("test", "soak"):
            continue
        if suite.ring == "gate":
            yield Plan(suite)
            continue
        commit = results.green(suite.name)
        changed = nightly.changed_files(commit) if commit else None
        if changed is None:
            place = f"{commit[:9]}, where it passed last, is not in this history" if commit else "it has not passed yet"
            yield Plan(suite, reason=f"in full: {place}")
        elif strange := [path for path in changed if not known(path)]:
            yield Plan(suite, reason=f"in full: {strange[0]} is in no suite's subject")
        elif about := touched(suite, changed):
            yield Plan(suite, reason=f"in full: {about[0]} changed since {commit[:9]}")
        elif suite.gate:
            yield Plan(suite, full=False, reason=f"the gate's part: nothing it is about changed since {commit[:9]}")
        else:
            print(f"== {suite.name} is left out: nothing it is about changed since {commit[:9]}, where it passed")


def is_required(suite: Suite) -> bool:
    """Say whether PENSTOCK_REQUIRE names what a suite needs; without that variable everything is required."""
    asked = os.environ.get("PENSTOCK_REQUIRE")
    missing = [need for need in suite.needs if ENVIRONMENTS[need].asked and asked and need not in asked.split(",")]
    if missing:
        print(f"== {suite.name} is left out: PENSTOCK_REQUIRE does not name {missing[0]}")
    return not missing


def run(plan: Plan, environments: Environments) -> Outcome:
    """Run a suite: its tests side by side, then those that need the machine to themselves."""
    suite = plan.suite
    started = time.monotonic()
    outcome = Outcome()
    broken = [need for need in suite.needs if not environments.ready(need)]
    if broken:
        print(f"the environment {broken[0]} could not be made: see above", flush=True)
        outcome.failed += 1
    else:
        python, variables = environments.of(suite.needs)
        variables |= {**suite.variables, "PENSTOCK_REQUIRE": ",".join(sorted(required() | set(suite.requires)))}
        if plan.depth is not None:
            variables["PENSTOCK_DEPTH"] = str(plan.depth)
        tests = [path for path in plan.tests if (ROOT / path.partition("::")[0]).exists()]
        quiet = list(marked_quiet(tests)) if suite.workers > 1 else []
        side_by_side = ["-n", str(suite.workers), "--dist", suite.spread] if suite.workers > 1 else []
        if suite.spread == "loadfile":
            side_by_side.append("--no-loadscope-reorder")
        common = [*suite.again, *suite.options]
        pytest(
            outcome, python, variables, [*tests, *marks(suite, "not quiet" if quiet else ""), *side_by_side, *common]
        )
        if quiet:
            pytest(outcome, python, variables, [*quiet, *marks(suite, "quiet"), *common], may_be_empty=True)
    outcome.seconds = time.monotonic() - started
    return outcome


def marks(suite: Suite, more: str) -> list[str]:
    """Return pytest's option for the tests of a suite that have these marks as well."""
    wanted = " and ".join(f"({each})" for each in (suite.select, more) if each)
    return ["-m", wanted] if wanted else []


def required() -> set[str]:
    """Return what PENSTOCK_REQUIRE names, but for environments: a suite that needs one says itself what it requires."""
    asked = os.environ.get("PENSTOCK_REQUIRE", "").split(",")
    return {name for name in asked if name and not (name in ENVIRONMENTS and ENVIRONMENTS[name].asked)}


def marked_quiet(tests: Sequence[str]) -> Iterator[str]:
    """Yield the files of tests in which the mark stands."""
    for path in tests:
        place = ROOT / path.partition("::")[0]
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            if "mark.quiet" in file.read_text():
                yield str(file.relative_to(ROOT))


def pytest(
    outcome: Outcome, python: Path, variables: dict[str, str], arguments: Sequence[str], *, may_be_empty: bool = False
) -> None:
    """Run pytest and add what came of it to ``outcome``."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        done = subprocess.run(
            [python, "-m", "pytest", "-rsR", "--durations=12", f"--outcome={report}", *arguments],
            env={**ONE_THREAD, **os.environ, **variables},
            cwd=ROOT,
            check=False,
        )
        if done.returncode == NOTHING_SELECTED and may_be_empty:
            return
        counts: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError):
            came = json.loads(report.read_text())
            counts = came["counts"]
            outcome.first_failures |= came["first_failures"]
    for name in COUNTED:
        setattr(outcome, name, getattr(outcome, name) + counts.get(name, 0))
    if done.returncode not in (0, 1) or (done.returncode and not counts.get("failed")):
        outcome.failed += 1  # pytest itself broke, or ran nothing: no count says so


NOTHING_SELECTED = 5
"""pytest's exit status where marks leave no test over."""


def summary(outcomes: dict[str, Outcome]) -> int:
    """Print what came of the suites; return the exit status."""
    width = max(map(len, outcomes), default=0)
    print(f"\n{'suite':{width}} {'seconds':>8} " + " ".join(f"{name:>8}" for name in COUNTED))
    for name, outcome in outcomes.items():
        row = " ".join(f"{getattr(outcome, count):>8}" for count in COUNTED)
        print(f"{name:{width}} {outcome.seconds:>8.0f} {row}")
    total = {name: sum(getattr(outcome, name) for outcome in outcomes.values()) for name in COUNTED}
    if total["rerun"]:
        print("run a second time: " + ", ".join(test for each in outcomes.values() for test in each.first_failures))
    print(f"{sum(outcome.seconds for outcome in outcomes.values()):.0f} s in all")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
