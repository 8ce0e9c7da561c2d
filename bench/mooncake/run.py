"""How much does KV-aware routing gain on the Mooncake traces? Starts clusters, drives them, writes the tables.

usage: python bench/mooncake/run.py [--traces DIR] [--out runs] [--docs docs/bench/routing.md] [--quick]

Needs the public traces (--traces, PENSTOCK_TRACES, or ../shared/traces beside the checkout); without them it says so
and ends with status 77. Everything that decides the outcome stands in plan.py and was fixed before the first run.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from cluster import ClusterFailed, cluster, config
from plan import (
    CACHE_BLOCKS,
    MODES,
    REPEATS,
    RUN_SECONDS,
    SLO_ITL,
    SLO_TTFT,
    SPEED_UP,
    TRACES,
    Slice,
    cut,
    read_trace,
    write_slice,
)
from table import tables

from penstock_lab.report.markdown import write_part

HERE = Path(__file__).resolve().parent
SKIPPED = 77
"""Exit status of a run that could not be made for want of its data."""
ATTEMPTS = 2
"""A run that is invalid (generator or machine saturated) is made once more; every attempt is kept and counted."""


def main(arguments: list[str]) -> int:
    """Make all runs that are asked for and print the tables; 0, 1 where none was valid, 77 without traces."""
    options = parse(arguments)
    if options.tables is not None:
        return finish(options.tables, options.docs)
    traces = find_traces(options.traces)
    if traces is None:
        print("skipped: no folder with the Mooncake traces; name it with --traces or PENSTOCK_TRACES")
        return SKIPPED
    folder = options.resume or new_folder(options.out)
    done = {(run["trace"], run["blocks"], run["mode"], run["repeat"]) for run in read_results(folder) if settled(run)}
    seconds = options.seconds
    slices = {
        (name, repeat): cut(name, whole, repeat, seconds)
        for name in options.trace
        for whole in [read_trace(traces, name)]
        for repeat in range(options.repeats)
    }
    plan = [
        (name, blocks, mode, repeat)
        for repeat in range(options.repeats)
        for name in options.trace
        for blocks in options.blocks
        # Modes of one cell run next to each other, in another order each time, so that a slow quarter of an hour of
        # the machine does not fall on one mode.
        for mode in (*options.mode[repeat % len(options.mode) :], *options.mode[: repeat % len(options.mode)])
    ]
    (folder / "plan.json").write_text(json.dumps(described(slices), indent=2) + "\n")
    print(f"{len(plan)} runs of about {seconds:.0f} s, {len(done)} done already; results in {folder}")
    for number, (name, blocks, mode, repeat) in enumerate(plan, 1):
        if (name, blocks, mode, repeat) in done:
            continue
        for attempt in range(ATTEMPTS):
            found = one_run(folder, slices[name, repeat], blocks, mode, attempt)
            with (folder / "results.jsonl").open("ab") as file:
                file.write(msgspec.json.encode(found) + b"\n")
            print(f"{number}/{len(plan)} {line(found)}", flush=True)
            if found["bench"].get("valid"):
                break
    return finish(folder, options.docs)


def one_run(folder: Path, part: Slice, blocks: int, mode: str, attempt: int) -> dict[str, Any]:
    """Start a cold cluster, drive one slice, and return the line of results.jsonl."""
    name = f"{part.trace}-{blocks}-{mode}-{part.repeat}-{attempt}"
    trace = folder / f"{part.trace}-{part.repeat}.jsonl"
    if not trace.exists():
        write_slice(trace, part.requests)
    found: dict[str, Any] = {
        "trace": part.trace,
        "blocks": blocks,
        "mode": mode,
        "repeat": part.repeat,
        "attempt": attempt,
        "started": round(time.time()),
    }
    try:
        with cluster(folder / f"{name}.yaml", config(mode, blocks, part.repeat, folder / "runs")) as url:
            found["bench"] = bench(url, trace, part.repeat, folder / "runs")
    except (ClusterFailed, subprocess.SubprocessError, ValueError) as error:
        found["bench"] = {"valid": False, "verdict": str(error)[-500:]}
        found["broken"] = True
    return found


def bench(url: str, trace: Path, seed: int, out: Path) -> dict[str, Any]:
    """Drive the cluster with ``penstock bench`` in its own process, and return what it printed."""
    command = [sys.executable, "-m", "penstock", "bench", url, "--trace", str(trace), "--json", "--out", str(out)]
    command += ["--speed-up", f"{SPEED_UP:g}", "--seed", str(seed)]
    command += ["--slo-ttft", str(SLO_TTFT / SPEED_UP), "--slo-itl", str(SLO_ITL / SPEED_UP)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS * 30, check=False)
    if not ended.stdout.strip():
        raise ValueError(f"penstock bench ended with status {ended.returncode}: {ended.stderr[-400:]}")
    printed: dict[str, Any] = json.loads(ended.stdout)
    return printed


def finish(folder: Path, docs: Path | None) -> int:
    """Print the tables of what is in results.jsonl, and put them into the page where one is named."""
    runs = read_results(folder)
    whole = [run for run in runs if not run.get("broken")]
    if not any(run["bench"].get("valid") for run in whole):
        print("no valid run: nothing to tabulate")
        return 1
    text = f"{machine()}\n\n{tables(whole)}"
    broken = len(runs) - len(whole)
    if broken:
        text += f"\n{broken} runs did not start or broke off; results.jsonl says why.\n"
    (folder / "tables.md").write_text(text)
    print(text)
    if docs is not None:
        write_part(docs, text)
        print(f"tables written into {docs}")
    return 0


def line(run: dict[str, Any]) -> str:
    """Return one run in one line."""
    bench = run["bench"]
    head = f"{run['trace']} {run['blocks']:,} blocks {run['mode']} repeat {run['repeat']}:"
    if bench.get("hit_rate") is None or bench.get("ttft_mean_s") is None:
        return f"{head} {bench.get('verdict')}"
    return (
        f"{head} hit rate {bench['hit_rate']:.1%} ({bench['hit_rate_share_of_bound']:.0%} of the bound), "
        f"mean TTFT {bench['ttft_mean_s'] * SPEED_UP * 1e3:,.0f} ms, "
        f"goodput {bench['goodput_share']:.0%}, CPU {bench['cpu_mean'] or 0:.0%}, {bench['verdict']}"
    )


def settled(run: dict[str, Any]) -> bool:
    """Tell whether a run need not be made again when its folder is resumed."""
    return bool(run["bench"].get("valid")) or run["attempt"] == ATTEMPTS - 1


def described(slices: dict[tuple[str, int], Slice]) -> list[dict[str, Any]]:
    """Say what each slice holds."""
    return [
        {
            "trace": name,
            "repeat": repeat,
            "part_of": part.parts,
            "requests": len(part.requests),
            "prompt_tokens": part.prompt_tokens,
            "output_tokens": sum(request.osl for request in part.requests),
            "span_s": part.requests[-1].at,
            "infinite_cache_bound": part.bound,
            "left_out_as_too_long": part.too_long,
        }
        for (name, repeat), part in slices.items()
    ]


def machine() -> str:
    """Say what the runs were made on."""
    return f"Measured with Python {platform.python_version()} on {os.cpu_count()} CPU cores ({platform.machine()})."


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of results.jsonl, none where there is no such file yet."""
    path = folder / "results.jsonl"
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text().splitlines() if text.strip()]


def find_traces(named: Path | None) -> Path | None:
    """Return the folder with both traces, or None."""
    beside = HERE.parents[2] / "shared" / "traces"
    for candidate in (named, os.environ.get("PENSTOCK_TRACES"), beside):
        if candidate and all((Path(candidate) / file).is_file() for file in TRACES.values()):
            return Path(candidate)
    return None


def new_folder(out: Path) -> Path:
    """Make the folder of this bench."""
    path = out.resolve() / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-mooncake-{os.getpid():x}"
    path.mkdir(parents=True)
    return path


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first)
    parser.add_argument("--traces", type=Path, help="folder with the Mooncake traces")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the bench makes its folder")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with a bench that was broken off")
    parser.add_argument("--tables", type=Path, metavar="FOLDER", help="only tabulate a bench that was made")
    parser.add_argument("--docs", type=Path, help="page to put the tables into, between its markers")
    parser.add_argument("--trace", nargs="+", choices=list(TRACES), default=list(TRACES))
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--blocks", nargs="+", type=int, default=list(CACHE_BLOCKS))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--quick", action="store_true", help="one size, one repeat, short: does it work at all?")
    options = parser.parse_args(arguments)
    options.seconds = RUN_SECONDS
    if options.quick:
        options.repeats, options.blocks, options.seconds = 1, [CACHE_BLOCKS[1]], RUN_SECONDS / 4
    return options


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
