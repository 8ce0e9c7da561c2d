"""How many requests per second does the simulated engine run on virtual time, and how near is it to the field's?

``python bench/engine.py [TRACE.jsonl ...]``: a decode-heavy synthetic load on one engine, then each Mooncake trace,
round robin over four engines, polynomial timing. Budget: 30 us of CPU per short request, 200 us per request of 13k
prompt tokens in blocks of 64.
"""

import argparse
import random
import time
from pathlib import Path

import msgspec

from penstock.kernel.machine import SECOND, Effect, Event
from penstock.kernel.simulation import Simulation
from penstock.kernel.values import Prompt
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import EngineFinished, SubmitRequest
from penstock_lab.engine.settings import SimSettings

TRACE_BLOCK = 512


def run(name: str, settings: SimSettings, workers: int, load: list[tuple[int, Event]]) -> None:
    """Run a load round robin and print what came of it."""
    done: list[EngineFinished] = []

    def world(now: int, sender: str, effect: Effect) -> tuple[()]:
        if type(effect) is EngineFinished:
            done.append(effect)
        return ()

    simulation = Simulation({f"engine-{i}": Engine(settings) for i in range(workers)}, world)
    began, cpu = time.perf_counter(), time.process_time()
    for number, (at, event) in enumerate(load):
        simulation.post(at, f"engine-{number % workers}", event)
    simulation.run()
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    count = len(done)
    firsts = sorted((d.first - d.arrived) / 1e6 for d in done if d.first is not None)
    gaps = sum(d.at - d.first for d in done if d.first is not None) / 1e6 / sum(d.tokens - 1 for d in done)
    print(
        f"{name}: {count} of {len(load)} requests, {count / cpu:,.0f}/s of CPU (wall {wall:.2f} s), "
        f"{simulation.events_handled / count:.1f} events each, {simulation.now / SECOND:,.0f} s simulated\n"
        f"  TTFT mean {sum(firsts) / count:.1f} p99 {firsts[int(count * 0.99)]:.0f} ms, "
        f"e2e mean {sum(d.at - d.arrived for d in done) / 1e6 / count:.0f} ms, ITL {gaps:.2f} ms, "
        f"reuse {sum(d.cached for d in done) / sum(d.prompt for d in done):.4f}, "
        f"preemptions {sum(d.preemptions for d in done)}"
    )


def synthetic(count: int, rate: float, isl: int, osl: int) -> list[tuple[int, Event]]:
    """Return Poisson arrivals with lengths spread evenly around ``isl`` and ``osl`` tokens."""
    rng = random.Random(1)
    at = 0.0
    load: list[tuple[int, Event]] = []
    for number in range(count):
        at += rng.expovariate(rate)
        lengths = {"isl": rng.randint(1, 2 * isl), "max_tokens": rng.randint(1, 2 * osl)}
        load.append((round(at * SECOND), SubmitRequest(id=str(number), **lengths)))
    return load


def mooncake(path: Path, block: int) -> list[tuple[int, Event]]:
    """Return a trace; each 512-token hash id names the engine's blocks within it."""
    per = TRACE_BLOCK // block
    load: list[tuple[int, Event]] = []
    for number, line in enumerate(path.read_bytes().splitlines()):
        row = msgspec.json.decode(line)
        blocks = [h * per + i for h in row["hash_ids"] for i in range(per)][: row["input_length"] // block]
        submit = SubmitRequest(
            id=str(number), prompt=Prompt(row["input_length"], blocks), max_tokens=max(1, row["output_length"])
        )
        load.append((row["timestamp"] * 1_000_000, submit))
    return load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    plain = SimSettings(emit_decode_blocks=False, max_model_len=1_000_000)
    run("256 in, 256 out, 40/s", plain, 1, synthetic(20_000, 40.0, 256, 256))
    run("100 in, 1000 out, 5/s", plain, 1, synthetic(5_000, 5.0, 100, 1000))
    for path in options.traces:
        run(f"{path.name}, blocks of 64", plain, options.workers, mooncake(path, 64))
        coarse = msgspec.structs.replace(plain, block_size=TRACE_BLOCK, kv_blocks=plain.capacity // TRACE_BLOCK)
        run(f"{path.name}, blocks of 512", coarse, options.workers, mooncake(path, TRACE_BLOCK))


if __name__ == "__main__":
    main()
