"""Static thresholds on queue and KV use, for Dynamo's targets throughput, latency and load.

Up by one where any engine is over its threshold, down by one where all are under theirs and one engine fewer would not
be over the first one again. Prefill counts waiting prompt tokens, over the longest context; decode and aggregated
engines count the KV of running and waiting requests, over their capacity.
"""

from dataclasses import dataclass
from typing import Literal

from penstock.planner.limits.contradictions import refuse
from penstock.planner.observation import EngineState
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PlannerPlugin, PluginSpec, StatelessPlugin
from penstock.planner.plugins.proposals import PoolTarget, Reason, Result
from penstock.planner.settings import PlannerSettings
from penstock_dynamo.policies.classic import (
    RolePool,
    ScaleStep,
    about,
    answer,
    decode_kv_of,
    guarded,
    hold_reason,
    in_progress,
    mismatch,
    teams_of,
)
from penstock_dynamo.policies.classic_contradictions import THRESHOLDS, of_thresholds

Goal = Literal["throughput", "latency", "load"]


@dataclass(frozen=True, slots=True)
class ThresholdBand:
    """Up where any value is over ``up`` (``up_at``: or equal), down where all are under ``down`` (``down_at``: or
    equal). ``tokens``: whether values are tokens, not shares."""

    up: float
    down: float
    up_at: bool = True
    down_at: bool = False
    tokens: bool = False

    def over(self, value: float) -> bool:
        return value > self.up or (self.up_at and value == self.up)

    def under(self, value: float) -> bool:
        return value < self.down or (self.down_at and value == self.down)


# Dynamo's asymmetry is kept: decode goes up only above its threshold, prefill at it already.
PREFILL: dict[Goal, ThresholdBand] = {
    "throughput": ThresholdBand(1.0, 0.1),
    "latency": ThresholdBand(0.1, 0.0, down_at=True),
}
DECODE: dict[Goal, ThresholdBand] = {
    "throughput": ThresholdBand(1.0, 0.6, up_at=False),
    "latency": ThresholdBand(0.4, 0.1, up_at=False),
}


class Thresholds(StatelessPlugin):
    """Scales each pool by one where its engines are over or under.

    Args:
        prefill, decode: bands; aggregated pools have that of decode.
    """

    def __init__(self, settings: PlannerSettings, prefill: ThresholdBand, decode: ThresholdBand) -> None:
        self.spec = PluginSpec(
            id="load_propose",
            stage="propose",
            priority=10,
            interval=settings.load_interval,
            needs=("engines",),
        )
        self._settings = settings
        self._bands = {"prefill": prefill, "decode": decode, "aggregated": decode}

    def evaluate(self, context: PluginContext) -> Result:
        targets: list[PoolTarget] = []
        reasons: list[Reason] = []
        evidence: dict[str, object] = {}
        for model, observed in context.observation.models.items():
            teams = teams_of(observed, self._settings.mode, context)
            steps = {role: self._step(team, evidence) for role, team in teams.items()}
            wanted = {role: teams[role].replicas + step.delta for role, step in steps.items()}
            wanted, fitted = guarded(teams, wanted, context.budget)
            reasons += [fitted] if fitted else []
            reasons += [about((teams[role],), step.reason) for role, step in steps.items()]
            targets += [
                PoolTarget(pool=team.name, replicas=wanted[role])
                for role, team in teams.items()
                if wanted[role] != team.replicas
            ]
            if not teams:
                reasons.append(hold_reason("disabled", f"{model} has no pool that mode {self._settings.mode} plans"))
        return answer(targets, reasons, evidence)

    def _step(self, team: RolePool, evidence: dict[str, object]) -> ScaleStep:
        if team.starting:
            return ScaleStep(0, in_progress(team))
        wrong = mismatch(team)
        if wrong is not None:
            return ScaleStep(0, wrong)
        band = self._bands[team.role]
        values = [load_of(engine, band.tokens) for engine in team.engines]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            lacks = "queue or context length" if team.role == "prefill" else "KV use or room"
            text = f"{len(values) - len(known)} engines of {team.name} do not tell their {lacks}"
            return ScaleStep(0, hold_reason("insufficient_data", text, pool=team.name))
        evidence[team.name] = known
        unit = " tokens" if band.tokens else ""
        most, n = max(known), team.replicas
        if any(band.over(value) for value in known):
            text = f"{team.name} {n} -> {n + 1}: an engine is at {most:g}{unit}, the threshold is {band.up:g}"
            return ScaleStep(1, Reason(code="scale_up", text=text, facts={"values": known, "threshold": band.up}))
        if all(band.under(value) for value in known):
            if n <= 1:
                return ScaleStep(
                    0, hold_reason("at_minimum", f"{team.name} is down to its last replica", pool=team.name)
                )
            after = most * n / (n - 1)
            if after >= band.up:
                text = f"{team.name} stays at {n}: with one fewer an engine would be at {after:g}{unit}"
                return ScaleStep(
                    0, hold_reason("scale_down_refused_consolidation", text, after=after, threshold=band.up)
                )
            text = f"{team.name} {n} -> {n - 1}: every engine is at {most:g}{unit} or less, under {band.down:g}"
            return ScaleStep(-1, Reason(code="scale_down", text=text, facts={"values": known, "threshold": band.down}))
        text = f"{team.name} stays at {n}: the highest load is {most:g}{unit}, within {band.down:g} and {band.up:g}"
        return ScaleStep(0, hold_reason("within_band", text, values=known))


def load_of(engine: EngineState, tokens: bool = False) -> float | None:
    """Return an engine's load: waiting prefill tokens, over its context where ``tokens`` is False; else its KV use,
    waiting requests included. None where it reports none."""
    if engine.role == "prefill":
        if engine.queued_prefill_tokens is None:
            return None
        if tokens:
            return float(engine.queued_prefill_tokens)
        return engine.queued_prefill_tokens / engine.limits.max_model_len if engine.limits.max_model_len else None
    total = decode_kv_of(engine)
    if total is None or not engine.limits.kv_tokens:
        return None
    if engine.role == "aggregated":
        total += engine.queued_prefill_tokens or 0
    return total / engine.limits.kv_tokens


def thresholds(settings: PlannerSettings, goal: Goal) -> list[PlannerPlugin]:
    """Return the plugins of one of the targets throughput, latency and load.

    Raises:
        ConfigError: load lacks a threshold, or one to go down is not under the one to go up.
    """
    if goal != "load":
        return [Thresholds(settings, PREFILL[goal], DECODE[goal])]
    refuse(of_thresholds(settings, needed=True))
    limits = settings.classic.thresholds
    bands: dict[str, ThresholdBand] = {}
    for role, (down, up) in THRESHOLDS.items():
        bands[role] = ThresholdBand(
            getattr(limits, up), getattr(limits, down), up_at=True, down_at=True, tokens=role == "prefill"
        )
    return [Thresholds(settings, bands["prefill"], bands["decode"])]
