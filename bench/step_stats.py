"""How far off are the sums that we estimate of an engine's passes? The simulated engine knows the truth.

``python bench/step_stats.py``: the real router and four simulated engines on virtual time, at three loads. Every window
of 5 s, what `penstock.runtime.node.engine_stats` makes of the router's requests (with all that vLLM's plug-in
reports exactly, and with what its /metrics reports alone) is compared with what each engine did. The numbers are the
same everywhere.
"""

import argparse
import itertools
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from penstock.adapters.engines.dialects.simulated import SIM
from penstock.adapters.engines.stats.step_stats_metrics import ScrapedSteps
from penstock.kernel.hashing import SCHEME
from penstock.kernel.machine import SECOND, Effect, Event, Nanos, Wake, Woken
from penstock.kernel.simulation import Answer, Simulation
from penstock.kernel.statistics import percentile
from penstock.kernel.values import Prompt, RequestId, StepStats, WorkerCard, WorkerId
from penstock.router.events import Arrived, Dispatch, Finished, FirstToken, KvObserved, WorkerJoined
from penstock.router.router import Router
from penstock.router.settings import RouterSettings
from penstock.runtime.node.engine_stats import LOOKS, LoadLook, completed, look
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import EngineFinished, EngineStarted, KvChanged, SubmitRequest
from penstock_lab.engine.events import EngineFirstToken as EngineFirst
from penstock_lab.engine.settings import SimSettings
from penstock_lab.report.markdown import write_part
from penstock_lab.sim.sim_metrics import SimMetrics, render

WORKERS = 4
WINDOW = 5.0
SECONDS = 600.0
WARM = 60.0
HEADS = 32
"""Prompt beginnings, of which each request takes one: half of its prompt."""
LOADS = {"light": 4.0, "busy": 8.0, "more than fits": 16.0}
"""Requests per second and engine, about 1,000 tokens in and 250 out."""
PLUGIN = ("decode_kv", "queued_prefill_tokens")
METRICS = ("wall", "prefill_tokens", "decode_seqs", "decode_kv", "queued_requests", "queued_prefill_tokens")


class Cluster:
    """A router and its engines; the world between them; and windows of truth and of guesses."""

    def __init__(self, rate: float, seed: int, streamed: bool) -> None:
        self.streamed = streamed
        self.settings = SimSettings(kv_blocks=4096, max_num_seqs=64)
        self.size = self.settings.block_size
        self.router = Router(RouterSettings(), seed=seed)
        self.engines = {WorkerId(f"w{n}"): Engine(self.settings) for n in range(WORKERS)}
        self.metrics = {worker: SimMetrics(self.settings.max_model_len) for worker in self.engines}
        self.scraped = {worker: ScrapedSteps(SIM.counters) for worker in self.engines}
        self.looks: dict[WorkerId, list[LoadLook]] = {worker: [] for worker in self.engines}
        self.sequences = dict.fromkeys(self.engines, 0)
        self.asked: dict[RequestId, SubmitRequest] = {}
        self.attempts: dict[RequestId, int] = {}
        self.cached: dict[RequestId, int] = {}
        self.arrived: dict[RequestId, Nanos] = {}
        self.pairs: dict[str, list[tuple[str, float, float | None]]] = {"plug-in": [], "metrics": []}
        machines: dict[str, Any] = {"router": self.router, "looker": Looker(self), **self.engines}
        self.simulation = Simulation(machines, self.world)
        for worker in self.engines:
            card = WorkerCard(
                id=worker,
                epoch=1,
                model="sim",
                url=f"http://{worker}",
                engine="sim",
                block_size=self.size,
                kv_blocks=self.settings.kv_blocks,
                max_num_batched_tokens=self.settings.max_num_batched_tokens,
                events=("tcp://none",),
                hash_scheme=SCHEME,
            )
            self.simulation.post(0, "router", WorkerJoined(card=card))
        rng = random.Random(seed)
        at = 0.0
        number = 0
        while (at := at + rng.expovariate(rate * WORKERS)) < SECONDS:
            number += 1
            self.arrive(RequestId(f"r{number}"), round(at * SECOND), rng)
        self.simulation.post(0, "looker", Woken())

    def arrive(self, request: RequestId, at: Nanos, rng: random.Random) -> None:
        isl = rng.randint(200, 1800)
        full = isl // self.size
        shared = full // 2
        head = rng.randrange(HEADS)
        blocks = [1 + head * 64 + i for i in range(shared)]
        blocks += [(1 << 40) + int(request[1:]) * 64 + i for i in range(full - shared)]
        self.asked[request] = SubmitRequest(id=request, prompt=Prompt(isl, blocks), max_tokens=rng.randint(1, 500))
        self.simulation.post(at, "router", Arrived(id=request, model="sim", prompt=Prompt(isl, blocks)))

    def world(self, now: Nanos, sender: str, effect: Effect) -> Iterable[Answer]:
        if isinstance(effect, Dispatch):
            self.attempts[effect.id] = effect.attempt
            self.arrived[effect.id] = now
            yield now, effect.target.worker, self.asked[effect.id]
        elif isinstance(effect, EngineStarted):
            self.cached[effect.id] = effect.cached
        elif isinstance(effect, EngineFirst):
            self.metrics[WorkerId(sender)].first_token(effect.at - self.arrived[effect.id])
            if self.streamed:  # of another answer nothing is heard before its end
                yield effect.at, "router", FirstToken(id=effect.id, attempt=self.attempts[effect.id])
        elif isinstance(effect, EngineFinished):
            self.metrics[WorkerId(sender)].finished(effect)
            done = Finished(
                id=effect.id, attempt=self.attempts[effect.id], tokens=effect.tokens, cached=self.cached[effect.id]
            )
            yield effect.at, "router", done
        elif isinstance(effect, KvChanged):
            worker = WorkerId(sender)
            number, self.sequences[worker] = self.sequences[worker], self.sequences[worker] + 1
            seen = KvObserved(worker=worker, rank=0, epoch=1, sequence=number, events=effect.events)
            yield effect.at, "router", seen

    def look(self, now: Nanos) -> None:
        """What the live node does some times per window."""
        pool = self.router.pools.get("sim")
        if pool is not None:
            for worker, looks in self.looks.items():
                looks.append(look((each for each in pool.active if each.target.worker == worker), self.size, now))

    def close_window(self, now: Nanos) -> None:
        for worker, engine in self.engines.items():
            truth = engine.take_stats(now)
            looks, self.looks[worker] = self.looks[worker], []
            page = render(self.metrics[worker], engine, self.settings, "sim", now)
            scraped = self.scraped[worker].take(page)
            if now < WARM * SECOND:
                continue
            told = msgspec.structs.replace(
                truth, decode_kv=None, decode_kv_sq=None, queued_prefill_tokens=None, queued_decode_kv=None
            )
            self.compare("plug-in", PLUGIN, truth, completed(told, looks))
            if scraped is not None:
                self.compare("metrics", METRICS, truth, completed(scraped, looks))

    def compare(self, source: str, names: tuple[str, ...], truth: StepStats, guess: StepStats) -> None:
        for name in names:
            self.pairs[source].append((name, float(getattr(truth, name)), getattr(guess, name)))


class Looker:
    """Takes looks and closes windows at its times."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._count = 0

    def handle(self, now: Nanos, event: Event) -> list[Effect]:
        self._count += 1
        self._cluster.look(now)
        if self._count % LOOKS == 0:
            self._cluster.close_window(now)
        if now > SECONDS * SECOND:
            return []
        return [Wake(at=now + round(WINDOW / LOOKS * SECOND))]

    def snapshot(self) -> dict[str, object]:
        return {}

    def restore(self, snapshot: dict[str, object]) -> None: ...

    def check(self) -> None: ...


def cell(pairs: list[tuple[float, float | None]]) -> str:
    """Return how far the guesses are off: in total, and per window with something to see, the median and the p90."""
    known = [(true, guess) for true, guess in pairs if guess is not None]
    total = sum(true for true, _ in known)
    off = sorted(abs(guess - true) / true for true, guess in known if true > 0)
    if not total or not off:
        return "nothing to see"
    bias = sum(guess for _, guess in known) / total - 1
    return f"{bias:+.1%}, {percentile(off, 0.5):.1%}, {percentile(off, 0.9):.1%}"


def tables(seed: int) -> str:
    """Run every load, and return one table for what each source tells."""
    runs = []
    for (load, rate), streamed in itertools.product(LOADS.items(), (True, False)):
        cluster = Cluster(rate, seed, streamed)
        cluster.simulation.run(until=round(SECONDS * SECOND))
        runs.append((f"{load}, {rate:g} requests/s", "streamed" if streamed else "whole", cluster.pairs))
    lines = []
    for source, names in (("plug-in", PLUGIN), ("metrics", METRICS)):
        lines += [f"Compared with the {source}:\n", f"| load per engine | answers | {' | '.join(names)} |"]
        lines.append("|---|---|" + "---|" * len(names))
        for load, how, pairs in runs:
            cells = [cell([(true, guess) for one, true, guess in pairs[source] if one == name]) for name in names]
            lines.append(f"| {load} | {how} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--docs", type=Path, help="page to write the tables into, between its marks")
    options = parser.parse_args()
    text = tables(options.seed)
    print(text)
    if options.docs is not None:
        write_part(options.docs, text, "step_stats")


if __name__ == "__main__":
    main()
