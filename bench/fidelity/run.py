"""How near does the simulated engine come to real ones? Measured GPU runs, and a live vLLM on this machine.

usage: python bench/fidelity/run.py [RUN ...] [--only measured|passes|live] [--keep FOLDER]
                                    [--docs docs/bench/fidelity.md]

RUN is a NAME__meta.json, or a folder of such, with what `measured` says beside it. Without one, runs are looked for in
PENSTOCK_TRACES, else in ../shared/traces; vLLM in PENSTOCK_VLLM_VENV, else in
.venv-vllm, where `make test-vllm` puts it. A part whose needs are absent is left out by name, and its table stays as it
is; with neither the command ends with status 77. It takes about five minutes, nearly all of it the live part.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import live
import measured
import table
from passes import recover
from tail import steps_at_the_end

from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.kv_capacity import with_blocks
from penstock_lab.engine.timing.timing_model import timing_of
from penstock_lab.report.markdown import write_part

ROOT = Path(__file__).resolve().parents[2]
ABSENT = 77
PASSES_UNTIL = 22.0
"""Seconds of the measured run whose passes are recovered: later on, stretches without a milestone grow too long."""


class Absent(Exception):
    """What a part needs is not here; the message says what, and how to get it."""


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    parts: dict[str, Callable[[argparse.Namespace, Path], str]] = {
        "measured": measured_part,
        "passes": passes_part,
        "live": live_part,
    }
    done = 0
    with tempfile.TemporaryDirectory(prefix="fidelity-") as made:
        folder = options.keep or Path(made)
        for name, part in parts.items():
            if options.only not in (None, name):
                continue
            try:
                text = part(options, folder)
            except Absent as absent:
                print(f"left out: {name} ({absent})", file=sys.stderr)
                continue
            print(text, flush=True)
            if options.docs is not None:
                write_part(options.docs, text, name)
            done += 1
    return 0 if done else ABSENT


def measured_part(options: argparse.Namespace, folder: Path) -> str:
    found = [(run, measured.compared(run, folder / "config.json")) for run in runs_of(options)]
    return "\n\n".join(table.measured(run, rows, today()) for run, rows in found)


def passes_part(options: argparse.Namespace, folder: Path) -> str:
    parts = []
    for run in runs_of(options):
        model = folder / "config.json"
        measured.write_model(run, model)
        settings = measured.timings(run, model)[measured.OPERATORS]
        read = load_timing(settings)
        engine = with_blocks(measured.settings_of(run, settings), read)
        timing = timing_of(settings, engine.capacity, read)
        parts.append(table.steps_at_the_end(run, steps_at_the_end(run.requests(), run.series(), timing)))
        if run.kv_blocks is None:  # where blocks run short, what a pass has in it does not follow from the rule alone
            ours, theirs = (recover(run, timing, ahead, PASSES_UNTIL) for ahead in (0, 1))
            parts.append(table.recovered(ours, theirs, timing))
    return "\n\n".join(parts)


def runs_of(options: argparse.Namespace) -> list[measured.Run]:
    """Return the measured runs that are asked for.

    Raises:
        Absent: there are none.
    """
    usual = Path(os.environ.get("PENSTOCK_TRACES") or ROOT.parent / "shared" / "traces") / measured.FOLDER
    try:
        return measured.runs_of(options.runs or [usual])
    except measured.NotARun as error:
        raise Absent(f"{error}: set PENSTOCK_TRACES") from error


def live_part(options: argparse.Namespace, folder: Path) -> str:
    venv = Path(os.environ.get("PENSTOCK_VLLM_VENV") or ROOT / ".venv-vllm").expanduser()
    if not (venv / "bin" / "vllm").exists():
        raise Absent(f"no vLLM in {venv}: `make test-vllm` puts it there, or set PENSTOCK_VLLM_VENV")
    before = os.getloadavg()[0]
    found = live.live(venv, folder, lambda text: print(text, file=sys.stderr, flush=True))
    machine = f"{os.cpu_count()} cores, {platform.machine()}, load average {before:.1f} at the start"
    return table.live(found, today(), machine)


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="a measured run, or a folder of such")
    parser.add_argument("--only", choices=("measured", "passes", "live"), help="this part alone")
    parser.add_argument("--docs", type=Path, help="replace the tables in this page")
    parser.add_argument("--keep", type=Path, help="a folder for the plan, the log, the passes and the profile")
    options = parser.parse_args(arguments)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
