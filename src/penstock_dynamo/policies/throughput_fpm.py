"""Policy throughput-fpm, Dynamo's throughput loop: predicts the next interval's demand, then proposes replicas.

Each interval the demand of the next one is forecast; one engine's capacity within the service level comes from its
performance model; replicas are demand over capacity, each role by itself. With a load loop beside it the result is a
floor, else it is the target.
"""

import math
from collections.abc import Mapping
from typing import Any

from penstock.kernel.values import UNKNOWN_SHAPE, USUAL_LIMITS, RequestShape, Role
from penstock.planner.forecast.predictor import IntervalShape
from penstock.planner.performance.live_regression import LiveRegression
from penstock.planner.performance.regressions import EngineRate
from penstock.planner.performance.speed_sources import pick
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PluginSpec
from penstock.planner.plugins.proposals import Kind, PoolTarget, Predicted, Prediction, Reason, Result
from penstock.planner.policies.policy_inputs import PolicyInputs
from penstock.planner.remembering import Remembering
from penstock.planner.settings import PlannerSettings
from penstock_dynamo.forecast.predictor_makers import predictor_of, shape_of
from penstock_dynamo.policies.classic import (
    PassTotals,
    RolePool,
    about,
    answer,
    guarded,
    hold_reason,
    minimum_of,
    teams_of,
)
from penstock_dynamo.policies.engine_throughput import (
    aggregated_capacity,
    decode_capacity,
    decode_context,
    effective_isl,
    prefill_capacity,
)
from penstock_dynamo.policies.gpu_budget import cap_change


class ThroughputPredict(Remembering):
    """PREDICT: requests and lengths of the next interval; share of cache and accept length keep their last values."""

    _shapes: dict[str, IntervalShape]
    _last: dict[str, RequestShape[float | None]]
    """Model -> its mean request, each value the last one that was known."""

    def __init__(self, settings: PlannerSettings, inputs: PolicyInputs) -> None:
        self._interval = settings.throughput_interval
        self.spec = PluginSpec(
            id="throughput_predict",
            stage="predict",
            priority=0,
            interval=self._interval,
            window=self._interval,
            needs=("traffic",),
        )
        self._inputs = inputs
        self._name = settings.classic.forecast.predictor
        self._make = predictor_of(settings, self._interval)
        self._shapes = {}
        self._last = {}

    def evaluate(self, context: PluginContext) -> Result:
        predictions: dict[str, Prediction] = {}
        for model in context.observation.models:
            traffic = context.traffic(model, self._interval)
            if traffic is None:
                continue  # unknown is not zero: nothing is learnt, and nothing is predicted
            shape = self._shapes.get(model)
            if shape is None:
                shape = self._shapes[model] = shape_of(self._make, self._inputs.trace(model), self._interval)
            scale = self._interval / traffic.seconds if traffic.seconds else 1.0
            shape.add(traffic.arrived * scale, traffic.shape)
            last = self._last[model] = traffic.shape.filled(self._last.get(model, UNKNOWN_SHAPE))
            if not shape.has_traffic:
                continue
            next_ = shape.predict()
            predictions[model] = Prediction(
                seconds=self._interval,
                requests=next_.requests,
                shape=RequestShape(next_.shape.isl, next_.shape.osl, last.hit_rate, last.accept_length),
                source=self._name,
            )
        return Predicted(models=predictions)

    def part(self, name: str, key: str) -> IntervalShape:
        return IntervalShape(self._make)


class ThroughputPropose(Remembering):
    """PROPOSE: replicas for the predicted demand.

    Args:
        floor: give only a lower bound, for a load loop to work above.
    """

    _live: dict[str, LiveRegression]
    """By model and role, as ``model|role``."""
    _passes: PassTotals
    floors: dict[str, int]
    """Pool -> its last lower bound: 1 before any."""

    def __init__(self, settings: PlannerSettings, inputs: PolicyInputs, *, floor: bool = False) -> None:
        self.spec = PluginSpec(
            id="throughput_propose",
            stage="propose",
            priority=20,
            interval=settings.throughput_interval,
            hold="hold_last",
            requires=("predictions",),
            needs=("engines",),
        )
        self._settings, self._inputs, self._floor = settings, inputs, floor
        self._live = {}
        self._passes = PassTotals()
        self.floors = {}

    def evaluate(self, context: PluginContext) -> Result:
        self._learn(context)
        targets: list[PoolTarget] = []
        reasons: list[Reason] = []
        evidence: dict[str, Any] = {}
        for model, observed in context.observation.models.items():
            prediction = context.predictions.get(model)
            if prediction is None or None in (prediction.requests, prediction.shape.isl, prediction.shape.osl):
                reasons.append(hold_reason("no_prediction", f"nothing is predicted of {model}"))
                continue
            teams = teams_of(observed, self._settings.mode, context)
            facts: dict[str, Any] = {}
            capacities = {role: self._capacity(model, team, prediction, facts) for role, team in teams.items()}
            if not teams:
                reasons.append(hold_reason("disabled", f"{model} has no pool that mode {self._settings.mode} plans"))
                continue
            wanted, why = self._replicas(model, teams, capacities, prediction, context)
            reasons += why
            evidence[model] = facts
            self.floors |= {teams[role].name: count for role, count in wanted.items()}
            for role, team in teams.items():
                # A floor stays where nothing new is known, or it would fall with the first gap.
                if role in wanted or (self._floor and team.name in self.floors):
                    kind: Kind = "at_least" if self._floor else "set"
                    targets.append(PoolTarget(pool=team.name, replicas=self.floors[team.name], kind=kind))
        return answer(targets, reasons, evidence)

    # --- one model ----------------------------------------------------------------------------------------------------

    def _replicas(
        self,
        model: str,
        teams: Mapping[Role, RolePool],
        capacities: Mapping[Role, EngineRate | None],
        prediction: Prediction,
        context: PluginContext,
    ) -> tuple[dict[Role, int], list[Reason]]:
        blind = [role for role, capacity in capacities.items() if capacity is None]
        reasons = [
            hold_reason(
                "model_not_ready", f"too little is known of how fast {teams[role].name} is", pool=teams[role].name
            )
            for role in blind
        ]
        pair: list[Role] = [role for role in ("prefill", "decode") if role in teams]
        reasons += [
            hold_reason(
                "partner_not_ready",
                f"{teams[role].name} stays too: one role without the other is no use",
                pool=teams[role].name,
            )
            for role in pair
            if role not in blind and set(pair) & set(blind)
        ]
        able = [role for role in teams if role not in blind and (role not in pair or not set(pair) & set(blind))]
        demand = (prediction.requests or 0.0) / prediction.seconds
        wanted: dict[Role, int] = {}
        for role in able:
            team, capacity = teams[role], capacities[role]
            assert capacity is not None
            least = minimum_of(team.name, context.budget)
            raw = max(math.ceil(demand / capacity.rate - 1e-9) if capacity.rate > 0.0 else team.replicas, least)
            cap = self._settings.classic.fpm.max_throughput_scaling_replicas
            wanted[role] = cap_change(team.replicas, raw, cap, least)
            limited = "" if wanted[role] == raw else f", {cap} at a time"
            text = (
                f"{team.name} {team.replicas} -> {wanted[role]}: {demand:.3g} req/s are expected and one engine does "
                f"{capacity.rate:.3g} at {1000 * capacity.seconds:.0f} ms{limited}"
            )
            reason = Reason(code="throughput", text=text, facts={"raw": raw, **capacity._asdict()})
            reasons.append(about((team,), reason))
            if not capacity.met:
                text = f"no batch of an engine of {team.name} keeps the service level; the best effort is planned with"
                reasons.append(hold_reason("slo_out_of_reach", text, pool=team.name))
        wanted, fitted = guarded(teams, wanted, context.budget)
        return wanted, [fitted, *reasons] if fitted else reasons

    def _capacity(self, model: str, team: RolePool, prediction: Prediction, facts: dict[str, Any]) -> EngineRate | None:
        speed = self._model(model, team.role)
        if not speed.ready:
            return None
        limits = team.engines[0].limits.filled(USUAL_LIMITS) if team.engines else USUAL_LIMITS
        shape = prediction.shape
        isl, osl = max(1.0, shape.isl or 0.0), max(1.0, shape.osl or 0.0)
        ttft, itl = self._inputs.slo.planned
        hit, accept = shape.hit_rate, max(1.0, shape.accept_length or 1.0)
        capacity: EngineRate | None
        if team.role == "prefill":
            capacity = prefill_capacity(speed, limits, isl=isl, ttft=ttft, hit_rate=hit)
        elif team.role == "decode":
            capacity = decode_capacity(speed, limits, isl=isl, osl=osl, itl=itl, accept=accept)
        else:
            capacity = aggregated_capacity(
                speed, limits, isl=isl, osl=osl, ttft=ttft, itl=itl, hit_rate=hit, accept=accept
            )
        facts[team.name] = {"source": speed.source, "capacity": None if capacity is None else capacity._asdict()}
        if capacity is not None:
            batch = capacity.batch
            tokens = float(min(limits.max_num_batched_tokens, batch * effective_isl(isl, hit)))
            load = (tokens, 0.0, 0.0) if team.role == "prefill" else (0.0, batch, batch * decode_context(isl, osl))
            facts[team.name]["extrapolating"] = speed.extrapolating(*load)
        return capacity

    def _model(self, model: str, role: Role) -> LiveRegression:
        """Return the speed model of an engine: a prior corrected by passes, or passes alone."""
        key = f"{model}|{role}"
        if key not in self._live:
            known = self._inputs.of(model).get(role)
            picked = None if known is None else pick(known, role=role)
            self._live[key] = LiveRegression(None if picked is None else picked.model)
        return self._live[key]

    def _learn(self, context: PluginContext) -> None:
        for look in self._passes.fresh(context):
            for model, observed in look.models.items():
                for engine in observed.engines("prefill", "decode", "aggregated"):
                    if engine.steps is not None:
                        self._model(model, engine.role).learn(engine.steps)

    def part(self, name: str, key: str) -> LiveRegression:
        model, _, role = key.rpartition("|")
        return self._model(model, role)  # type: ignore[arg-type]
