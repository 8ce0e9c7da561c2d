"""What does a real vLLM do with a plan? Runs in vLLM's own environment, in one process, and writes what it saw.

usage: VENV/bin/python engine_side.py PLAN.json RESULT.json

The plan has the engine's arguments, the cases of the sweep and the arrivals of the runs; the result has the passes of
the sweep and, per run, the first and last token of each request. The sweep is done anew before, between and after the
runs, so that a machine that slows down or speeds up does so in both. It is measured, too, for how much of its passes'
time the process had no core: on a busy machine that is what the rest is about.

Times are seconds at the engine's own boundary: a request is handed in when its time has come and no pass is under way,
as an engine's core takes its input, and has its tokens when the pass ends. No HTTP, no tokenizer: what those cost is
not the engine's, and not in the simulated one.
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams

LOW = 10
"""Token ids below this are left to marks such as the end of a text."""
SETTLE = 2
"""Passes of a case that go by before it is timed."""


class Engine:
    """One vLLM engine that is stepped by hand."""

    def __init__(self, arguments: dict[str, Any], vocabulary: int) -> None:
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._rng, self._vocabulary, self._number = random.Random(5), vocabulary, 0
        self.wall = self.cpu = 0.0
        """Seconds that passes took so far, and that the process had a core in them; it computes in one thread."""

    def add(self, isl: int, osl: int) -> str:
        """Hand in a prompt that nobody asked before."""
        self._number += 1
        prompt = [self._rng.randrange(LOW, self._vocabulary) for _ in range(isl)]
        how = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=osl, detokenize=False)
        name = str(self._number)  # outputs carry this one, not the one that add_request returns
        self._engine.add_request(name, {"prompt_token_ids": prompt}, how)
        return name

    def step(self) -> tuple[float, dict[str, int]]:
        """Return when a pass ended, and how many tokens each request of it has by then."""
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = self._engine.step()
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        return time.perf_counter(), {found.request_id: len(found.outputs[0].token_ids) for found in outputs}

    @property
    def busy(self) -> bool:
        return self._engine.has_unfinished_requests()


def passes_of(engine: Engine, case: dict[str, int]) -> list[dict[str, float]]:
    """Return the timed passes of a case: so many sequences that decode, and perhaps a prompt that comes meanwhile.

    What each pass has in it follows from the case: whoever decodes has its prompt behind it when the first is timed.
    """
    seqs, prompt = case["seqs"], case["prompt"]
    room = -(-seqs * case["kv"] // case["budget"]) + seqs + SETTLE + case["steps"] + 4
    for _ in range(seqs):
        engine.add(case["kv"], room)
    decoding: dict[str, int] = {}
    settled = 0
    while seqs and settled < SETTLE:
        settled += len(decoding) == seqs
        decoding |= engine.step()[1]
    kv = seqs * case["kv"] + sum(decoding.values())
    found: list[dict[str, float]] = []
    past, before = 0, time.perf_counter()
    if prompt:
        engine.add(prompt, 1)
    while len(found) < case["steps"]:
        new = min(prompt - past, case["budget"] - seqs)
        ended, _ = engine.step()
        found.append(
            {"past": past, "new": new, "seqs": seqs, "kv": kv, "case_kv": case["kv"], "seconds": ended - before}
        )
        before, past, kv = ended, past + new, kv + seqs
        if prompt and past == prompt:
            break
    while engine.busy:
        engine.step()
    return found


def run_of(engine: Engine, rows: list[list[float]]) -> list[dict[str, float]]:
    """Return when each arrival had its first and its last token, in seconds since the start of the run."""
    began = time.perf_counter()
    waiting = list(reversed(rows))
    found: dict[str, dict[str, float]] = {}
    while waiting or engine.busy:
        while waiting and waiting[-1][0] <= time.perf_counter() - began:
            at, isl, osl = waiting.pop()
            found[engine.add(int(isl), int(osl))] = {"at": at, "tokens": osl}
        if not engine.busy:
            time.sleep(max(0.0, waiting[-1][0] - (time.perf_counter() - began)))
            continue
        ended, tokens = engine.step()
        for name in tokens:
            found[name].setdefault("first", ended - began)
            found[name]["last"] = ended - began
    return list(found.values())


def main(plan: Path, result: Path) -> None:
    asked = json.loads(plan.read_text())
    engine = Engine(asked["engine"], asked["vocabulary"])
    run_of(engine, asked["warm_up"])
    passes, runs, waited, swept = [], [], [], 0.0
    for part, rows in enumerate([*asked["runs"], None]):
        began = time.perf_counter()
        passes += [one for case in asked["sweep"][part] for one in passes_of(engine, case)]
        swept += time.perf_counter() - began
        if rows is not None:
            wall, cpu = engine.wall, engine.cpu
            runs.append(run_of(engine, rows))
            waited.append(max(0.0, 1.0 - (engine.cpu - cpu) / (engine.wall - wall)))
    result.write_text(json.dumps({"passes": passes, "sweep_seconds": swept, "runs": runs, "waited": waited}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
