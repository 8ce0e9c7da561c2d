"""Does an encode pool pay? The rate that equally many GPUs sustain with and without one, on virtual time, as a table.

usage: python bench/multimodal.py [--docs FILE] [--quick]

For each kind of traffic the highest rate is searched at which 95 % of the requests meet the SLO; the layouts have four
GPUs each. Everything is `penstock simulate`, with the same seeds for each layout: a cell is their median, with the
lowest and the highest, and a gain counts only where each seed shows it.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

from penstock.cli.main import main as penstock
from penstock_lab.report.markdown import write_part

MODEL, GPU = "Qwen3-8B", "h100"
SLO_TTFT, SLO_ITL, SHARE = "2s", "30ms", 0.95
LAYOUTS = {
    "4 that do all": ("--workers", "4"),
    "3 and 1 encoder": ("--workers", "3", "--encode", "1"),
    "2 and 2 encoders": ("--workers", "2", "--encode", "2"),
}


class Traffic(NamedTuple):
    """One row: what is asked, a rate that nothing sustains, and how fast a GPU encodes, in tokens per second."""

    name: str
    images: str
    top: float
    speed: int = 70_000


WORK = (
    Traffic("one small image (640 px), 30 % again", "count=1,side=640,repeats=0.3", 192.0),
    Traffic("two images of 1280 px, none again", "count=2,side=1280,repeats=0", 24.0),
    Traffic("two images of 1280 px, 80 % again", "count=2,side=1280,repeats=0.8,popular=50", 48.0),
    Traffic("eight images of 640 px, 30 % again", "count=8,side=640,repeats=0.3", 24.0),
    Traffic("two of 1280 px, none again, slow encoder", "count=2,side=1280,repeats=0", 24.0, 15_000),
    Traffic("two of 1280 px, 80 % again, slow encoder", "count=2,side=1280,repeats=0.8,popular=50", 48.0, 15_000),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, help="page whose table is replaced")
    parser.add_argument("--quick", action="store_true", help="coarser search, shorter runs")
    options = parser.parse_args()
    seconds, steps, seeds = (20, 5, 1) if options.quick else (120, 7, 3)
    rates = " | ".join(f"{name}: requests/s" for name in LAYOUTS)
    lines = [
        f"| traffic | {rates} | ITL p99 there (ms) | an encode pool |",
        "|---|" + "---:|" * (len(LAYOUTS) + 1) + "---|",
    ]
    for work in WORK:
        found = {
            name: [highest(work, layout, seconds, steps, seed) for seed in range(1, seeds + 1)]
            for name, layout in LAYOUTS.items()
        }
        whole, *split = ([rate for rate, _ in runs] for runs in found.values())
        itls = ", ".join(itl_there([itl for _, itl in runs]) for runs in found.values())
        row = " | ".join(span(rates) for rates in (whole, *split))
        lines.append(f"| {work.name} | {row} | {itls} | {verdict(whole, max(split, key=median), work, steps)} |")
        print(lines[-1], flush=True)
    table = "\n".join(lines)
    print(table)
    if options.docs is not None:
        write_part(options.docs, table)
    return 0


def span(rates: list[float]) -> str:
    """Return a median, with the lowest and the highest where there are several."""
    text = f"{median(rates):.1f}"
    return text if len(rates) == 1 else f"{text} ({min(rates):.1f}-{max(rates):.1f})"


def itl_there(itls: list[float | None]) -> str:
    known = [itl for itl in itls if itl is not None]
    return f"{1e3 * median(known):.0f}" if known else "-"


def verdict(whole: list[float], split: list[float], work: Traffic, steps: int) -> str:
    """Return what the seeds say of the better layout with encoders beside the one without."""
    step = work.top / 2**steps
    if max(whole) > work.top - 2 * step:
        return "unknown: the search ends here"
    gains = [with_pool - without for with_pool, without in zip(split, whole, strict=True)]
    if min(gains) > step:
        word = "pays"
    elif max(gains) < -step:
        word = "does not pay"
    else:
        return "no difference seen"
    return f"{word}: {median(split) / median(whole) - 1:+.0%}"


def highest(work: Traffic, layout: tuple[str, ...], seconds: int, steps: int, seed: int) -> tuple[float, float | None]:
    """Return the highest rate at which enough requests are within the SLO, and the p99 of ITL there."""
    low, high, itl = 0.0, work.top, None
    for _ in range(steps):
        rate = (low + high) / 2
        outcome = simulated(work, layout, rate, seconds, seed)
        if outcome["slo_attainment"] is not None and outcome["slo_attainment"] >= SHARE:
            low, itl = rate, outcome["itl_p99_s"]
        else:
            high = rate
    return low, itl


def simulated(work: Traffic, layout: tuple[str, ...], rate: float, seconds: int, seed: int) -> dict[str, float | None]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "penstock", "simulate", "--model", MODEL, "--gpu", GPU, *layout]
        command += ["--workload", "images", "--images", work.images, "--rate", f"{rate:g}", "--duration", str(seconds)]
        command += ["--seed", str(seed)]
        command += ["--slo-ttft", SLO_TTFT, "--slo-itl", SLO_ITL, "--no-html", "--no-decisions", "--out", folder]
        command += ["--models.model.pools.main.sim.encoder.tokens_per_second", str(work.speed)]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = penstock([*command[3:], "--json"])
        if status:
            raise SystemExit(f"{' '.join(command)} ended with {status}")
        variant: dict[str, float | None] = json.loads(said.getvalue())["variants"][0]
        return variant


if __name__ == "__main__":
    sys.exit(main())
