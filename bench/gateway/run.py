"""What does a request cost in our frontend, and what in the gateways beside it? All in one run, in alternation.

usage: python bench/gateway/run.py [--gateways ours,haproxy,...] [--cells REGEX] [--repeats 3] [--seconds 2]
                                   [--out FILE.json] [--docs docs/bench/gateway.md] [--tables FILE.json]

Peers are found in the folder that PEERS names (see docs/bench/gateway.md) and left out, with the reason, where they are
not installed. Generator, engines and gateway are processes of their own; everything stays on loopback.
"""

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cells import CELLS, HOLD
from servers import GATEWAYS, Missing, Setting, engines, running
from table import tables

from penstock_lab.report.markdown import write_part

HERE = Path(__file__).resolve().parent
ENGINES = 4
CELL_TIMEOUT = 180.0
"""Seconds for one measurement."""


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.tables is not None:
        return finish(json.loads(options.tables.read_text()), options.docs)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results: dict[str, Any] = {"machine": machine(), "seconds": options.seconds, "skipped": {}, "runs": []}
    with tempfile.TemporaryDirectory(prefix="gateway-", ignore_cleanup_errors=True) as folder:
        try:
            with engines(ENGINES, Path(folder)) as setting:
                measure(options, setting, results)
        except BaseException:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}", file=sys.stderr)
            raise
    return finish(results, options.docs)


def measure(options: argparse.Namespace, setting: Setting, results: dict[str, Any]) -> None:
    """Run every cell of every gateway; the gateways take turns, in the opposite order every other time."""
    for repeat in range(options.repeats):
        names = options.gateways if repeat % 2 == 0 else list(reversed(options.gateways))
        for name in names:
            if name in results["skipped"]:
                continue
            try:
                with running(name, setting) as gateway:
                    for cell, asked in CELLS.items():
                        if options.cells.search(cell) and wanted(name, asked):
                            results["runs"].append(one(name, gateway, cell, asked, repeat, options.seconds))
                    if options.cells.search("hold") and name != "direct" and repeat == 0:
                        found = script("hold.py", {**HOLD, "port": gateway.port, "pids": gateway.pids})
                        results["runs"].append({"gateway": name, "cell": "hold", "repeat": repeat, "found": found})
                        print(f"{name:14} hold {found}", file=sys.stderr)
            except Missing as missing:
                results["skipped"][name] = str(missing)
                print(f"{name} is left out: {missing}", file=sys.stderr)
            if options.out is not None:
                options.out.write_text(json.dumps(results, indent=1))


def wanted(name: str, asked: dict[str, Any]) -> bool:
    only = asked.get("only")
    return only is None or name in only


def one(name: str, gateway: Any, cell: str, asked: dict[str, Any], repeat: int, seconds: float) -> dict[str, Any]:
    parameters = {key: value for key, value in asked.items() if key != "only"}
    # Prompts are new to the gateway in each measurement, and the same for every gateway.
    seed = hash_of(cell) + repeat
    long = seconds * parameters.pop("times", 1)
    found = script("load.py", {**parameters, "port": gateway.port, "pids": gateway.pids, "seconds": long, "seed": seed})
    load = os.getloadavg()[0]
    shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}
    print(f"{name:14} {cell:28} {shown}", file=sys.stderr)
    return {"gateway": name, "cell": cell, "repeat": repeat, "load": load, "found": found}


def hash_of(text: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(text)) % 1_000_000


def script(name: str, asked: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / name), json.dumps(asked)], capture_output=True, text=True, timeout=CELL_TIMEOUT
    )
    if done.returncode:
        raise SystemExit(f"{name} {asked} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def finish(results: dict[str, Any], docs: Path | None) -> int:
    text = tables(results)
    print(text)
    if docs is not None:
        write_part(docs, text)
    return 0


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["direct", "haproxy", "sglang-router", "smg", "vllm-router", "ours", "ours-two", "ours-full", "dynamo"]
    parser.add_argument("--gateways", type=lambda text: text.split(","), default=default)
    parser.add_argument("--cells", type=re.compile, default=re.compile(""), help="only those whose name matches")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--out", type=Path, help="write every measurement's numbers here")
    parser.add_argument("--tables", type=Path, help="measure nothing: make the tables of this file")
    parser.add_argument("--docs", type=Path, help="replace the tables in this page")
    options = parser.parse_args(arguments)
    unknown = set(options.gateways) - set(GATEWAYS)
    if unknown:
        parser.error(f"no such gateway: {', '.join(sorted(unknown))}; known: {', '.join(GATEWAYS)}")
    return options


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
