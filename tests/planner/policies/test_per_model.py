"""A step that plans one model plans every one that is seen, and a restart gives each its own state back."""

from penstock.planner.context import Context
from penstock.planner.plugins import Spec
from penstock.planner.policies.per_model import PerModel, joined
from penstock.planner.proposals import Accept, Because, Override, Predicted, Prediction, Reject, Target
from penstock.planner.seen import ModelSeen, Observation


class Counting:
    """Wants one replica more of its model's pool at each call."""

    def __init__(self, model: str) -> None:
        self.spec = Spec(id=f"counting:{model}", stage="propose", priority=7)
        self.model, self.count = model, 0

    def evaluate(self, context):
        self.count += 1
        target = Target(pool=self.model, replicas=self.count)
        return Override(targets=(target,), evidence={"count": self.count})

    def snapshot(self):
        return self.count

    def restore(self, state):
        self.count = state


def context(*models: str) -> Context:
    seen = Observation(at=5.0, window=5.0, models={name: ModelSeen(traffic=None, pools={}) for name in models})
    return Context(tick=1, at=5.0, looks=[seen], baseline={})


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
    why = Because(code="x", text="y")
    assert joined({"a": Accept(because=(why,)), "b": Accept(because=(why,))}) == Accept(because=(why, why))
    assert isinstance(joined({"a": Accept(), "b": Reject(because=(why,))}), Reject)
