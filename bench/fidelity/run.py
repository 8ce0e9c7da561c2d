"""How near does the simulated engine come to real ones? A measured GPU run, and a live vLLM on this machine.

usage: python bench/fidelity/run.py [--only measured|passes|live] [--docs docs/fidelity.md] [--keep FOLDER]

The measured run is looked for in PENSTOCK_TRACES, else in ../shared/traces; vLLM in PENSTOCK_VLLM_VENV, else in
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

from penstock.config.timing_files import load_timing
from penstock.engine.timing import timing_of

ROOT = Path(__file__).resolve().parents[2]
ABSENT = 77
PASSES_UNTIL = 22.0
"""Seconds of the measured run whose passes are recovered: later on, stretches without a milestone grow too long."""


class Absent(Exception):
    """What a part needs is not here; the message says what, and how to get it."""


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    parts: dict[str, Callable[[Path], str]] = {
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
                text = part(folder)
            except Absent as absent:
                print(f"left out: {name} ({absent})", file=sys.stderr)
                continue
            print(text, flush=True)
            if options.docs is not None:
                table.write(options.docs, name, text)
            done += 1
    return 0 if done else ABSENT


def measured_part(folder: Path) -> str:
    return table.measured(measured.compared(measured_run(), folder / "config.json"), today())


def passes_part(folder: Path) -> str:
    run, model = measured_run(), folder / "config.json"
    measured.write_model(model)
    known = measured.timings(run, model)
    spaced, alone = (
        timing_of(known[name], measured.settings_of(known[name]).capacity, load_timing(known[name]))
        for name in (measured.OPERATORS, measured.NO_GAP)
    )
    ours, theirs = (recover(measured.read(run), spaced, ahead, PASSES_UNTIL) for ahead in (0, 1))
    series = measured.seconds_of((run / measured.SERIES).read_text().splitlines())
    tail = steps_at_the_end(measured.read(run), series, alone)
    return table.recovered(ours, theirs, tail, alone)


def measured_run() -> Path:
    """Return the folder of the measured run.

    Raises:
        Absent: it is not there.
    """
    run = Path(os.environ.get("PENSTOCK_TRACES") or ROOT.parent / "shared" / "traces") / measured.RUN
    if not (run / measured.PROFILE).is_dir():
        raise Absent(f"no measured run at {run}: set PENSTOCK_TRACES")
    return run


def live_part(folder: Path) -> str:
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
    parser.add_argument("--only", choices=("measured", "passes", "live"), help="this part alone")
    parser.add_argument("--docs", type=Path, help="replace the tables in this page")
    parser.add_argument("--keep", type=Path, help="a folder for the plan, the log, the passes and the profile")
    options = parser.parse_args(arguments)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
