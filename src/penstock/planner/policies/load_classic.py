"""Is the prefill queue long, is the KV cache full? The field's first planner: sampled each second, a step per interval.

Per adjustment interval the mean of all requests that wait for prefill, and the mean KV use of the decode workers, are
held against thresholds. Ways down are looked at first, then prefill up, then decode up. It does not look while workers
come or go, and decides nothing in an interval in which they did.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from penstock.kernel.values import Role
from penstock.planner.context import Context
from penstock.planner.plugins import Plugin, Spec
from penstock.planner.policies.classic import Team, answer, held, in_progress, minimum_of, teams_of
from penstock.planner.proposals import Because, Override, Result, Target
from penstock.planner.seen import ModelSeen
from penstock.planner.settings import PlannerSettings

SAID_ELSEWHERE = {
    "namespace": "planner.virtual.namespace",
    "environment": "planner.connector",
    "log_dir": "planner.report",
}
"""Options of the field's planner that are not this policy's here, and where they are."""


@dataclass(slots=True)
class Interval:
    """What one model's interval has had so far. ``queue``: waiting for prefill; ``kv``: use, 0..1 and more."""

    queue: list[float] = field(default_factory=list)
    kv: list[float] = field(default_factory=list)
    workers: list[str] | None = None
    changed: bool = False
    began: float | None = None
    grace: int = 0
    """Decisions in which no decode worker may go."""


class LoadClassic:
    """The plugin of policy load-classic."""

    def __init__(self, settings: PlannerSettings) -> None:
        options = settings.classic.load
        self.spec = Spec(
            id="load_classic",
            stage="propose",
            priority=10,
            interval=options.metric_pulling_interval,
            needs=("engines",),
        )
        self._settings, self._options = settings, options
        self._models: dict[str, Interval] = {}
        self._told_elsewhere = False

    def evaluate(self, context: Context) -> Result:
        targets: list[Target] = []
        because: list[Because] = self._elsewhere()
        evidence: dict[str, object] = {}
        for model, seen in self._planned(context).items():
            found = self._model(model, seen, context, evidence)
            targets += found.targets
            because += found.because
        result = answer(targets, because, evidence)
        if self._options.no_operation and isinstance(result, Override):
            words = ", ".join(f"{target.pool} {target.replicas}" for target in targets)
            told = held("disabled", f"planner.classic.load.no_operation is set; it would be {words}")
            return answer([], [*because, told], {})
        return result

    def _planned(self, context: Context) -> Mapping[str, ModelSeen]:
        models, name = context.observation.models, self._options.served_model_name
        return {name: models[name]} if name in models else models

    def _elsewhere(self) -> list[Because]:
        if self._told_elsewhere:
            return []
        self._told_elsewhere = True
        default = type(self._options)()
        set_here = [name for name in SAID_ELSEWHERE if getattr(self._options, name) != getattr(default, name)]
        return [
            held("said_elsewhere", f"planner.classic.load.{name} does nothing: {SAID_ELSEWHERE[name]} says it here")
            for name in set_here
        ]

    def _model(self, model: str, seen: ModelSeen, context: Context, evidence: dict[str, object]) -> "_Found":
        teams = teams_of(seen, self._settings.mode, context)
        state = self._models.setdefault(model, Interval())
        if state.began is None:
            state.began = context.at - context.observation.window  # what this look counts began then
        busy = [team for team in teams.values() if team.starting]
        if busy:
            # Blocked: neither sampled nor decided. The interval begins anew once all workers are there.
            self._models[model] = Interval(grace=state.grace)
            return _Found([], [in_progress(team) for team in busy])
        workers = sorted({str(engine.worker) for team in teams.values() for engine in team.engines})
        state.changed |= state.workers is not None and workers != state.workers
        state.workers = workers
        self._sample(teams, seen, state)
        if context.at - state.began < self._options.adjustment_interval - 1e-6:
            return _Found([], [])
        self._models[model] = Interval(workers=workers, began=context.at, grace=max(0, state.grace - 1))
        if state.changed:
            text = f"the workers of {model} changed in this interval, so its means are of neither set"
            return _Found([], [held("workers_changed", text)])
        evidence[model] = {"queue": _mean(state.queue), "kv": _mean(state.kv), "samples": len(state.queue or state.kv)}
        return self._decide(model, teams, state, context)

    def _sample(self, teams: Mapping[Role, Team], seen: ModelSeen, state: Interval) -> None:
        prefill, decode = teams.get("prefill"), teams.get("decode") or teams.get("aggregated")
        if prefill is not None:
            waiting = [engine.waiting for engine in prefill.engines]
            known = [count for count in waiting if count is not None]
            if len(known) == len(waiting) and (waiting or seen.queued is not None):
                state.queue.append(float(sum(known) + (seen.queued or 0)))
        if decode is not None:
            uses = [
                engine.kv_usage + self._options.waiting_kv * (engine.waiting or 0)
                for engine in decode.engines
                if engine.kv_usage is not None
            ]
            if uses and len(uses) == len(decode.engines):
                state.kv.append(sum(uses) / len(uses))

    def _decide(self, model: str, teams: Mapping[Role, Team], state: Interval, context: Context) -> "_Found":
        options = self._options
        prefill, decode = teams.get("prefill"), teams.get("decode") or teams.get("aggregated")
        queue, kv = _mean(state.queue), _mean(state.kv)
        replicas = {team.name: team.wanted for team in (prefill, decode) if team is not None}
        widths = {}
        if prefill is not None:
            widths[prefill.name] = max(prefill.pool.gpus, options.prefill_engine_num_gpu)
        if decode is not None:
            widths[decode.name] = max(decode.pool.gpus, options.decode_engine_num_gpu)
        because: list[Because] = []

        def gpus(name: str, delta: int) -> int:
            return sum(widths[pool] * count for pool, count in replicas.items()) + delta * widths[name]

        def step(team: Team, delta: int, text: str) -> bool:
            name, now = team.name, replicas[team.name]
            total = gpus(name, delta)
            if delta > 0 and 0 <= options.max_gpu_budget < total:
                because.append(
                    held("gpu_budget_guard_hold", f"{name} stays at {now}: {total} GPUs are over the budget")
                )
                return False
            if delta < 0 and (now <= max(1, minimum_of(name, context.budget)) or total < options.min_gpu_budget):
                because.append(held("at_minimum", f"{name} stays at {now}, which is its least"))
                return False
            replicas[name] = now + delta
            code = "scale_up" if delta > 0 else "scale_down"
            because.append(Because(code=code, text=f"{name} {now} -> {now + delta}: {text}"))
            return True

        for team, value in ((prefill, queue), (decode, kv)):
            if team is not None and value is None:
                because.append(held("insufficient_data", f"nothing was told of the load of {team.name}"))
        down, up = options.prefill_queue_scale_down_threshold, options.prefill_queue_scale_up_threshold
        if prefill is not None and queue is not None and queue < down:
            step(prefill, -1, f"{queue:.2f} requests waited for prefill, under {down:g}")
        if decode is not None and kv is not None and kv < options.decode_kv_scale_down_threshold:
            if state.grace > 0:
                text = (
                    f"{decode.name} stays: a worker that came lately has yet to fill, for {state.grace} more decisions"
                )
                because.append(held("decode_grace", text, left=state.grace))
            else:
                limit = options.decode_kv_scale_down_threshold
                step(decode, -1, f"mean KV use was {kv:.2f}, under {limit:g}")
        if prefill is not None and queue is not None and queue > up:
            coming = state.queue[-1] + options.new_prefill_worker_queue_buffer_period * (
                state.queue[-1] - state.queue[0]
            )
            if coming < up:
                text = f"{prefill.name} stays: {queue:.2f} waited, but at this pace it is {coming:.2f} soon"
                because.append(held("queue_falls", text, queue=queue, coming=coming))
            else:
                step(prefill, 1, f"{queue:.2f} requests waited for prefill, over {up:g}")
        limit = options.decode_kv_scale_up_threshold
        if decode is not None and kv is not None and kv > limit and step(decode, 1, f"KV use {kv:.2f}, over {limit:g}"):
            self._models[model].grace = options.new_decode_worker_grace_period
        targets = [
            Target(pool=team.name, replicas=replicas[team.name])
            for team in (prefill, decode)
            if team is not None and replicas[team.name] != team.wanted
        ]
        return _Found(targets, because)

    def snapshot(self) -> Any:
        return {
            "models": {name: asdict(state) for name, state in self._models.items()},
            "told": self._told_elsewhere,
        }

    def restore(self, state: Any) -> None:
        self._models = {name: Interval(**told) for name, told in state["models"].items()}
        self._told_elsewhere = state["told"]


class _Found(NamedTuple):
    targets: list[Target]
    because: list[Because]


def _mean(values: list[float]) -> float | None:
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
    """Return the thresholds that the field's profiler of that generation suggests.

    Args:
        ttft: seconds of a lone prompt at the chosen point; ``ttft_sla``: that are promised.
        sequences: that decode together at the chosen point, in a cache with room for ``kv_tokens``.
    """
    slack = ttft_sla / ttft
    usage = sequences * (isl + osl / 2.0) / kv_tokens
    return Suggested(
        max(0.1, 1.2 * slack - 1.0), max(0.1, 0.8 * slack - 1.0), min(1.0, usage + 0.2), max(0.1, usage - 0.2)
    )


def load_classic(settings: PlannerSettings) -> list[Plugin]:
    """Return the plugins of policy load-classic."""
    return [LoadClassic(settings)]
