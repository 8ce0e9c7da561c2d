"""The decision on a request's worker: who may have it, what each would cost, and which of them gets it.

`eligible` splits the workers into candidates and those excluded, each with its reason; `costs_of` prices the
candidates by what their caches hold and what they have to do (`penstock.router.selection.cost`); `select` chooses by a
mode, a pure function that works without any runtime. `penstock.router.requests.scheduling` calls all three.
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
from penstock.kernel.values import Prompt, Role, Target, WorkerCard, WorkerId
from penstock.router.events import Cost, Excluded
from penstock.router.kv_index.indexer import NOTHING
from penstock.router.model_pool import ModelPool
from penstock.router.routed_request import RoutedRequest
from penstock.router.router_state import RouterState
from penstock.router.selection.candidate import Candidate, RequestDemand, Speed
from penstock.router.selection.cost import (
    COSTS,
    CREDIT_DECAY,
    Candidates,
    CostTable,
    active_requests_of,
    cheapest_of,
    second_of,
    totals_of,
)
from penstock.router.selection.router_plugins import PluginCandidates, PluginRequest
from penstock.router.settings import Mode
from penstock.router.stage_graph import FINAL, does_all
from penstock.router.workers.roster import RosterWorker

# --- candidates -------------------------------------------------------------------------------------------------------


class Eligible(NamedTuple):
    """Candidates, those excluded with their reasons, and whether the request's own preferences excluded all of them."""

    targets: list[tuple[Target, RosterWorker]]
    excluded: list[Excluded]
    by_preference: bool

    @property
    def reasons(self) -> str:
        """The reasons of the first few of those excluded; empty where there are none."""
        return "; ".join(f"{one.target} {one.reason}" for one in self.excluded[:4])


def eligible(
    core: RouterState,
    request: RoutedRequest,
    pool: ModelPool,
    now: Nanos,
    stage: Role = "aggregated",
    *,
    doubts: bool = True,
) -> Eligible:
    """Split the pool's targets that do a stage into candidates and those excluded.

    Stage ``aggregated`` is done by workers that answer clients alone, ``decode`` by those that can take KV over.
    ``doubts``: whether doubts about its health exclude its worker.
    """
    wish = request.event.preferences
    targets: list[tuple[Target, RosterWorker]] = []
    excluded: list[Excluded] = []
    by_wish = True
    event, model = request.event, pool.model
    loaded = event.adapter is not None and bool(pool.adapters.workers)
    request.awaits_adapter = False
    pin = pin_of(core, request, stage)
    picky = pin is not None or wish.allowed is not None or event.adapter is not None
    isl = request.prompt.isl
    if doubts and pool.roles.plain and not picky and wish.rank is None and not request.tried:
        usual = core.roster.usual(model)
        if usual is not None and isl < usual.isl_max:
            split = Eligible(usual.targets, usual.excluded, False)
            return split if core.plugins is None else _without_filtered(core, request, pool, stage, split)
    for worker, places in core.roster.places.values():
        card = worker.card
        if card.model != model:
            continue
        if not pool.roles.plain and not _does_stage(pool, worker, stage) and not (event.whole and pin == card.id):
            continue
        # All of the fleet may pass here with every request: the usual answer takes no call.
        plain = worker.state == "ready" and not worker.cordons and not worker.doubts and worker.breaker.until is None
        reason = None if plain else worker.why_not(now, doubts=doubts)
        if reason is None and doubts and request.unproven is not None and worker.breaker.until is not None:
            reason = "breaker is half_open, and the request itself may be what failed before"
        if reason is None and request.tried and (card.id, card.incarnation) in request.tried:
            reason = "failed this request before"
        if reason is not None:
            by_wish = False
        elif picky or (card.max_model_len is not None and isl >= card.max_model_len):
            loads = loaded and card.id in pool.adapters.workers
            reason = _request_refusal(request, worker, pin, loads)
            if reason is None and loads:
                reason = _adapter_refusal(request, worker, pool, now)
                by_wish = by_wish and reason is None
        if reason is None and wish.rank is None:
            targets += places
            continue
        for target in worker.targets:
            why = reason
            if why is None and wish.rank is not None and target.rank != wish.rank and stage in FINAL:
                why = f"the request is pinned to rank {wish.rank}"
            if why is None:
                targets.append((target, worker))
            else:
                excluded.append(Excluded(target=target, reason=why))
    split = Eligible(targets, excluded, by_wish and bool(excluded))
    return split if core.plugins is None else _without_filtered(core, request, pool, stage, split)


def _without_filtered(
    core: RouterState, request: RoutedRequest, pool: ModelPool, stage: Role, split: Eligible
) -> Eligible:
    """Take out the candidates that filters of ``router.plugins`` exclude."""
    if core.plugins is None or not core.plugins.filters or not split.targets:
        return split
    targets = split.targets
    candidates = PluginCandidates(
        [target for target, _ in targets],
        [worker.card for _, worker in targets],
        lambda: list(pool.active.columns(f"{stage} of filters", targets).numbers),
    )
    reasons = core.plugins.excluded(plugin_request(request, stage), candidates)
    if not reasons:
        return split
    excluded = [Excluded(target=targets[place][0], reason=why) for place, why in sorted(reasons.items())]
    left = [pair for place, pair in enumerate(targets) if place not in reasons]
    return Eligible(left, [*split.excluded, *excluded], False)


def plugin_request(request: RoutedRequest, stage: Role) -> PluginRequest:
    """Return what plug-ins may know of a request."""
    event, wish = request.event, request.event.preferences
    return PluginRequest(
        id=event.id,
        model=event.model,
        stage=stage,
        prompt_tokens=request.prompt.isl,
        output_tokens=wish.osl,
        tenant=event.tenant,
        adapter=event.adapter,
        session=wish.session,
        program=wish.program,
        service_class=wish.service_class,
        priority=wish.priority,
    )


def available(
    core: RouterState, request: RoutedRequest, pool: ModelPool, now: Nanos, stage: Role = "aggregated"
) -> Eligible:
    """Return the `eligible`; doubts don't exclude the last workers that could do a stage for a request."""
    usual = eligible(core, request, pool, now, stage)
    return usual if usual.targets else eligible(core, request, pool, now, stage, doubts=False)


def _does_stage(pool: ModelPool, worker: RosterWorker, stage: Role) -> bool:
    """Whether a worker's role is the one for a stage."""
    role = worker.card.role
    if stage == "aggregated":
        return does_all(worker.card)
    return pool.roles.speaks(worker.card) if stage == "decode" else role == stage


def pin_of(core: RouterState, request: RoutedRequest, stage: Role) -> WorkerId | None:
    """Return the worker to which a request is pinned for a stage.

    Where ``worker``, which is meant for workers that answer, names a prefill worker, it pins the prefill.
    """
    wish = request.event.preferences
    if wish.worker is None and wish.prefill is None:
        return None
    named = None if wish.worker is None else core.roster.get(wish.worker)
    early = named is not None and named.card.role not in FINAL and not request.event.whole
    if stage in FINAL:
        return None if early else wish.worker
    if stage == "prefill" and wish.prefill is not None:
        return wish.prefill
    return wish.worker if early and named and named.card.role == stage else None


def _request_refusal(request: RoutedRequest, worker: RosterWorker, pin: WorkerId | None, loads: bool) -> str | None:
    """Return what in the request itself excludes a worker; ``loads``: that can load adapters."""
    event, card = request.event, worker.card
    wish = event.preferences
    if pin is not None and card.id != pin:
        return f"the request is pinned to {pin}"
    if wish.allowed is not None and card.id not in wish.allowed:
        return "is not among the request's allowed workers"
    if event.adapter is not None and not loads and event.adapter not in card.adapters:
        return f"has no adapter {event.adapter}"
    prompt = request.prompt
    if card.max_model_len is not None and prompt.isl >= card.max_model_len and not prompt.estimated:
        return f"has a maximum context length of {card.max_model_len} tokens, the prompt has {prompt.isl}"
    return None


def _adapter_refusal(request: RoutedRequest, worker: RosterWorker, pool: ModelPool, now: Nanos) -> str | None:
    """Return why a worker can't load a request's adapter now; it then waits for room, unless the load itself fails."""
    adapter, card = request.event.adapter, worker.card
    assert adapter is not None
    reason = pool.adapters.why_not(card.id, adapter, now)
    if reason is not None and not pool.adapters.failed_lately(card.id, adapter, now):
        request.awaits_adapter = True
    return reason


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
    fades = CREDIT_DECAY and not many  # else nobody asks for the least
    expected = pool.expected_output(preferences) if pool.settings.expect_output else preferences.osl
    demand = RequestDemand(
        prompt=prompt,
        unhashed_blocks=unhashed_blocks,
        block_size=size,
        osl=pool.counts.output_mean if expected is None else float(expected),
        least_prefill=min([load(target).prefill_tokens for target, _ in targets], default=0) if fades else 0,
        overlap_credit=(settings.overlap_credit if preferences.overlap_credit is None else preferences.overlap_credit),
        handed=source is not None,
        ms_per_block=pool.speeds.ms_per_block if source is not None else 0.0,
    )
    adapter = request.event.adapter if pool.adapters.workers else None
    usual = pool.speeds.usual(pool.settings.cost.kind)
    far = partial(distance, pool.settings.handoff.distance, source) if source is not None else None
    if many:
        place, columns = _candidate_columns(pool, prompt, targets, now, stage, usual, far)
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
                load(target),
                usual if worker.speed is None else pool.speeds.measured(worker.speed),
                1.0 if far is None else far(worker.card),
                0.0 if adapter is None else pool.adapters.seconds(target.worker, adapter),
            ),
            settings,
        )
        for target, worker in targets
    ], unhashed_blocks


def _candidate_columns(
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
    return columns.place, Candidates(
        columns.numbers.copy(),
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
        return _select_cheapest(costs, rng) if temperature <= 0 else _select_sampled(costs, rng, temperature)
    if mode == "round_robin" or mode == "random":
        place, because = blind(mode, len(costs), rng, turn)
        return Selection(costs[place], because)
    places: Sequence[int] = range(len(costs))
    if mode == "least_loaded":
        return _least_loaded(costs, places, rng, f"of {_workers_text(costs)}")
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


def _select_cheapest(costs: Sequence[Cost], rng: random.Random) -> Selection:
    ties = cheapest_of(costs)
    equal = len(ties)
    chosen = costs[int(ties[int(rng.random() * equal) if equal > 1 else 0])]
    if equal > 1:
        return Selection(chosen, f"{_price_text(chosen)}, drawn among {equal} equal ones")
    if len(costs) == 1:
        return Selection(chosen, f"{_price_text(chosen)}, the only candidate")
    second, total = second_of(costs, int(ties[0]))
    return Selection(chosen, f"{_price_text(chosen)}, the least of {len(costs)}; next {second} at {total:.1f}")


def _select_sampled(costs: Sequence[Cost], rng: random.Random, temperature: float) -> Selection:
    shares = probabilities(totals_of(costs), temperature)
    place = rng.choices(range(len(costs)), weights=shares)[0]
    cost = costs[place]
    return Selection(
        cost, f"{_price_text(cost)}, drawn with probability {shares[place]:.2f} at temperature {temperature:g}"
    )


def _least_loaded(costs: Sequence[Cost], places: Sequence[int], rng: random.Random, among: str) -> Selection:
    running = active_requests_of(costs)
    least = min(running[place] for place in places)
    ties = [place for place in places if running[place] == least]
    chosen = ties[0] if len(ties) == 1 else ties[int(rng.random() * len(ties))]
    return Selection(costs[chosen], f"fewest running requests ({least}), {among}")


def _price_text(cost: Cost) -> str:
    blocks = cost.overlap_blocks  # worded here: this is on the way of every request
    text = f"cost {cost.total:.1f} {cost.unit} with {blocks} block{'' if blocks == 1 else 's'} cached"
    if cost.plugins:
        text += " (" + ", ".join(f"{name} added {added:.3g}" for name, added in cost.plugins.items()) + ")"
    return text


def _workers_text(costs: Sequence[Cost]) -> str:
    return f"{len(costs)} worker{'s' if len(costs) > 1 else ''}"


def pinned(cost: Cost, by: str) -> Selection:
    """The choice that was made beforehand: by the caller's pin or by a session's home."""
    return Selection(cost, f"{by}; {_price_text(cost)}")


def discounted(costs: Sequence[Cost], home: Target | None) -> Sequence[Cost]:
    """Take the soft session discount off the home target's cost."""
    left = 1.0 - SESSION_DISCOUNT
    if home is None:
        return costs
    if isinstance(costs, CostTable):
        return costs.discounted(home, left)
    replace = msgspec.structs.replace
    return [replace(cost, total=cost.total * left, discount=left) if cost.target == home else cost for cost in costs]
