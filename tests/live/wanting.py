"""A planner's plugin for tests: always so many replicas of every pool."""

from penstock.planner.context import Context
from penstock.planner.plugins import Spec, Stateless
from penstock.planner.proposals import Because, Override, Result, Target


class Want(Stateless):
    def __init__(self, spec: Spec, *, replicas: int) -> None:
        self.spec, self.replicas = spec, replicas

    def evaluate(self, context: Context) -> Result:
        because = (Because(code="want", text=f"the test wants {self.replicas}"),)
        targets = tuple(Target(pool=name, replicas=self.replicas) for name in context.baseline)
        return Override(targets=targets, because=because)
