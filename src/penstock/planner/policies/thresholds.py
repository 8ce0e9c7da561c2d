"""Is any queue too long, or every one short? Static thresholds: targets throughput, latency and load.

Up by one where any engine is over its threshold, down by one where all are under theirs and one engine fewer would not
be over the first one again. Prefill counts prompt tokens that wait, over the longest context; decode and aggregated
engines count the KV that runs and waits, over their room.
"""

from dataclasses import dataclass
from typing import Literal

from penstock.kernel.errors import ConfigError
from penstock.planner.context import Context
from penstock.planner.plugins import Plugin, Spec, Stateless
from penstock.planner.policies.classic import (
    Step,
    Team,
    answer,
    decode_kv_of,
    guarded,
    held,
    in_progress,
    mismatch,
    teams_of,
)
from penstock.planner.proposals import Because, Result, Target
from penstock.planner.seen import EngineSeen
from penstock.planner.settings import PlannerSettings

Goal = Literal["throughput", "latency", "load"]


@dataclass(frozen=True, slots=True)
class Band:
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


# The field's asymmetry is kept: decode goes up only above its threshold, prefill at it already.
PREFILL: dict[Goal, Band] = {"throughput": Band(1.0, 0.1), "latency": Band(0.1, 0.0, down_at=True)}
DECODE: dict[Goal, Band] = {"throughput": Band(1.0, 0.6, up_at=False), "latency": Band(0.4, 0.1, up_at=False)}


class Thresholds(Stateless):
    """Scale each pool by one where its engines are over or under.

    Args:
        prefill, decode: bands; aggregated pools have that of decode.
    """

    def __init__(self, settings: PlannerSettings, prefill: Band, decode: Band) -> None:
        self.spec = Spec(
            id="load_propose",
            stage="propose",
            priority=10,
            interval=settings.load_interval,
            needs=("engines",),
        )
        self._settings = settings
        self._bands = {"prefill": prefill, "decode": decode, "aggregated": decode}

    def evaluate(self, context: Context) -> Result:
        targets: list[Target] = []
        because: list[Because] = []
        evidence: dict[str, object] = {}
        for model, seen in context.observation.models.items():
            teams = teams_of(seen, self._settings.mode, context)
            steps = {role: self._step(team, evidence) for role, team in teams.items()}
            wanted = {role: teams[role].wanted + step.delta for role, step in steps.items()}
            because += [step.because for step in steps.values()]
            wanted, fitted = guarded(teams, wanted, context.budget)
            because += [fitted] if fitted else []
            targets += [
                Target(pool=team.name, replicas=wanted[role])
                for role, team in teams.items()
                if wanted[role] != team.wanted
            ]
            if not teams:
                because.append(held("disabled", f"{model} has no pool that mode {self._settings.mode} plans"))
        return answer(targets, because, evidence)

    def _step(self, team: Team, evidence: dict[str, object]) -> Step:
        if team.starting:
            return Step(0, in_progress(team))
        wrong = mismatch(team)
        if wrong is not None:
            return Step(0, wrong)
        band = self._bands[team.role]
        values = [load_of(engine, band.tokens) for engine in team.engines]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            lacks = "queue or context length" if team.role == "prefill" else "KV use or room"
            text = f"{len(values) - len(known)} engines of {team.name} do not tell their {lacks}"
            return Step(0, held("insufficient_data", text, pool=team.name))
        evidence[team.name] = known
        unit = " tokens" if band.tokens else ""
        most, n = max(known), team.wanted
        if any(band.over(value) for value in known):
            text = f"{team.name} {n} -> {n + 1}: an engine is at {most:g}{unit}, the threshold is {band.up:g}"
            return Step(1, Because(code="scale_up", text=text, facts={"values": known, "threshold": band.up}))
        if all(band.under(value) for value in known):
            if n <= 1:
                return Step(0, held("at_minimum", f"{team.name} is down to its last replica", pool=team.name))
            after = most * n / (n - 1)
            if after >= band.up:
                text = f"{team.name} stays at {n}: with one fewer an engine would be at {after:g}{unit}"
                return Step(0, held("scale_down_refused_consolidation", text, after=after, threshold=band.up))
            text = f"{team.name} {n} -> {n - 1}: every engine is at {most:g}{unit} or less, under {band.down:g}"
            return Step(-1, Because(code="scale_down", text=text, facts={"values": known, "threshold": band.down}))
        text = f"{team.name} stays at {n}: the highest load is {most:g}{unit}, within {band.down:g} and {band.up:g}"
        return Step(0, held("within_band", text, values=known))


def load_of(engine: EngineSeen, tokens: bool = False) -> float | None:
    """Return an engine's load: of prefill tokens waiting, over its context where ``tokens`` is False; else its KV use,
    what waits included. None where it does not tell."""
    if engine.role == "prefill":
        if engine.queued_prefill_tokens is None:
            return None
        if tokens:
            return float(engine.queued_prefill_tokens)
        return engine.queued_prefill_tokens / engine.max_len if engine.max_len else None
    total = decode_kv_of(engine)
    if total is None or not engine.kv_tokens:
        return None
    if engine.role == "aggregated":
        total += engine.queued_prefill_tokens or 0
    return total / engine.kv_tokens


def thresholds(settings: PlannerSettings, goal: Goal) -> list[Plugin]:
    """Return the plugins of one of the targets throughput, latency and load.

    Raises:
        ConfigError: load lacks a threshold, or one to go down is not under the one to go up.
    """
    if goal != "load":
        return [Thresholds(settings, PREFILL[goal], DECODE[goal])]
    told = settings.classic.thresholds
    bounds = {
        "prefill": (told.prefill_scale_down_queue_tokens, told.prefill_scale_up_queue_tokens),
        "decode": (told.decode_scale_down_kv_rate, told.decode_scale_up_kv_rate),
    }
    found: dict[str, Band] = {}
    for role, (down, up) in bounds.items():
        unit = "queue_tokens" if role == "prefill" else "kv_rate"
        knob = f"planner.classic.thresholds.{role}_scale_up_{unit}"
        if up is None or down is None:
            raise ConfigError(
                f"planner.optimization_target is load, but {knob} or its counterpart to go down is not set",
                hint="set all four of planner.classic.thresholds",
            )
        if down >= up:
            raise ConfigError(f"{knob} is {up:g}, and the one to go down is {down:g}", hint="it must be lower")
        found[role] = Band(up, down, up_at=True, down_at=True, tokens=role == "prefill")
    return [Thresholds(settings, found["prefill"], found["decode"])]
