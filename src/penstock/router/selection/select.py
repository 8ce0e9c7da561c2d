"""Prices of a request's candidates, and the modes that choose one of them.

`costs_of` prices candidates by what their caches hold and what they have to do (`penstock.router.selection.cost`);
`select` works without any runtime: give it costs, a mode and a generator, and it returns the choice with its reason.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.kernel.hashing import BYTES_PER_TOKEN, TEXT_BLOCK_BYTES
from penstock.kernel.machine import Nanos
from penstock.kernel.values import Prompt, Role, Target, WorkerCard
from penstock.router.events import Cost
from penstock.router.kv_index.indexer import NOTHING
from penstock.router.model_pool import ModelPool
from penstock.router.requests.routed_request import RoutedRequest
from penstock.router.selection.candidate import Candidate, RequestDemand, Speed
from penstock.router.selection.cost import COSTS
from penstock.router.selection.cost_table import (
    Candidates,
    CostTable,
    active_requests_of,
    cheapest_of,
    second_of,
    totals_of,
)
from penstock.router.settings import Mode
from penstock.router.workers.roster import RosterWorker

SESSION_DISCOUNT = 0.3
"""Share of its cost that a soft session saves on its worker."""


COLUMNS_MIN = 24
"""Candidates from which on they are priced in columns: below, numpy's calls cost more than the candidates."""

Targets = Sequence[tuple[Target, RosterWorker]]


# --- prices ---------------------------------------------------------------------------------------------------------


def costs_of(
    pool: ModelPool,
    request: RoutedRequest,
    targets: Targets,
    now: Nanos,
    stage: Role = "aggregated",
    source: WorkerCard | None = None,
) -> tuple[Sequence[Cost], int]:
    """Price every candidate; return the costs and the request's blocks without a hash.

    Args:
        stage: what the candidates would do.
        source: the worker that holds the prompt's KV, for stage ``decode``.
    """
    prompt, preferences = request.prompt, request.event.preferences
    settings = pool.stage_cost[stage]
    size = TEXT_BLOCK_BYTES // BYTES_PER_TOKEN if prompt.estimated else pool.index.block_size
    unhashed_blocks = max(0, -(-prompt.isl // size) - len(prompt.blocks))
    many, load = len(targets) >= COLUMNS_MIN, pool.active.load
    priced = [] if many else [(target, worker, load(target)) for target, worker in targets]
    expected = pool.expected_output(preferences) if pool.settings.expect_output else preferences.osl
    demand = RequestDemand(
        prompt=prompt,
        unhashed_blocks=unhashed_blocks,
        block_size=size,
        osl=pool.counts.output_mean if expected is None else float(expected),
        least_prefill=min([used.prefill_tokens for _, _, used in priced], default=0),
        overlap_credit=(settings.overlap_credit if preferences.overlap_credit is None else preferences.overlap_credit),
        handed=source is not None,
        ms_per_block=pool.speeds.ms_per_block if source is not None else 0.0,
    )
    adapter = request.event.adapter if pool.adapters.workers else None
    usual = pool.speeds.usual(pool.settings.cost.kind)
    far = partial(distance, pool.settings.handoff.distance, source) if source is not None else None
    if many:
        place, columns = _columns(pool, prompt, targets, now, stage, usual, far)
        if adapter is not None:
            seconds = [pool.adapters.seconds(target.worker, adapter) for target, _ in targets]
            columns = columns._replace(adapter=np.array(seconds))
        return CostTable(demand, settings, targets, place, columns), unhashed_blocks
    price, overlaps = COSTS[settings.kind], pool.index.overlaps(prompt, now)
    return [
        price(
            demand,
            Candidate(
                target,
                overlaps.get(target, NOTHING),
                used,
                usual if worker.speed is None else pool.speeds.measured(worker.speed),
                1.0 if far is None else far(worker.card),
                0.0 if adapter is None else pool.adapters.seconds(target.worker, adapter),
            ),
            settings,
        )
        for target, worker, used in priced
    ], unhashed_blocks


def _columns(
    pool: ModelPool,
    prompt: Prompt,
    targets: Targets,
    now: Nanos,
    stage: Role,
    usual: Speed,
    far: Callable[[WorkerCard], float] | None,
) -> tuple[Mapping[Target, int], Candidates]:
    """Return the place of each of many candidates, and what is known of them in columns."""
    columns = pool.active.columns(stage, targets)
    device, lower, source = pool.index.overlap_columns(prompt, columns.place, now)
    speeds = msgspec.structs.astuple(usual)
    if pool.settings.cost.kind == "latency":
        own = [usual if worker.speed is None else pool.speeds.measured(worker.speed) for _, worker in targets]
        speeds = tuple(np.array([msgspec.structs.astuple(speed) for speed in own]).T)
    queued, requests, in_use = columns.numbers.copy()
    return columns.place, Candidates(
        queued,
        requests,
        in_use,
        pool.active.shared(columns, prompt.blocks),
        device,
        lower,
        source,
        speeds,
        1.0 if far is None else np.array([far(worker.card) for _, worker in targets]),
    )


def distance(weights: Mapping[str, float], one: WorkerCard, other: WorkerCard) -> float:
    """Return how many times as much a transfer between two workers costs, by the labels in which they differ."""
    times = 1.0
    for label, weight in weights.items():
        here, there = one.labels.get(label), other.labels.get(label)
        if here is not None and there is not None and here != there:
            times *= weight
    return times


# --- choices --------------------------------------------------------------------------------------------------------


class Selection(NamedTuple):
    """The chosen candidate and one sentence that says why."""

    cost: Cost
    reason: str


def select(
    mode: Mode,
    costs: Sequence[Cost],
    rng: random.Random,
    *,
    temperature: float = 0.0,
    turn: int = 0,
) -> Selection:
    """Choose one of the candidates.

    Args:
        costs: one per candidate, in a stable order, at least one.
        temperature: of the softmax in mode ``kv``; 0 takes the cheapest.
        turn: how many requests ``round_robin`` has placed before.
    Raises:
        ValueError: no candidates, or mode ``direct`` (a pinned request has one candidate and never comes here).
    Cost: O(candidates).
    """
    if not costs:
        raise ValueError("no candidates to choose from")
    if mode == "kv":
        return _cheapest(costs, rng) if temperature <= 0 else _sampled(costs, rng, temperature)
    if mode == "round_robin" or mode == "random":
        place, because = blind(mode, len(costs), rng, turn)
        return Selection(costs[place], because)
    places: Sequence[int] = range(len(costs))
    if mode == "least_loaded":
        return _least_loaded(costs, places, rng, f"of {_workers(costs)}")
    if mode == "power_of_two":
        pair = places if len(costs) <= 2 else rng.sample(places, 2)
        drawn = " and ".join(str(costs[place].target) for place in pair)
        return _least_loaded(costs, pair, rng, f"of two drawn at random: {drawn}")
    raise ValueError(f"mode {mode!r} needs a pinned worker: send x-penstock-worker or nvext.backend_instance_id")


def blind(mode: Mode, count: int, rng: random.Random, turn: int) -> tuple[int, str]:
    """Choose one of ``count`` candidates in a mode that needs no cost; return its place and the reason."""
    workers = f"{count} worker{'s' if count > 1 else ''}"
    if mode == "round_robin":
        return turn % count, f"turn {turn} of round robin over {workers}"
    return int(rng.random() * count), f"drawn at random of {workers}"


def probabilities(totals: Sequence[float], temperature: float) -> list[float]:
    """Softmax over costs normalised to their range: p_i ~ exp(-(c_i - min) / ((max - min) * temperature))."""
    low, high = min(totals), max(totals)
    if high - low <= 0:
        return [1.0 / len(totals)] * len(totals)
    weights = [math.exp(-(total - low) / ((high - low) * temperature)) for total in totals]
    whole = sum(weights)
    return [weight / whole for weight in weights]


def _cheapest(costs: Sequence[Cost], rng: random.Random) -> Selection:
    ties = cheapest_of(costs)
    equal = len(ties)
    chosen = costs[int(ties[int(rng.random() * equal) if equal > 1 else 0])]
    if equal > 1:
        return Selection(chosen, f"{_price(chosen)}, drawn among {equal} equal ones")
    if len(costs) == 1:
        return Selection(chosen, f"{_price(chosen)}, the only candidate")
    second, total = second_of(costs, int(ties[0]))
    return Selection(chosen, f"{_price(chosen)}, the least of {len(costs)}; next {second} at {total:.1f}")


def _sampled(costs: Sequence[Cost], rng: random.Random, temperature: float) -> Selection:
    shares = probabilities(totals_of(costs), temperature)
    place = rng.choices(range(len(costs)), weights=shares)[0]
    cost = costs[place]
    return Selection(cost, f"{_price(cost)}, drawn with probability {shares[place]:.2f} at temperature {temperature:g}")


def _least_loaded(costs: Sequence[Cost], places: Sequence[int], rng: random.Random, among: str) -> Selection:
    running = active_requests_of(costs)
    least = min(running[place] for place in places)
    ties = [place for place in places if running[place] == least]
    chosen = ties[0] if len(ties) == 1 else ties[int(rng.random() * len(ties))]
    return Selection(costs[chosen], f"fewest running requests ({least}), {among}")


def _price(cost: Cost) -> str:
    blocks = cost.overlap_blocks  # worded here: this is on the way of every request
    text = f"cost {cost.total:.1f} {cost.unit} with {blocks} block{'' if blocks == 1 else 's'} cached"
    if cost.plugins:
        text += " (" + ", ".join(f"{name} added {added:.3g}" for name, added in cost.plugins.items()) + ")"
    return text


def _workers(costs: Sequence[Cost]) -> str:
    return f"{len(costs)} worker{'s' if len(costs) > 1 else ''}"


def pinned(cost: Cost, by: str) -> Selection:
    """The choice that was made beforehand: by the caller's pin or by a session's home."""
    return Selection(cost, f"{by}; {_price(cost)}")


def discounted(costs: Sequence[Cost], home: Target | None) -> Sequence[Cost]:
    """Take the soft session discount off the home target's cost."""
    left = 1.0 - SESSION_DISCOUNT
    if home is None:
        return costs
    if isinstance(costs, CostTable):
        return costs.discounted(home, left)
    replace = msgspec.structs.replace
    return [replace(cost, total=cost.total * left, discount=left) if cost.target == home else cost for cost in costs]
