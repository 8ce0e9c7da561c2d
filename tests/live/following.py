"""A planner's plugin for tests: as many replicas as the rate of arrivals asks for, and it says so."""

import math

from penstock.planner.context import Context
from penstock.planner.plugins import Spec, Stateless
from penstock.planner.proposals import Because, Override, Result, Target


class Follow(Stateless):
    """``rate``: requests per second that one replica serves; ``window``: seconds that are looked back; ``least``: how
    many replicas there are where nothing comes."""

    def __init__(self, spec: Spec, *, rate: float = 5.0, window: float = 3.0, least: int = 1) -> None:
        self.spec = spec
        self.rate, self.window, self.least = rate, window, least

    def evaluate(self, context: Context) -> Result:
        targets, because = [], []
        for model, seen in context.observation.models.items():
            traffic = context.traffic(model, self.window)
            if traffic is None or not traffic.seconds:
                continue
            wanted = max(self.least, math.ceil(traffic.rate / self.rate), min(1, seen.held))
            for name in seen.pools:
                targets.append(Target(pool=name, replicas=wanted))
            text = f"{traffic.rate:.1f} requests/s of {model} at {self.rate:g} per replica are {wanted} replicas"
            because.append(Because(code="rate", text=text, facts={"rate": traffic.rate, "wanted": wanted}))
        return Override(targets=tuple(targets), because=tuple(because), evidence={"rate": self.rate})
