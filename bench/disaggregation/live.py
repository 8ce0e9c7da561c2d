"""Does the order hold with processes, HTTP and real time? Four engines live, beside the same four simulated."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml
from cell import Cell, judged, plan_of, sim_of, simulated
from plan import SMALL, Layout, Work
from workloads import requests_of

from penstock.kernel.request_record import RequestRecord, decode_records
from penstock.kernel.values import Slo
from penstock_lab.traffic.traffic_request import TrafficRequest

WORK = Work("long prompts", SMALL, (8.0,), (0.5, 3.0), (0.009, 0.030))
"""Of four workers: as much for each as the third load of the sweep."""
TIGHT, LOOSE = (3.0, 0.009), (0.5, 0.030)
"""(TTFT, ITL) in seconds of the engine: tight is the ITL of the one, the TTFT of the other."""
LAYOUTS = (
    *(Layout({"aggregated": 4}, chunk=chunk) for chunk in (512, 2048, 8192)),
    *(Layout({"prefill": count, "decode": 4 - count}) for count in (1, 2, 3)),
)
SLOWED = 5.0
"""Live engines take so many times as long, and requests come so much later, so that two cores can keep up."""
REQUESTS, SEED = 120, 1
START_TIMEOUT, STOP_TIMEOUT = 60.0, 30.0
_ENDPOINT = re.compile(r"Endpoint\s+(https?://\S+?)/v1")
Row = dict[str, Any]


def run(scratch: Path) -> list[Row]:
    """Simulate all layouts, and run the best aggregated one and the best split of either pair live, too."""
    traffic = requests_of(WORK, WORK.rates[0], SEED, None, REQUESTS)
    rows = []
    for layout in LAYOUTS:
        cluster = simulated(plan_of(Cell(WORK, layout, WORK.rates[0], SEED)), traffic)
        rows.append(_row("simulated", layout, cluster[1], 1.0, judged(cluster, WORK.pairs).as_dict()))
    chosen = {
        max((row for row in rows if row["family"] == family), key=lambda row: row[pair])["layout"]
        for family in ("aggregated", "split")
        for pair in ("tight", "loose")
    }
    trace = scratch / "live.jsonl"
    write(trace, traffic)
    for layout in LAYOUTS:
        if layout.name in chosen:
            rows.append(live(scratch, layout, trace))
            print(f"live: {layout.name}: {rows[-1]['tight']:.0%} and {rows[-1]['loose']:.0%} in SLO", flush=True)
    return rows


def live(scratch: Path, layout: Layout, trace: Path) -> Row:
    """Run one layout as processes."""
    path = scratch / f"live-{layout.name.replace(' ', '-')}.yaml"
    path.write_text(config(layout, scratch))
    with started(path) as url:
        command = [
            *(sys.executable, "-m", "penstock", "bench", url, "--trace", str(trace), "--no-html", "--json"),
            *("--speed-up", str(1 / SLOWED), "--out", str(scratch)),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if not ended.stdout.strip():
        raise SystemExit(f"penstock bench ended with status {ended.returncode}: {ended.stderr[-1000:]}")
    found = json.loads(ended.stdout)
    with (Path(found["run"]) / "requests.jsonl").open("rb") as lines:
        records = decode_records(lines)
    return _row("live", layout, records, SLOWED, {"verdict": found["verdict"], "cpu": found["cpu_mean"]})


def config(layout: Layout, folder: Path) -> str:
    """Return the YAML of a layout as processes; the model's config.json is written beside it."""
    model = folder / "config.json"
    model.write_text(json.dumps(SMALL.config))
    pools = {}
    for role, count in layout.workers.items():
        sim = sim_of(SMALL, layout.chunk)
        sim = msgspec.structs.replace(
            sim,
            timing=msgspec.structs.replace(sim.timing, model=str(model), speed_up=1 / SLOWED),
            transfer=msgspec.structs.replace(sim.transfer, bandwidth=sim.transfer.bandwidth / SLOWED),
        )
        pools[role] = {"engine": "sim", "role": role, "replicas": count, "sim": msgspec.to_builtins(sim)}
    return yaml.safe_dump(
        {
            "name": "disaggregation",
            "models": {"sim": {"tokenizer": "builtin:sim", "pools": pools}},
            "frontend": {"port": 0},
            "router": {"handoff": {"conditional": layout.conditional}},
            "runs": {"dir": str(folder)},
            "logs": {"level": "warning"},
        },
        sort_keys=False,
    )


def write(path: Path, requests: Sequence[TrafficRequest]) -> None:
    """Write requests as Mooncake rows."""
    rows = (
        {
            "timestamp": one.at * 1e3,
            "input_length": one.isl,
            "output_length": one.osl,
            "hash_ids": one.hash_ids,
            "block_size": one.block_size,
        }
        for one in requests
    )
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def _row(who: str, layout: Layout, records: Sequence[RequestRecord], slowed: float, more: Row) -> Row:
    def share(ttft: float, itl: float) -> float:
        return sum(one.within(Slo(ttft=ttft * slowed, itl=itl * slowed)) for one in records) / len(records)

    done = [one for one in records if one.ttft is not None and one.itl is not None]
    return {
        "part": "live",
        "who": who,
        "layout": layout.name,
        "family": layout.family,
        "tight": share(*TIGHT),
        "loose": share(*LOOSE),
        "ttft": sum(one.ttft or 0.0 for one in done) / len(done) / slowed,
        "itl": sum(one.itl.mean for one in done if one.itl) / len(done) / slowed,
        **{name: more[name] for name in ("verdict", "cpu") if name in more},
    }


@contextmanager
def started(path: Path) -> Iterator[str]:
    """Run ``penstock up`` while the block runs; yields the endpoint without /v1."""
    command = [sys.executable, "-m", "penstock", "up", str(path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    printed: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if _ENDPOINT.search(line):
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        ready.wait(START_TIMEOUT)
        found = _ENDPOINT.search("".join(printed))
        if found is None:
            raise SystemExit(f"penstock up did not start:\n{''.join(printed)[-2000:]}")
        time.sleep(1.0)  # start-up work of the processes must not be measured
        yield found.group(1)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(5.0)
