"""Whose planner keeps more requests at equal GPU-hours, in Dynamo's own simulator? Runs both there and writes the page.

usage: python bench/planner_referee/run.py [--peer-python PATH] [--out FOLDER] [--docs FILE] [--quick] [--fresh]
                                           [--processes 2] [--seeds 3] [--seconds 1500] [--traces FOLDER]

The simulator, its planner and the latency profile are those of ai-dynamo 1.6.1; its interpreter is --peer-python, else
$PEERS/planner/bin/python. Our planner runs inside of it as a scaling policy (policy.py). What was run is kept in --out
and not run again; after --seconds nothing new is begun, and the page says how much is missing.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

import plan  # noqa: E402
import traffic  # noqa: E402
from plan import Cell, Place  # noqa: E402
from table import page  # noqa: E402

from penstock.kernel.numeric_threads import ONE_THREAD  # noqa: E402
from penstock_lab.report.markdown import write_part  # noqa: E402

PATIENCE = 400.0
"""Seconds for one run; then it counts as failed."""
Rows = dict[str, dict[str, Any]]


class Peer:
    """A process of the peer's Python, which is started anew where it fails."""

    def __init__(self, python: Path, profile: Path, log: Path) -> None:
        self._command = [str(python), str(HERE / "peer.py"), str(profile)]
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return what a run came to, or its ``error``."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(PATIENCE, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self.end()
        return {"key": job["key"], "error": f"no answer within {PATIENCE:g} s, or it ended: see {self._log}"}

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT / "src"), "DYN_LOG": "error"}
        with self._log.open("a") as log:
            return subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    python = options.peer_python or peer_of_environment()
    if python is None:
        print("no peer: name its interpreter with --peer-python, or set PEERS to the folder with planner/ in it; "
              "pip install what docs/bench/planner-referee.md names", file=sys.stderr)  # fmt: skip
        return 2
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    file = out / ("quick.jsonl" if options.quick else "runs.jsonl")
    if options.fresh:
        file.unlink(missing_ok=True)
    public = (options.traces / traffic.FILE).exists()
    wanted = plan.cells(options.seeds, quick=options.quick, public=public)
    rows = read(file)
    missing = [cell for cell in wanted if cell.key not in rows]
    run_all(missing, rows, file, python, options)
    done = {cell: rows[cell.key] for cell in wanted if cell.key in rows}
    text = page(done, wanted)
    print(text)
    if options.docs is not None:
        write_part(options.docs, text)
    return 0


def run_all(missing: list[Cell], rows: Rows, file: Path, python: Path, options: argparse.Namespace) -> None:
    """Run what is missing until the time is over, and write down each as it is done."""
    until = time.monotonic() + options.seconds
    lock, waiting = threading.Lock(), iter(missing)
    made: dict[tuple[str, int], tuple[Path, float]] = {}

    def trace_of(cell: Cell) -> tuple[Path, float]:
        key = (cell.place.traffic, cell.seed)
        if key not in made:
            requests = traffic.requests(*key, options.traces)
            path = options.out / f"{key[0].replace(' ', '-')}-{key[1]}.jsonl"
            traffic.write(requests, path)
            made[key] = path, traffic.first_minute(requests)
        return made[key]

    def work(number: int) -> None:
        peer = Peer(python, options.out / "profile.npz", options.out / f"peer-{number}.log")
        try:
            while time.monotonic() < until:
                with lock:
                    cell = next(waiting, None)
                    if cell is None:
                        return
                    path, rate = trace_of(cell)
                found = peer.ask(job_of(cell, path, rate))
                with lock, file.open("a") as kept:
                    kept.write(json.dumps(found) + "\n")
                    rows[cell.key] = found
                    told = found.get("error") or (
                        f"{found['attainment']:.2%} @ {found['gpu_hours']:.2f} in {found['wall']:.0f} s"
                    )
                    print(f"{cell.key}: {told}", file=sys.stderr, flush=True)
        finally:
            peer.end()

    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(work, range(options.processes)))


def job_of(cell: Cell, trace: Path, rate: float) -> dict[str, Any]:
    """Return a run as the peer's side takes it; all but static fleets begin with what suits the first minute."""
    place, entry = cell.place, cell.entry
    static = entry.kind == "static"
    return {
        "key": cell.key,
        "kind": entry.kind,
        "layout": place.layout,
        "start_up": place.start_up,
        "trace": str(trace),
        "trace_block": traffic.BLOCK,
        "engine": plan.ENGINE,
        "ttft": plan.TTFT,
        "itl": plan.ITL,
        "gpus": plan.GPUS,
        "workers": entry.settings if static else first_fleet(place, rate),
        "settings": {} if static else entry.settings,
    }


def first_fleet(place: Place, rate: float) -> dict[str, int]:
    """Return the workers that everybody begins with."""
    whole = max(2, -(-rate // plan.PER_WORKER))
    if place.layout == "aggregated":
        return {"decode": int(whole)}
    return {"prefill": int(whole), "decode": max(1, int(whole) // 2)}


def read(file: Path) -> Rows:
    """Return what was run before; what failed is tried again, and a last line that was cut off is left out."""
    found: Rows = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "error" not in row:
            found[row["key"]] = row
    return found


def peer_of_environment() -> Path | None:
    folder = os.environ.get("PEERS")
    path = Path(folder, "planner", "bin", "python") if folder else None
    return path if path is not None and path.exists() else None


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traces = Path(os.environ.get("PENSTOCK_TRACES") or ROOT.parent / "shared" / "traces")
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "planner-referee", help="what was run; resumed")
    parser.add_argument("--docs", type=Path, help="replace the tables in this page")
    parser.add_argument("--quick", action="store_true", help="one traffic, one seed, every mode once")
    parser.add_argument("--fresh", action="store_true", help="run everything anew")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1500.0, help="after which nothing new is begun")
    parser.add_argument("--traces", type=Path, default=traces)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
