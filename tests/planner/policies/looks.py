"""What the tests of policies see: observations in few words, and a driver that asks plugins as a tick does."""

from collections.abc import Sequence

from penstock.kernel.values import EngineLimits, StepStats, Traffic, WorkerId
from penstock.planner.observation import EngineState, ModelState, Observation, PoolState
from penstock.planner.plugins.merge import merge, merge_predictions
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PlannerPlugin
from penstock.planner.plugins.proposals import Accept, Override, Reason
from penstock.planner.settings import BudgetSettings
from tests.planner.pool_states import pool_state

KV, LENGTH = 100_000, 8192


def engine(role: str, number: int, **told) -> EngineState:
    """Return one engine with nothing to do, except for what is told."""
    known = {
        "running": 0,
        "waiting": 0,
        "queued_prefill_tokens": 0,
        "queued_decode_kv": 0,
        "decode_kv": 0,
        "limits": EngineLimits(kv_tokens=KV, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=LENGTH),
    }
    return EngineState(worker=WorkerId(f"{role}-{number}"), role=role, **{**known, **told})


def pool(role: str, engines: Sequence[dict], **told) -> PoolState:
    """Return a settled pool of these engines."""
    made = tuple(engine(role, number, **each) for number, each in enumerate(engines))
    return pool_state(**{"role": role, "desired": len(made), "ready": len(made), "engines": made, **told})


def traffic(requests: int, isl: int = 1000, osl: int = 200, seconds: float = 5.0, **told) -> Traffic:
    """Return what so many requests of one kind count."""
    return Traffic(
        **{
            "seconds": seconds,
            "arrived": requests,
            "prompt_tokens": requests * isl,
            "answered": requests,
            "answered_prompt_tokens": requests * isl,
            "output_tokens": requests * osl,
            **told,
        }
    )


def look(at: float, pools: dict, told: Traffic | None = None, *, window: float = 5.0, queued: int = 0) -> Observation:
    """Return one look at model m."""
    return Observation(at=at, window=window, models={"m": ModelState(traffic=told, pools=pools, queued=queued)})


def steps(tokens: float, seqs: float, kv: float, seconds: float, passes: int = 10) -> StepStats:
    """Return a window of equal passes."""
    return StepStats(
        passes=passes,
        wall=passes * seconds,
        prefill_tokens=round(passes * tokens),
        decode_seqs=round(passes * seqs),
        decode_kv=round(passes * kv),
    )


class Said:
    """What a tick came to: ``targets`` with the baseline of those nobody named, and ``reasons``."""

    def __init__(self, targets: dict[str, int], because: list[Reason], named: set[str]) -> None:
        self.targets, self.reasons, self.named = targets, because, named

    @property
    def codes(self) -> list[str]:
        return [each.code for each in self.reasons]


class Ticks:
    """Asks plugins as a tick does, those that are due by their interval."""

    def __init__(self, plugins: Sequence[PlannerPlugin], budget: BudgetSettings | None = None) -> None:
        self.plugins = plugins
        self.budget = budget or BudgetSettings()
        self.looks: list[Observation] = []
        self._called: dict[str, float] = {}
        self._held: dict[str, Override] = {}

    def tick(self, seen: Observation) -> Said:
        """Take one look; return what should be of it."""
        self.looks.append(seen)
        baseline = {name: each.pool.desired for _, name, each in seen.pools()}
        predictions: dict = {}
        because: list[Reason] = []
        answers = []
        for stage in ("predict", "propose"):
            answers = []
            for plugin in self.plugins:
                if plugin.spec.stage != stage or ("predictions" in plugin.spec.requires and not predictions):
                    continue
                anchor = self._called.get(plugin.spec.id, 0.0)
                if plugin.spec.interval and seen.at - anchor < plugin.spec.interval - 1e-6:
                    if plugin.spec.id in self._held:
                        answers.append((plugin.spec, self._held[plugin.spec.id]))
                    continue
                self._called[plugin.spec.id] = seen.at
                context = PluginContext(
                    tick=len(self.looks),
                    at=seen.at,
                    observations=self.looks,
                    baseline=baseline,
                    predictions=predictions,
                    budget=self.budget,
                )
                result = plugin.evaluate(context)
                answers.append((plugin.spec, result))
                if isinstance(result, Override | Accept):
                    because += result.reasons
                if isinstance(result, Override) and plugin.spec.hold == "hold_last":
                    self._held[plugin.spec.id] = result
            if stage == "predict":
                predictions = merge_predictions(answers)
        merged = merge(baseline, answers)
        named = {t.pool for _, result in answers if isinstance(result, Override) for t in result.targets}
        return Said(merged.targets, because, named)
