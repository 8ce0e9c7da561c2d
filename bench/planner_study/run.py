"""What do the planner's policies keep for how many GPU-hours? Simulates each under the same traffic; writes the page.

usage: python bench/planner_study/run.py [--out FOLDER] [--docs FILE] [--full] [--traces FOLDER] [--processes 2]
                                         [--seconds N] [--only NAME]...

Beside them: other autoscalers, static fleets, and a clairvoyant that knows the arrivals. Each run is kept in --out and
not run again, so a study that was cut off goes on where it was. The default takes about an hour on two cores, --full
(every traffic, start-up time and seed) a night. --only takes a policy's name, "static" or "clairvoyant".
"""

import argparse
import csv
import os
import sys
import time
from pathlib import Path

from penstock.kernel.numeric_threads import ONE_THREAD

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ.update({**ONE_THREAD, **os.environ})

from bench.planner_study.cells import CLAIRVOYANT, STATIC, StudyRow, as_rows, cells, do_all  # noqa: E402
from bench.planner_study.contenders import BY_NAME  # noqa: E402
from bench.planner_study.tables import sections_of, study_page, write  # noqa: E402
from penstock.page.page_file import write_page  # noqa: E402
from penstock_lab.report.markdown import write_part  # noqa: E402


def main(arguments: list[str]) -> int:
    """Run the missing cells; return 0."""
    options = parse(arguments)
    until = None if options.seconds is None else time.monotonic() + options.seconds
    wanted = cells(full=options.full, traces=options.traces)
    if options.only:
        wanted = [cell for cell in wanted if cell.contender in options.only]
    options.out.mkdir(parents=True, exist_ok=True)
    done = list(
        do_all(
            wanted,
            options.out / "cells.jsonl",
            traces=options.traces,
            processes=options.processes,
            until=until,
            on_done=print_progress,
        )
    )
    rows = list(as_rows(done))
    with (options.out / "cells.csv").open("w", newline="") as file:
        if rows:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    missing, sections = len(wanted) - len(done), sections_of(done)
    write_page(options.out / "study.html", study_page(done, sections, missing=missing))
    text = write(sections, missing=missing)
    (options.out / "study.md").write_text(f"# Planner study\n\n{text}")
    if options.docs is not None:
        write_part(options.docs, text, title="Planner study")
    sys.stdout.write(text)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "study", help="what was run; resumed")
    parser.add_argument("--docs", type=Path, help="replace the tables in this page")
    parser.add_argument("--full", action="store_true", help="every traffic, start-up time and seed")
    parser.add_argument("--traces", type=Path, help="folder of public traces")
    parser.add_argument("--processes", type=int, default=2, help="runs side by side")
    parser.add_argument("--seconds", type=float, help="after which nothing new is begun")
    parser.add_argument("--only", action="append", choices=(*BY_NAME, STATIC, CLAIRVOYANT), help="repeated")
    return parser.parse_args(arguments)


def print_progress(number: int, of: int, done: StudyRow) -> None:
    best = max(done.results, key=lambda result: result.attainment)
    line = f"{number}/{of} {done.cell.key}: {best.attainment:.2%} in SLO at {best.gpu_hours:.2f} GPU-hours\n"
    sys.stderr.write(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
