"""A planner's plugin for tests: always so many replicas of every pool."""

from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PluginSpec, StatelessPlugin
from penstock.planner.plugins.proposals import Override, PoolTarget, Reason, Result


class Want(StatelessPlugin):
    def __init__(self, spec: PluginSpec, *, replicas: int) -> None:
        self.spec, self.replicas = spec, replicas

    def evaluate(self, context: PluginContext) -> Result:
        because = (Reason(code="want", text=f"the test wants {self.replicas}"),)
        targets = tuple(PoolTarget(pool=name, replicas=self.replicas) for name in context.baseline)
        return Override(targets=targets, reasons=because)
