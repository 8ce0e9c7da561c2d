"""Eligibility of workers: the candidates for one stage of a request, and those excluded, each with its reason."""

from typing import NamedTuple

from penstock.kernel.machine import Nanos
from penstock.kernel.values import Role, Target, WorkerId
from penstock.router.events import Excluded
from penstock.router.model_pool import ModelPool
from penstock.router.requests.routed_request import RoutedRequest
from penstock.router.requests.stage_graph import FINAL, does_all
from penstock.router.router_state import RouterState
from penstock.router.selection.router_plugins import PluginCandidates, PluginRequest
from penstock.router.workers.roster import RosterWorker


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
            return split if core.plugins is None else _filtered(core, request, pool, stage, split)
    for worker, places in core.roster.places.values():
        card = worker.card
        if card.model != model:
            continue
        if not pool.roles.plain and not _does(pool, worker, stage) and not (event.whole and pin == card.id):
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
            reason = _unwanted(request, worker, pin, loads)
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
    return split if core.plugins is None else _filtered(core, request, pool, stage, split)


def _filtered(core: RouterState, request: RoutedRequest, pool: ModelPool, stage: Role, split: Eligible) -> Eligible:
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


def _does(pool: ModelPool, worker: RosterWorker, stage: Role) -> bool:
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


def _unwanted(request: RoutedRequest, worker: RosterWorker, pin: WorkerId | None, loads: bool) -> str | None:
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
