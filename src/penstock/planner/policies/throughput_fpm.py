"""How much will come, and how many engines is that? The field's throughput loop: predict, then propose.

Each interval the demand of the next one is forecast; one engine's capacity within the service level comes from its
performance model; replicas are demand over capacity, each role by itself. With a load loop beside it the result is a
floor, else it is what should be.
"""

import math
from collections.abc import Mapping
from typing import Any

from penstock.kernel.values import Role
from penstock.planner.budget import Pair, Widths, cap_change, clamp_pair
from penstock.planner.context import Context
from penstock.planner.forecast.base import Interval, Shape
from penstock.planner.performance.fpm import (
    aggregated_capacity,
    decode_capacity,
    decode_context,
    effective_isl,
    prefill_capacity,
)
from penstock.planner.performance.live import LiveRegression
from penstock.planner.performance.model import EngineLimits
from penstock.planner.performance.regressions import Capacity
from penstock.planner.performance.sources import pick
from penstock.planner.plugins import Plugin, Spec
from penstock.planner.policies.classic import Passes, Team, answer, held, minimum_of, teams_of
from penstock.planner.policies.known import Inputs, predictor_of, shape_of
from penstock.planner.proposals import Because, Kind, Predicted, Prediction, Result, Target
from penstock.planner.settings import USUAL_ITL, USUAL_TTFT, PlannerSettings


class ThroughputPredict:
    """PREDICT: requests and lengths of the next interval; share of cache and accept length as they last were."""

    def __init__(self, settings: PlannerSettings, inputs: Inputs) -> None:
        self._interval = settings.throughput_interval
        self.spec = Spec(
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
        self._shapes: dict[str, Shape] = {}
        self._last: dict[str, list[float | None]] = {}

    def evaluate(self, context: Context) -> Result:
        found: dict[str, Prediction] = {}
        for model in context.observation.models:
            traffic = context.traffic(model, self._interval)
            if traffic is None:
                continue  # not known is not none: nothing is learnt, and nothing is predicted
            shape = self._shapes.get(model)
            if shape is None:
                shape = self._shapes[model] = shape_of(self._make, self._inputs.trace(model), self._interval)
            scale = self._interval / traffic.seconds if traffic.seconds else 1.0
            shape.add(Interval(traffic.arrived * scale, traffic.isl or math.nan, traffic.osl or math.nan))
            last = self._last.setdefault(model, [None, None])
            last[0] = traffic.hit_rate if traffic.hit_rate is not None else last[0]
            last[1] = traffic.accept_length if traffic.accept_length is not None else last[1]
            if not shape.seen:
                continue
            next_ = shape.predict()
            found[model] = Prediction(
                seconds=self._interval,
                requests=next_.requests,
                isl=next_.isl,
                osl=next_.osl,
                hit_rate=last[0],
                accept_length=last[1],
                source=self._name,
            )
        return Predicted(models=found)

    def snapshot(self) -> Any:
        shapes = {name: shape.snapshot() for name, shape in self._shapes.items()}
        return {"shapes": shapes, "last": {name: list(told) for name, told in self._last.items()}}

    def restore(self, state: Any) -> None:
        self._last = {name: list(told) for name, told in state["last"].items()}
        for name, told in state["shapes"].items():
            self._shapes[name] = Shape(self._make)
            self._shapes[name].restore(told)


class ThroughputPropose:
    """PROPOSE: replicas of the demand that is predicted.

    Args:
        floor: say only the least that there should be, for a load loop to work above.
    """

    def __init__(self, settings: PlannerSettings, inputs: Inputs, *, floor: bool = False) -> None:
        self.spec = Spec(
            id="throughput_propose",
            stage="propose",
            priority=20,
            interval=settings.throughput_interval,
            hold="hold_last",
            requires=("predictions",),
            needs=("engines",),
        )
        self._settings, self._inputs, self._floor = settings, inputs, floor
        self._live: dict[str, LiveRegression] = {}
        """By model and role, as ``model|role``."""
        self._passes = Passes()
        self.floors: dict[str, int] = {}
        """Pool -> the least that there should be, as last said: 1 before."""

    def evaluate(self, context: Context) -> Result:
        self._learn(context)
        targets: list[Target] = []
        because: list[Because] = []
        evidence: dict[str, Any] = {}
        for model, seen in context.observation.models.items():
            prediction = context.predictions.get(model)
            if prediction is None or None in (prediction.requests, prediction.isl, prediction.osl):
                because.append(held("no_prediction", f"nothing is predicted of {model}"))
                continue
            teams = teams_of(seen, self._settings.mode, context)
            told: dict[str, Any] = {}
            capacities = {role: self._capacity(model, team, prediction, told) for role, team in teams.items()}
            if not teams:
                because.append(held("disabled", f"{model} has no pool that mode {self._settings.mode} plans"))
                continue
            wanted, why = self._replicas(model, teams, capacities, prediction, context)
            because += why
            evidence[model] = told
            self.floors |= {teams[role].name: count for role, count in wanted.items()}
            for role, team in teams.items():
                # A floor goes on where nothing new is known, or it would fall with the first gap.
                if role in wanted or (self._floor and team.name in self.floors):
                    kind: Kind = "at_least" if self._floor else "set"
                    targets.append(Target(pool=team.name, replicas=self.floors[team.name], kind=kind))
        return answer(targets, because, evidence)

    # --- one model ----------------------------------------------------------------------------------------------------

    def _replicas(
        self,
        model: str,
        teams: Mapping[Role, Team],
        capacities: Mapping[Role, Capacity | None],
        prediction: Prediction,
        context: Context,
    ) -> tuple[dict[Role, int], list[Because]]:
        blind = [role for role, capacity in capacities.items() if capacity is None]
        because = [
            held("model_not_ready", f"too little is known of how fast {teams[role].name} is", pool=teams[role].name)
            for role in blind
        ]
        pair: list[Role] = [role for role in ("prefill", "decode") if role in teams]
        because += [
            held("partner_not_ready", f"{teams[role].name} stays too: one role without the other is no use")
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
            raw = max(math.ceil(demand / capacity.rate - 1e-9) if capacity.rate > 0.0 else team.wanted, least)
            cap = self._settings.classic.fpm.max_throughput_scaling_replicas
            wanted[role] = cap_change(team.wanted, raw, cap, least)
            limited = "" if wanted[role] == raw else f", {cap} at a time"
            text = (
                f"{team.name} {team.wanted} -> {wanted[role]}: {demand:.3g} req/s are expected and one engine does "
                f"{capacity.rate:.3g} at {1000 * capacity.seconds:.0f} ms{limited}"
            )
            because.append(Because(code="throughput", text=text, facts={"raw": raw, **capacity._asdict()}))
            if not capacity.met:
                text = f"no batch of an engine of {team.name} keeps the service level; the best effort is planned with"
                because.append(held("slo_out_of_reach", text, pool=team.name))
        return self._fitted(teams, wanted, context), because

    def _fitted(self, teams: Mapping[Role, Team], wanted: dict[Role, int], context: Context) -> dict[Role, int]:
        budget = context.budget
        if budget.max_gpus is None or not {"prefill", "decode"} <= set(wanted):
            return wanted
        prefill, decode = teams["prefill"], teams["decode"]
        pair = clamp_pair(
            Pair(wanted["prefill"], wanted["decode"]),
            Widths(max(1, prefill.pool.gpus), max(1, decode.pool.gpus)),
            -1 if budget.min_gpus is None else budget.min_gpus,
            budget.max_gpus,
            Pair(minimum_of(prefill.name, budget), minimum_of(decode.name, budget)),
        )
        return {**wanted, "prefill": pair.prefill, "decode": pair.decode}

    def _capacity(self, model: str, team: Team, prediction: Prediction, told: dict[str, Any]) -> Capacity | None:
        speed = self._model(model, team.role)
        if not speed.ready:
            return None
        limits = EngineLimits.of(team.engines[0]) if team.engines else EngineLimits()
        isl, osl = max(1.0, prediction.isl or 0.0), max(1.0, prediction.osl or 0.0)
        ttft, itl = self._settings.slo.ttft or USUAL_TTFT, self._settings.slo.itl or USUAL_ITL
        hit, accept = prediction.hit_rate, max(1.0, prediction.accept_length or 1.0)
        found: Capacity | None
        if team.role == "prefill":
            found = prefill_capacity(speed, limits, isl=isl, ttft=ttft, hit_rate=hit)
        elif team.role == "decode":
            found = decode_capacity(speed, limits, isl=isl, osl=osl, itl=itl, accept=accept)
        else:
            found = aggregated_capacity(
                speed, limits, isl=isl, osl=osl, ttft=ttft, itl=itl, hit_rate=hit, accept=accept
            )
        told[team.name] = {"source": speed.source, "capacity": None if found is None else found._asdict()}
        if found is not None:
            batch = found.batch
            tokens = float(min(limits.max_batched_tokens, batch * effective_isl(isl, hit)))
            load = (tokens, 0.0, 0.0) if team.role == "prefill" else (0.0, batch, batch * decode_context(isl, osl))
            told[team.name]["extrapolating"] = speed.extrapolating(*load)
        return found

    def _model(self, model: str, role: Role) -> LiveRegression:
        """Return what is known of an engine's speed: a prior that passes correct, or what passes alone say."""
        key = f"{model}|{role}"
        if key not in self._live:
            known = self._inputs.of(model).get(role)
            found = None if known is None else pick(known, role=role)
            self._live[key] = LiveRegression(None if found is None else found.model)
        return self._live[key]

    def _learn(self, context: Context) -> None:
        for look in self._passes.fresh(context):
            for model, seen in look.models.items():
                for engine in seen.engines("prefill", "decode", "aggregated"):
                    if engine.steps is not None:
                        self._model(model, engine.role).learn(engine.steps)

    def snapshot(self) -> Any:
        return {
            "live": {key: live.snapshot() for key, live in self._live.items()},
            "passes": self._passes.snapshot(),
            "floors": dict(self.floors),
        }

    def restore(self, state: Any) -> None:
        for key, told in state["live"].items():
            model, _, role = key.rpartition("|")
            self._model(model, role).restore(told)  # type: ignore[arg-type]
        self._passes.restore(state["passes"])
        self.floors = dict(state["floors"])


def throughput_fpm(settings: PlannerSettings, inputs: Inputs) -> list[Plugin]:
    """Return the plugins of policy throughput-fpm.

    Raises:
        ConfigError: the predictor needs a library that is not installed.
    """
    return [ThroughputPredict(settings, inputs), ThroughputPropose(settings, inputs)]
