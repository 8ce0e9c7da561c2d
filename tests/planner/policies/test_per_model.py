"""A step that plans one model plans every one that is seen, and a restart gives each its own state back."""

from penstock.planner.observation import ModelState, Observation
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PluginSpec
from penstock.planner.plugins.proposals import Accept, Override, PoolTarget, Predicted, Prediction, Reason, Reject
from penstock.planner.policies.per_model import PerModel, joined


class Counting:
    """Wants one replica more of its model's pool at each call."""

    def __init__(self, model: str) -> None:
        self.spec = PluginSpec(id=f"counting:{model}", stage="propose", priority=7)
        self.model, self.count = model, 0

    def evaluate(self, context):
        self.count += 1
        target = PoolTarget(pool=self.model, replicas=self.count)
        return Override(targets=(target,), evidence={"count": self.count})

    def snapshot(self):
        return self.count

    def restore(self, state):
        self.count = state


def context(*models: str) -> PluginContext:
    seen = Observation(at=5.0, window=5.0, models={name: ModelState(traffic=None, pools={}) for name in models})
    return PluginContext(tick=1, at=5.0, observations=[seen], baseline={})


def test_each_model_has_its_own_and_their_targets_are_joined():
    plugin = PerModel("counting", Counting)
    assert (plugin.spec.id, plugin.spec.priority) == ("counting", 7)
    assert plugin.evaluate(context("a")).evidence == {"count": 1}
    found = plugin.evaluate(context("a", "b"))
    assert {t.pool: t.replicas for t in found.targets} == {"a": 2, "b": 1}
    assert found.evidence == {"a count": 2, "b count": 1}
    other = PerModel("counting", Counting)
    other.restore(plugin.snapshot())
    assert other.evaluate(context("a", "b")) == plugin.evaluate(context("a", "b"))


def test_predictions_join_reasons_add_up_and_a_veto_is_everybodys():
    predictions = {name: Predicted(models={name: Prediction(seconds=1.0, requests=2.0)}) for name in "ab"}
    assert set(joined(predictions).models) == {"a", "b"}
    why = Reason(code="x", text="y")
    assert joined({"a": Accept(reasons=(why,)), "b": Accept(reasons=(why,))}) == Accept(reasons=(why, why))
    assert isinstance(joined({"a": Accept(), "b": Reject(reasons=(why,))}), Reject)
