"""Policies load-fpm and load-fpm-1.6, Dynamo's load loop: TTFT and ITL per engine from its passes, one step at a time.

Lines through the observed passes estimate the first token of the next prompt, behind the waiting ones, and the
duration of the next token. Two generations:

- ``load-fpm``: up where ALL engines are over the service level, down where all are under its share ``sensitivity``.
- ``load-fpm-1.6``: down only where the load, shared by one engine fewer, would still be safe; and while replicas start
  a step down that has been wanted for a whole interval is taken.
"""

from typing import Any

import msgspec

from penstock.kernel.values import RequestShape
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PluginSpec
from penstock.planner.plugins.proposals import PoolTarget, Reason, Result
from penstock.planner.policies.policy_inputs import PolicyInputs
from penstock.planner.remembering import Remembering
from penstock.planner.settings import PlannerSettings
from penstock_dynamo.policies.classic import (
    PassTotals,
    RolePool,
    ScaleStep,
    about,
    answer,
    guarded,
    hold_reason,
    in_progress,
    mismatch,
    teams_of,
)
from penstock_dynamo.policies.estimates import Estimate, RoleRegressions, Rule
from penstock_dynamo.policies.throughput_fpm import ThroughputPropose


class LoadFpm(Remembering):
    """The load loop.

    Args:
        inputs: with the SLO.
        rule: how a way down is judged.
        floors: the throughput loop, where there is one; its floors are kept.
    """

    _lines: dict[str, RoleRegressions]
    _typical: dict[str, RequestShape[float]]
    """Model -> its mean request, of the last values that were known."""
    _passes: PassTotals
    _proposed: dict[str, int]
    """Pool -> a step down that was wanted while replicas started, at the last call."""

    def __init__(
        self, settings: PlannerSettings, inputs: PolicyInputs, rule: Rule, floors: ThroughputPropose | None = None
    ) -> None:
        self.spec = PluginSpec(
            id="load_propose",
            stage="propose",
            priority=10,
            interval=settings.load_interval,
            needs=("engines", "traffic"),
        )
        self._settings, self._inputs, self._rule, self._throughput = settings, inputs, rule, floors
        self._lines = {}
        self._typical = {}
        self._passes = PassTotals()
        self._proposed = {}

    def evaluate(self, context: PluginContext) -> Result:
        self._learn(context)
        targets: list[PoolTarget] = []
        reasons: list[Reason] = []
        evidence: dict[str, Any] = {}
        for model, observed in context.observation.models.items():
            teams = teams_of(observed, self._settings.mode, context)
            if not teams:
                reasons.append(hold_reason("disabled", f"{model} has no pool that mode {self._settings.mode} plans"))
                continue
            steps = {role: self._step(model, team, evidence) for role, team in teams.items()}
            wanted = {role: teams[role].replicas + step.delta for role, step in steps.items()}
            wanted, fitted = guarded(teams, wanted, context.budget)
            reasons += [fitted] if fitted else []
            reasons += [about((teams[role],), step.reason) for role, step in steps.items()]
            targets += [PoolTarget(pool=teams[role].name, replicas=count) for role, count in wanted.items()]
        if all(target.replicas == context.baseline.get(target.pool) for target in targets):
            targets = []
        return answer(targets, reasons, evidence)

    # --- one pool -----------------------------------------------------------------------------------------------------

    def _step(self, model: str, team: RolePool, evidence: dict[str, Any]) -> ScaleStep:
        proposed = self._proposed.pop(team.name, None)
        if team.starting and self._rule == "all-under":
            return ScaleStep(0, in_progress(team))
        wrong = mismatch(team)
        if wrong is not None and not team.starting:
            return ScaleStep(0, wrong)
        lines, typical = self._lines.get(f"{model}|{team.role}"), self._typical.get(model, RequestShape(0.0, 0.0))
        n = team.replicas
        spread = n / (n - 1) if n > 1 else 1.0
        estimates = [lines.estimate(engine, typical, spread) if lines else None for engine in team.engines]
        known = [each for each in estimates if each is not None]
        if len(known) < len(estimates) or not known:
            silent = len(estimates) - len(known)
            text = f"the passes of {silent} of {len(estimates)} engines of {team.name} say too little yet"
            return ScaleStep(0, hold_reason("insufficient_data", text, pool=team.name))
        evidence[team.name] = [msgspec.to_builtins(each) for each in known]
        ups, downs, text = self._judged(team, known)
        if team.starting:
            # Replicas are starting: more would come on top of them; fewer only if that was wanted for a whole interval.
            if downs and not ups and n > 1:
                self._proposed[team.name] = n - 1
            if proposed != n - 1 or team.name not in self._proposed:
                return ScaleStep(0, in_progress(team))
        if ups:
            return ScaleStep(1, Reason(code="scale_up", text=f"{team.name} {n} -> {n + 1}: {text}"))
        if not downs:
            code = "scale_down_refused_consolidation" if self._rule == "consolidation" else "within_band"
            return ScaleStep(0, hold_reason(code, f"{team.name} stays at {n}: {text}", pool=team.name))
        if n <= 1:
            return ScaleStep(0, hold_reason("at_minimum", f"{team.name} is down to its last replica", pool=team.name))
        floor = 1 if self._throughput is None else self._throughput.floors.get(team.name, 1)
        if n - 1 < floor:
            text = f"{team.name} stays at {n}: the throughput loop wants {floor} at least"
            return ScaleStep(0, hold_reason("scale_down_capped_by_throughput", text, pool=team.name, floor=floor))
        return ScaleStep(-1, Reason(code="scale_down", text=f"{team.name} {n} -> {n - 1}: {text}"))

    def _judged(self, team: RolePool, engines: list[Estimate]) -> tuple[bool, bool, str]:
        """Return whether all are over, whether one fewer would do, and the numbers in words."""
        ttft, itl = self._inputs.slo.planned
        share = self._settings.classic.fpm.load_scaling_down_sensitivity
        ups: list[bool] = []
        downs: list[bool] = []
        words: list[str] = []
        if team.role != "decode":
            firsts = [each.ttft for each in engines if each.ttft is not None]
            ups.append(len(firsts) == len(engines) and all(value > ttft for value in firsts))
            downs.append(all(self._ttft_safe(each, ttft, share) for each in engines))
            words.append(f"TTFT {_range(firsts)} of {1000 * ttft:g} ms")
        if team.role != "prefill":
            gaps = [each.itl for each in engines if each.itl is not None]
            ups.append(len(gaps) == len(engines) and all(value > itl for value in gaps))
            downs.append(all(self._itl_safe(each, itl, share) for each in engines))
            words.append(f"ITL {_range(gaps)} of {1000 * itl:g} ms")
        return any(ups), all(downs), "estimated " + " and ".join(words)

    def _ttft_safe(self, engine: Estimate, ttft: float, share: float) -> bool:
        if engine.ttft is None:
            return False
        if self._rule == "all-under":
            return engine.ttft < ttft * share
        if engine.own is None or engine.ttft_after is None:
            return False
        # A prompt's own time stays whatever the number of engines: only the rest of the TTFT can be shared.
        return engine.ttft_after - engine.own < (ttft - engine.own) * share

    def _itl_safe(self, engine: Estimate, itl: float, share: float) -> bool:
        if self._rule == "all-under":
            return engine.itl is not None and engine.itl < itl * share
        return engine.itl_after is not None and engine.room_after and engine.itl_after < itl * share

    def _learn(self, context: PluginContext) -> None:
        for look in self._passes.fresh(context):
            for model, observed in look.models.items():
                for engine in observed.engines("prefill", "decode", "aggregated"):
                    key = f"{model}|{engine.role}"
                    if key not in self._lines:
                        self._lines[key] = RoleRegressions(engine.role, self._rule)
                    self._lines[key].learn(engine)
                if observed.traffic is not None:
                    last, shape = self._typical.get(model, RequestShape(0.0, 0.0)), observed.traffic.shape
                    self._typical[model] = RequestShape(
                        isl=shape.isl or last.isl,
                        osl=shape.osl or last.osl,
                        hit_rate=last.hit_rate if shape.hit_rate is None else shape.hit_rate,
                        accept_length=shape.accept_length or last.accept_length,
                    )

    def part(self, name: str, key: str) -> RoleRegressions:
        return RoleRegressions(key.rpartition("|")[2], self._rule)  # type: ignore[arg-type]


def _range(values: list[float]) -> str:
    if not values:
        return "unknown"
    low, high = 1000 * min(values), 1000 * max(values)
    return f"{low:.0f} ms" if round(low) == round(high) else f"{low:.0f} to {high:.0f} ms"
