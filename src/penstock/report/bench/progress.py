"""Progress bar of a bench on a terminal; none where the output goes to a file or a pipe."""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.report.bench.bench_plan import BenchPlan
from penstock.report.bench.load_generator import LoadGenerator

REFRESH = 0.25


@contextmanager
def progress_bar(wanted: bool, plan: BenchPlan, generator: LoadGenerator, counts: Counter[str]) -> Iterator[None]:
    """Show requests sent, in flight and ended while the block runs; needs a running event loop."""
    if not wanted or not sys.stderr.isatty():
        yield
        return
    columns = (
        TextColumn("sending"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    # Drawn by our own task: rich's own thread would take the interpreter lock in the middle of a burst.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        line = bar.add_task("", total=plan.total, state="")

        def draw() -> None:
            broken = sum(counts[name] for name in ("failed", "expired", "unsent"))
            state = f"{generator.inflight} in flight, {counts['ok']} ok, {counts['rejected']} rejected, {broken} failed"
            bar.update(line, completed=generator.sent, state=state)
            bar.refresh()

        async def often() -> None:
            while True:
                draw()
                await asyncio.sleep(REFRESH)

        task = asyncio.get_running_loop().create_task(often())
        try:
            yield
        finally:
            task.cancel()
            draw()
