"""A planner's plugin that always wants the same replicas, whatever is asked."""

from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PluginSpec, StatelessPlugin
from penstock.planner.plugins.proposals import Override, PoolTarget, Reason, Result


class Want(StatelessPlugin):
    """Wants so many replicas of pool decode."""

    def __init__(self, spec: PluginSpec, *, replicas: int = 3) -> None:
        self.spec = spec
        self._target = PoolTarget(pool="decode", replicas=replicas)

    def evaluate(self, context: PluginContext) -> Result:
        return Override(targets=(self._target,), reasons=(Reason(code="want", text="a test wants it"),))
