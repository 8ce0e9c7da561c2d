"""Policy sla-classic, Dynamo's SLA planner: replicas from interpolated profiles, correction factors and forecasts.

Every interval: observed over profiled latencies give two correction factors; predictors give the next
interval's requests and lengths; prefill replicas follow from tokens per second, decode replicas from the best
throughput that keeps the corrected ITL.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.kernel.values import Role, Traffic
from penstock.planner.forecast.predictor import IntervalCounts, IntervalShape
from penstock.planner.observation import ModelState
from penstock.planner.performance.interpolators import DecodeInterpolator, PrefillInterpolator
from penstock.planner.performance.speed_sources import KnownSpeeds, Profile, profile_of
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PlannerPlugin, PluginSpec
from penstock.planner.plugins.proposals import PoolTarget, Reason, Result
from penstock.planner.policies.policy_inputs import PolicyInputs
from penstock.planner.remembering import Remembering
from penstock.planner.settings import PlannerSettings
from penstock_dynamo.forecast.predictor_makers import predictor_of, shape_of
from penstock_dynamo.policies.classic import RolePool, about, answer, hold_reason, minimum_of, teams_of
from penstock_dynamo.policies.gpu_budget import PoolPair, Widths, clamp_pair

Interpolator = PrefillInterpolator | DecodeInterpolator


class Correction(NamedTuple):
    """Observed over expected, of TTFT and of ITL; 1 is as profiled."""

    prefill: float = 1.0
    decode: float = 1.0


def prefill_replicas(
    next_: IntervalCounts, interval: float, throughput_per_gpu: float, gpus: int, correction: float = 1.0
) -> int:
    """Return how many prefill engines the next interval needs.

    A correction above 1 is queueing and counts as 1: more engines than the tokens need would not be faster. One below 1
    comes from cached prompts, and reduces the work in proportion.
    """
    load = next_.requests * next_.shape.isl / interval * min(1.0, correction)
    return math.ceil(load / throughput_per_gpu / gpus - 1e-9)


def decode_replicas(next_: IntervalCounts, interval: float, throughput_per_gpu: float, gpus: int) -> int:
    """Return how many decode engines the next interval needs."""
    return math.ceil(next_.requests * next_.shape.osl / interval / throughput_per_gpu / gpus - 1e-9)


def corrected_itl(itl: float, correction: float) -> float:
    """Return the ITL for the look-up, so that the corrected one is ``itl``; itself where no correction makes sense."""
    return itl / correction if correction > 0.0 else itl


class _Model(Remembering):
    """Memory of one model."""

    shape: IntervalShape
    correction: Correction

    def __init__(self, shape: IntervalShape) -> None:
        self.shape = shape
        self.correction = Correction()


class SlaClassic(Remembering):
    """The plugin of policy sla-classic."""

    _models: dict[str, _Model]

    def __init__(self, settings: PlannerSettings, inputs: PolicyInputs) -> None:
        self._options = settings.classic.sla
        self.spec = PluginSpec(
            id="sla_classic",
            stage="propose",
            priority=20,
            interval=self._options.adjustment_interval,
            window=self._options.adjustment_interval,
            needs=("traffic",),
        )
        self._settings, self._inputs = settings, inputs
        self._make = predictor_of(settings, self._options.adjustment_interval)
        self._models = {}
        self._profiles: dict[tuple[str, Role, int, int], Interpolator | None] = {}

    def evaluate(self, context: PluginContext) -> Result:
        targets: list[PoolTarget] = []
        reasons: list[Reason] = []
        evidence: dict[str, Any] = {}
        for model, observed in context.observation.models.items():
            teams = teams_of(observed, self._settings.mode, context)
            teams = {role: team for role, team in teams.items() if role != "aggregated"}
            if not teams:
                text = f"{model} has no prefill or decode pool, and sla-classic knows no other"
                reasons.append(hold_reason("disabled", text))
                continue
            plan = self._plan(model, observed, teams, context, evidence)
            targets += plan[0]
            reasons += plan[1]
        return answer(targets, reasons, evidence)

    # --- one model ----------------------------------------------------------------------------------------------------

    def _plan(
        self,
        model: str,
        observed: ModelState,
        teams: Mapping[Role, RolePool],
        context: PluginContext,
        evidence: dict[str, Any],
    ) -> tuple[list[PoolTarget], list[Reason]]:
        interval = self._options.adjustment_interval
        traffic = context.traffic(model, interval)
        if traffic is None:
            # Unknown is not zero: reading it as zero would scale down while a source is away.
            return [], [
                hold_reason(
                    "no_traffic_data", f"the traffic of {model} could not be read: {observed.why or observed.health}"
                )
            ]
        state = self._models.get(model)
        if state is None:
            state = _Model(shape_of(self._make, self._inputs.trace(model), interval))
            self._models[model] = state
        prefill, decode = self._interpolators(model, teams)
        lacking = [
            role for role, table in (("prefill", prefill), ("decode", decode)) if role in teams and table is None
        ]
        if lacking:
            text = f"nothing is known of the {' and '.join(lacking)} engines of {model}; set planner.classic.profile"
            return [], [hold_reason("no_profile", text)]
        scale = interval / traffic.seconds if traffic.seconds else 1.0
        state.shape.add(traffic.arrived * scale, traffic.shape)
        if not state.shape.has_traffic:
            return [], [hold_reason("no_traffic_data", f"{model} has had no request yet")]
        if not self._options.no_correction:
            state.correction = _correction(traffic, teams, prefill, decode, state.correction)
        return self._size(model, teams, state, prefill, decode, evidence, context)

    def _size(
        self,
        model: str,
        teams: Mapping[Role, RolePool],
        state: _Model,
        prefill: PrefillInterpolator | None,
        decode: DecodeInterpolator | None,
        evidence: dict[str, Any],
        context: PluginContext,
    ) -> tuple[list[PoolTarget], list[Reason]]:
        interval, next_ = self._options.adjustment_interval, state.shape.predict()
        wanted: dict[Role, int] = {}
        facts: dict[str, Any] = {"next": msgspec.to_builtins(next_), "correction": state.correction._asdict()}
        facts["source"] = {
            role: _curve_source(known) for role, known in self._inputs.of(model).items() if role in teams
        }
        reasons: list[Reason] = []
        if prefill is not None and "prefill" in teams:
            per_gpu = prefill.throughput_per_gpu(next_.shape.isl)
            gpus = max(1, teams["prefill"].state.pool.gpus)
            wanted["prefill"] = prefill_replicas(next_, interval, per_gpu, gpus, state.correction.prefill)
            facts["prefill_per_gpu"] = per_gpu
        if decode is not None and "decode" in teams:
            itl = corrected_itl(self._inputs.itl, state.correction.decode)
            best = decode.find_best_throughput_per_gpu(itl, next_.shape.isl + next_.shape.osl / 2.0)
            gpus = max(1, teams["decode"].state.pool.gpus)
            wanted["decode"] = decode_replicas(next_, interval, best.per_gpu, gpus)
            facts |= {"itl": itl, "decode": best._asdict()}
            if not best.met:
                text = f"no load of a decode engine of {model} keeps an ITL of {1000 * itl:.1f} ms; the least is taken"
                reasons.append(hold_reason("slo_out_of_reach", text, itl=itl))
        evidence[model] = facts
        targets = self._fitted(teams, wanted, context)
        text = (
            f"{next_.requests:.0f} requests of {next_.shape.isl:.0f} and {next_.shape.osl:.0f} tokens are expected in "
            f"{interval:g} s, corrections {state.correction.prefill:.2f} and {state.correction.decode:.2f}: "
            + ", ".join(f"{teams[role].name} {teams[role].replicas} -> {count}" for role, count in targets.items())
        )
        reasons.insert(0, about(teams.values(), Reason(code="forecast", text=text, facts=facts)))
        return [PoolTarget(pool=teams[role].name, replicas=count) for role, count in targets.items()], reasons

    def _fitted(
        self, teams: Mapping[Role, RolePool], wanted: dict[Role, int], context: PluginContext
    ) -> dict[Role, int]:
        """Keep minima and the GPU budget, as Dynamo's planner does; the limits at the end of the tick still hold."""
        least = {role: minimum_of(team.name, context.budget) for role, team in teams.items()}
        fitted = {role: max(least[role], count) for role, count in wanted.items()}
        most = context.budget.max_gpus
        if most is not None and len(fitted) == 2:
            widths = Widths(max(1, teams["prefill"].state.pool.gpus), max(1, teams["decode"].state.pool.gpus))
            minima = PoolPair(least["prefill"], least["decode"])
            pair = clamp_pair(PoolPair(fitted["prefill"], fitted["decode"]), widths, -1, most, minima)
            fitted = {"prefill": pair.prefill, "decode": pair.decode}
        return fitted

    def _interpolators(
        self, model: str, teams: Mapping[Role, RolePool]
    ) -> tuple[PrefillInterpolator | None, DecodeInterpolator | None]:
        prefill = decode = None
        for role, team in teams.items():
            room = next((room for engine in team.engines if (room := engine.limits.kv_tokens)), 0)
            gpus = max(1, team.state.pool.gpus)
            key = (model, role, room, gpus)
            if key not in self._profiles:
                known = self._inputs.of(model).get(role)
                profile = None if known is None else _profile(known, gpus, room)
                part = None if profile is None else profile.prefill() if role == "prefill" else profile.decode()
                self._profiles[key] = part
            interpolator = self._profiles[key]
            if isinstance(interpolator, PrefillInterpolator):
                prefill = interpolator
            elif interpolator is not None:
                decode = interpolator
        return prefill, decode

    def part(self, name: str, key: str) -> "_Model":
        return _Model(IntervalShape(self._make))


def _curve_source(known: KnownSpeeds) -> str:
    """Return the source of a role's curves, for display."""
    return "profile" if known.profile is not None else next(iter(known.metrics), "none")


def _profile(known: KnownSpeeds, gpus: int, kv_tokens: int) -> Profile | None:
    """Return the profile of a folder, else one made of the engine's measured or predicted points."""
    if known.profile is not None:
        return known.profile
    points = next((points for points in known.metrics.values()), None)
    if points is None:
        return None
    measured = max((int(point["kv_tokens"]) for point in points.get("decode", ())), default=0)
    return profile_of(points, gpus=gpus, kv_tokens=kv_tokens or max(1, measured))


def _correction(
    traffic: Traffic,
    teams: Mapping[Role, RolePool],
    prefill: PrefillInterpolator | None,
    decode: DecodeInterpolator | None,
    before: Correction,
) -> Correction:
    """Return observed over expected latency; a latency without observation keeps its factor."""
    isl, osl = traffic.shape.isl, traffic.shape.osl
    correction = before
    if prefill is not None and isl and traffic.ttft_mean is not None:
        expected = prefill.ttft(isl)
        if expected > 0.0:
            correction = correction._replace(prefill=traffic.ttft_mean / expected)
    if decode is not None and isl and osl and traffic.itl_mean is not None and traffic.answered:
        workers = max(1, teams["decode"].state.ready)
        duration = traffic.duration_sum / traffic.answered
        # Little's law: how many sequences one engine decoded at a time.
        together = traffic.arrived / workers * duration / traffic.seconds if traffic.seconds else 0.0
        expected = decode.itl_at(together, isl + osl / 2.0)
        if expected > 0.0:
            correction = correction._replace(decode=traffic.itl_mean / expected)
    return correction


def sla_classic(settings: PlannerSettings, inputs: PolicyInputs) -> list[PlannerPlugin]:
    """Return the plugins of policy sla-classic.

    Raises:
        ConfigError: the predictor needs a library that is not installed.
    """
    return [SlaClassic(settings, inputs)]
