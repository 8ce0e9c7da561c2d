"""Policy load-classic, Dynamo's first planner: thresholds on prefill queue and KV use, sampled each second.

Per adjustment interval the mean of all requests that wait for prefill, and the mean KV use of the decode workers, are
compared with thresholds. Steps down are checked first, then prefill up, then decode up. It does not sample while
workers join or leave, and decides nothing in an interval in which they did.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.kernel.values import Role
from penstock.planner.limits.contradictions import refuse
from penstock.planner.observation import ModelState
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PlannerPlugin, PluginSpec
from penstock.planner.plugins.proposals import PoolTarget, Reason, Result
from penstock.planner.remembering import Remembering
from penstock.planner.settings import PlannerSettings
from penstock_dynamo.policies.classic import RolePool, about, answer, hold_reason, in_progress, minimum_of, teams_of
from penstock_dynamo.policies.classic_contradictions import of_load_thresholds

GPUS_MAX = 8
"""Most GPUs of this policy where planner.budget.max_gpus is unset: the default of Dynamo's max_gpu_budget."""
WAITING_KV = 0.02
"""KV use that counts for each waiting request of a decode worker, as in Dynamo."""
DECODE_GRACE = 3
"""Decisions after a new decode worker in which no decode worker is removed, as in Dynamo."""
QUEUE_INTERVALS = 3
"""Intervals for which a falling queue is extrapolated before a prefill worker is added, as in Dynamo."""


@dataclass(slots=True)
class LoadInterval:
    """Samples of one model's interval so far. ``queue``: waiting for prefill; ``kv``: use, 0..1 and more."""

    queue: list[float] = field(default_factory=list)
    kv: list[float] = field(default_factory=list)
    workers: list[str] | None = None
    changed: bool = False
    began: float | None = None
    grace: int = 0
    """Decisions in which no decode worker may be removed."""


class LoadClassic(Remembering):
    """The plugin of policy load-classic."""

    _models: dict[str, LoadInterval]

    def __init__(self, settings: PlannerSettings) -> None:
        options = settings.classic.load
        self.spec = PluginSpec(
            id="load_classic",
            stage="propose",
            priority=10,
            interval=options.metric_pulling_interval,
            needs=("engines",),
        )
        self._settings, self._options = settings, options
        self._models = {}

    def evaluate(self, context: PluginContext) -> Result:
        targets: list[PoolTarget] = []
        reasons: list[Reason] = []
        evidence: dict[str, object] = {}
        for model, observed in context.observation.models.items():
            summary = self._model(model, observed, context, evidence)
            targets += summary.targets
            reasons += summary.reasons
        return answer(targets, reasons, evidence)

    def _model(
        self, model: str, observed: ModelState, context: PluginContext, evidence: dict[str, object]
    ) -> "_LoadSummary":
        teams = teams_of(observed, self._settings.mode, context)
        state = self._models.setdefault(model, LoadInterval())
        if state.began is None:
            state.began = context.at - context.observation.window  # this observation's counts began then
        busy = [team for team in teams.values() if team.starting]
        if busy:
            # Blocked: neither sampled nor decided. The interval begins anew once all workers are there.
            self._models[model] = LoadInterval(grace=state.grace)
            return _LoadSummary([], [in_progress(team) for team in busy])
        workers = sorted({str(engine.worker) for team in teams.values() for engine in team.engines})
        state.changed |= state.workers is not None and workers != state.workers
        state.workers = workers
        self._sample(teams, observed, state)
        if context.at - state.began < self._options.adjustment_interval - 1e-6:
            return _LoadSummary([], [])
        self._models[model] = LoadInterval(workers=workers, began=context.at, grace=max(0, state.grace - 1))
        if state.changed:
            text = f"the workers of {model} changed in this interval, so its means are of neither set"
            return _LoadSummary([], [hold_reason("workers_changed", text)])
        evidence[model] = {
            "queue": _mean_or_none(state.queue),
            "kv": _mean_or_none(state.kv),
            "samples": len(state.queue or state.kv),
        }
        return self._decide(model, teams, state, context)

    def _sample(self, teams: Mapping[Role, RolePool], observed: ModelState, state: LoadInterval) -> None:
        prefill, decode = teams.get("prefill"), teams.get("decode") or teams.get("aggregated")
        if prefill is not None:
            waiting = [engine.waiting for engine in prefill.engines]
            known = [count for count in waiting if count is not None]
            if len(known) == len(waiting) and (waiting or observed.queued is not None):
                state.queue.append(float(sum(known) + (observed.queued or 0)))
        if decode is not None:
            uses = [
                engine.kv_usage + WAITING_KV * (engine.waiting or 0)
                for engine in decode.engines
                if engine.kv_usage is not None
            ]
            if uses and len(uses) == len(decode.engines):
                state.kv.append(sum(uses) / len(uses))

    def _decide(
        self, model: str, teams: Mapping[Role, RolePool], state: LoadInterval, context: PluginContext
    ) -> "_LoadSummary":
        options = self._options
        prefill, decode = teams.get("prefill"), teams.get("decode") or teams.get("aggregated")
        queue, kv = _mean_or_none(state.queue), _mean_or_none(state.kv)
        replicas = {team.name: team.replicas for team in (prefill, decode) if team is not None}
        widths = {team.name: max(1, team.state.pool.gpus) for team in (prefill, decode) if team is not None}
        budget = context.budget
        gpus_max = GPUS_MAX if budget.max_gpus is None else budget.max_gpus
        reasons: list[Reason] = []

        def gpus(name: str, delta: int) -> int:
            return sum(widths[pool] * count for pool, count in replicas.items()) + delta * widths[name]

        def step(team: RolePool, delta: int, text: str) -> bool:
            name, now = team.name, replicas[team.name]
            total = gpus(name, delta)
            if delta > 0 and gpus_max < total:
                reasons.append(
                    hold_reason(
                        "gpu_budget_guard_hold", f"{name} stays at {now}: {total} GPUs are over the budget", pool=name
                    )
                )
                return False
            if delta < 0 and (now <= max(1, minimum_of(name, budget)) or total < (budget.min_gpus or 0)):
                reasons.append(hold_reason("at_minimum", f"{name} stays at {now}, which is its least", pool=name))
                return False
            replicas[name] = now + delta
            code = "scale_up" if delta > 0 else "scale_down"
            reason = Reason(code=code, text=f"{name} {now} -> {now + delta}: {text}")
            reasons.append(about((team,), reason))
            return True

        for team, value in ((prefill, queue), (decode, kv)):
            if team is not None and value is None:
                reasons.append(hold_reason("insufficient_data", f"no load was reported by {team.name}", pool=team.name))
        down, up = options.prefill_queue_scale_down_threshold, options.prefill_queue_scale_up_threshold
        if prefill is not None and queue is not None and queue < down:
            step(prefill, -1, f"{queue:.2f} requests waited for prefill, under {down:g}")
        if decode is not None and kv is not None and kv < options.decode_kv_scale_down_threshold:
            if state.grace > 0:
                text = (
                    f"{decode.name} stays: a worker that came lately has yet to fill, for {state.grace} more decisions"
                )
                reasons.append(hold_reason("decode_grace", text, pool=decode.name, left=state.grace))
            else:
                limit = options.decode_kv_scale_down_threshold
                step(decode, -1, f"mean KV use was {kv:.2f}, under {limit:g}")
        if prefill is not None and queue is not None and queue > up:
            coming = state.queue[-1] + QUEUE_INTERVALS * (state.queue[-1] - state.queue[0])
            if coming < up:
                text = f"{prefill.name} stays: {queue:.2f} waited, but at this pace it is {coming:.2f} soon"
                reasons.append(hold_reason("queue_falls", text, pool=prefill.name, queue=queue, coming=coming))
            else:
                step(prefill, 1, f"{queue:.2f} requests waited for prefill, over {up:g}")
        limit = options.decode_kv_scale_up_threshold
        if decode is not None and kv is not None and kv > limit and step(decode, 1, f"KV use {kv:.2f}, over {limit:g}"):
            self._models[model].grace = DECODE_GRACE
        targets = [
            PoolTarget(pool=team.name, replicas=replicas[team.name])
            for team in (prefill, decode)
            if team is not None and replicas[team.name] != team.replicas
        ]
        return _LoadSummary(targets, reasons)


class _LoadSummary(NamedTuple):
    targets: list[PoolTarget]
    reasons: list[Reason]


def _mean_or_none(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


class Suggested(NamedTuple):
    """Thresholds that a profile suggests: up and down, of the prefill queue and of KV use."""

    queue_up: float
    queue_down: float
    kv_up: float
    kv_down: float


def suggested_thresholds(
    *, ttft: float, ttft_sla: float, sequences: float, isl: float, osl: float, kv_tokens: float
) -> Suggested:
    """Return the thresholds that Dynamo's profiler of that generation suggests.

    Args:
        ttft: seconds of a lone prompt at the chosen point; ``ttft_sla``: the target.
        sequences: that decode together at the chosen point, in a cache with room for ``kv_tokens``.
    """
    slack = ttft_sla / ttft
    usage = sequences * (isl + osl / 2.0) / kv_tokens
    return Suggested(
        max(0.1, 1.2 * slack - 1.0), max(0.1, 0.8 * slack - 1.0), min(1.0, usage + 0.2), max(0.1, usage - 0.2)
    )


def load_classic(settings: PlannerSettings) -> list[PlannerPlugin]:
    """Return the plugins of policy load-classic.

    Raises:
        ConfigError: a threshold to go down is not under the one to go up.
    """
    refuse(of_load_thresholds(settings))
    return [LoadClassic(settings)]
