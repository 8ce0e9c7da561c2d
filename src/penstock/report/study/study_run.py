"""Command ``penstock study planner``: runs the study, and writes its rows, its tables and its page."""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.kernel.errors import ConfigError
from penstock.page.page_file import write_page
from penstock.report.markdown import write_part
from penstock.report.study.study_cells import StudyRow, as_rows, cells, do_all
from penstock.report.study.study_tables import sections_of, study_page, write


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """One study.

    Args:
        until: monotonic time after which no new cell is begun.
        only: names of contenders; empty is all of them.
    """

    out: Path
    docs: Path | None
    full: bool
    traces: Path | None
    processes: int
    until: float | None
    only: tuple[str, ...]


def main(options: StudyOptions) -> int:
    """Run the missing cells; return 0.

    Raises:
        ConfigError: a name in ``only`` is no contender.
    """
    wanted = cells(full=options.full, traces=options.traces)
    names = sorted({cell.contender for cell in wanted})
    for name in options.only:
        if name not in names:
            raise ConfigError(f"--only {name!r} takes no part", hint=f"there are {', '.join(names)}")
    if options.only:
        wanted = [cell for cell in wanted if cell.contender in options.only]
    options.out.mkdir(parents=True, exist_ok=True)
    done = list(
        do_all(
            wanted,
            options.out / "cells.jsonl",
            traces=options.traces,
            processes=options.processes,
            until=options.until,
            on_done=_print_progress,
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


def _print_progress(number: int, of: int, done: StudyRow) -> None:
    best = max(done.results, key=lambda result: result.attainment)
    line = f"{number}/{of} {done.cell.key}: {best.attainment:.2%} in SLO at {best.gpu_hours:.2f} GPU-hours\n"
    sys.stderr.write(line)
