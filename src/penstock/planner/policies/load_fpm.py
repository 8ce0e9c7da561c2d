"""Would one more request be late? The field's load loop: estimates per engine from its passes, and one step at a time.

Lines through the passes seen say when the next prompt would have its first token, behind what waits, and how long the
next token would take. Two generations:

- ``load-fpm``: up where ALL engines are over the service level, down where all are under its share ``sensitivity``.
- ``load-fpm-1.6``: down only where the load, shared by one engine fewer, would still be safe; and while replicas start
  a way down that has been wanted for a whole interval is taken.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.kernel.values import Role
from penstock.planner.context import Context
from penstock.planner.plugins import Plugin, Spec
from penstock.planner.policies.classic import (
    Passes,
    Step,
    Team,
    answer,
    guarded,
    held,
    in_progress,
    mismatch,
    teams_of,
)
from penstock.planner.policies.estimates import Estimate, Lines, Rule, Typical
from penstock.planner.policies.throughput_fpm import ThroughputPropose
from penstock.planner.proposals import Because, Result, Target
from penstock.planner.settings import USUAL_ITL, USUAL_TTFT, PlannerSettings


class LoadFpm:
    """The load loop.

    Args:
        rule: how a way down is judged.
        floors: whose floors it does not go below, where there is a throughput loop.
    """

    def __init__(self, settings: PlannerSettings, rule: Rule, floors: ThroughputPropose | None = None) -> None:
        self.spec = Spec(
            id="load_propose",
            stage="propose",
            priority=10,
            interval=settings.load_interval,
            needs=("engines", "traffic"),
        )
        self._settings, self._rule, self._throughput = settings, rule, floors
        self._lines: dict[str, Lines] = {}
        self._typical: dict[str, Typical] = {}
        self._passes = Passes()
        self._wished: dict[str, int] = {}
        """Pool -> a way down that was wanted while replicas started, at the last call."""

    def evaluate(self, context: Context) -> Result:
        self._learn(context)
        targets: list[Target] = []
        because: list[Because] = []
        evidence: dict[str, Any] = {}
        for model, seen in context.observation.models.items():
            teams = teams_of(seen, self._settings.mode, context)
            if not teams:
                because.append(held("disabled", f"{model} has no pool that mode {self._settings.mode} plans"))
                continue
            steps = {role: self._step(model, team, evidence) for role, team in teams.items()}
            wanted = {role: teams[role].wanted + step.delta for role, step in steps.items()}
            because += [step.because for step in steps.values()]
            wanted, fitted = guarded(teams, wanted, context.budget)
            because += [fitted] if fitted else []
            targets += [Target(pool=teams[role].name, replicas=count) for role, count in wanted.items()]
        if all(target.replicas == context.baseline.get(target.pool) for target in targets):
            targets = []
        return answer(targets, because, evidence)

    # --- one pool -----------------------------------------------------------------------------------------------------

    def _step(self, model: str, team: Team, evidence: dict[str, Any]) -> Step:
        wished = self._wished.pop(team.name, None)
        if team.starting and self._rule == "all-under":
            return Step(0, in_progress(team))
        wrong = mismatch(team)
        if wrong is not None and not team.starting:
            return Step(0, wrong)
        lines, typical = self._lines.get(f"{model}|{team.role}"), self._typical.get(model, Typical())
        n = team.wanted
        spread = n / (n - 1) if n > 1 else 1.0
        found = [lines.estimate(engine, typical, spread) if lines else None for engine in team.engines]
        known = [each for each in found if each is not None]
        if len(known) < len(found) or not known:
            text = f"the passes of {len(found) - len(known)} of {len(found)} engines of {team.name} say too little yet"
            return Step(0, held("insufficient_data", text, pool=team.name))
        evidence[team.name] = [msgspec.to_builtins(each) for each in known]
        ups, downs, text = self._judged(team, known)
        if team.starting:
            # Replicas are on the way: more would come on top of them; fewer only if that was so for a whole interval.
            if downs and not ups and n > 1:
                self._wished[team.name] = n - 1
            if wished != n - 1 or team.name not in self._wished:
                return Step(0, in_progress(team))
        if ups:
            return Step(1, Because(code="scale_up", text=f"{team.name} {n} -> {n + 1}: {text}"))
        if not downs:
            code = "scale_down_refused_consolidation" if self._rule == "consolidation" else "within_band"
            return Step(0, held(code, f"{team.name} stays at {n}: {text}", pool=team.name))
        if n <= 1:
            return Step(0, held("at_minimum", f"{team.name} is down to its last replica", pool=team.name))
        floor = 1 if self._throughput is None else self._throughput.floors.get(team.name, 1)
        if n - 1 < floor:
            text = f"{team.name} stays at {n}: the throughput loop wants {floor} at least"
            return Step(0, held("scale_down_capped_by_throughput", text, pool=team.name, floor=floor))
        return Step(-1, Because(code="scale_down", text=f"{team.name} {n} -> {n - 1}: {text}"))

    def _judged(self, team: Team, engines: list[Estimate]) -> tuple[bool, bool, str]:
        """Return whether all are over, whether one fewer would do, and the numbers in words."""
        slo = self._settings.slo
        ttft, itl = slo.ttft or USUAL_TTFT, slo.itl or USUAL_ITL
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
        # A prompt's own time stays whatever the number of engines: only what is left of the TTFT can be shared.
        return engine.ttft_after - engine.own < (ttft - engine.own) * share

    def _itl_safe(self, engine: Estimate, itl: float, share: float) -> bool:
        if self._rule == "all-under":
            return engine.itl is not None and engine.itl < itl * share
        return engine.itl_after is not None and engine.room_after and engine.itl_after < itl * share

    def _learn(self, context: Context) -> None:
        for look in self._passes.fresh(context):
            for model, seen in look.models.items():
                for engine in seen.engines("prefill", "decode", "aggregated"):
                    key = f"{model}|{engine.role}"
                    if key not in self._lines:
                        self._lines[key] = Lines(engine.role, self._settings, self._rule)
                    self._lines[key].learn(engine)
                typical, traffic = self._typical.setdefault(model, Typical()), seen.traffic
                if traffic is not None:
                    typical.isl = traffic.isl or typical.isl
                    typical.osl = traffic.osl or typical.osl
                    typical.hit_rate = typical.hit_rate if traffic.hit_rate is None else traffic.hit_rate
                    typical.accept = traffic.accept_length or typical.accept

    def snapshot(self) -> Any:
        return {
            "lines": {key: lines.snapshot() for key, lines in self._lines.items()},
            "typical": {name: msgspec.to_builtins(each) for name, each in self._typical.items()},
            "passes": self._passes.snapshot(),
            "wished": dict(self._wished),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for key, told in state["lines"].items():
            role: Role = key.rpartition("|")[2]
            self._lines[key] = Lines(role, self._settings, self._rule)
            self._lines[key].restore(told)
        self._typical = {name: msgspec.convert(told, Typical) for name, told in state["typical"].items()}
        self._passes.restore(state["passes"])
        self._wished = dict(state["wished"])


def _range(values: list[float]) -> str:
    if not values:
        return "unknown"
    low, high = 1000 * min(values), 1000 * max(values)
    return f"{low:.0f} ms" if round(low) == round(high) else f"{low:.0f} to {high:.0f} ms"


def load_fpm(settings: PlannerSettings, rule: Rule) -> list[Plugin]:
    """Return the plugins of policies load-fpm and load-fpm-1.6."""
    return [LoadFpm(settings, rule)]
