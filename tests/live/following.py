"""A planner's plugin for tests: as many replicas as the rate of arrivals asks for, and it says so."""

import math

from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PluginSpec, StatelessPlugin
from penstock.planner.plugins.proposals import Override, PoolTarget, Reason, Result


class Follow(StatelessPlugin):
    """``rate``: requests per second that one replica serves; ``window``: seconds that are looked back; ``least``: how
    many replicas there are where nothing comes."""

    def __init__(self, spec: PluginSpec, *, rate: float = 5.0, window: float = 3.0, least: int = 1) -> None:
        self.spec = spec
        self.rate, self.window, self.least = rate, window, least

    def evaluate(self, context: PluginContext) -> Result:
        targets, because = [], []
        for model, seen in context.observation.models.items():
            traffic = context.traffic(model, self.window)
            if traffic is None or not traffic.seconds:
                continue
            wanted = max(self.least, math.ceil(traffic.rate / self.rate), min(1, seen.without_worker))
            for name in seen.pools:
                targets.append(PoolTarget(pool=name, replicas=wanted))
            text = f"{traffic.rate:.1f} requests/s of {model} at {self.rate:g} per replica are {wanted} replicas"
            because.append(Reason(code="rate", text=text, facts={"rate": traffic.rate, "wanted": wanted}))
        return Override(targets=tuple(targets), reasons=tuple(because), evidence={"rate": self.rate})
