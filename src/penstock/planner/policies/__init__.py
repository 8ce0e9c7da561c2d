"""Planner policies by name, each as the plugins that it is made of."""

from penstock import extension
from penstock.kernel.errors import ConfigError
from penstock.planner.plugins.plugin_registry import PlannerPlugin
from penstock.planner.policies.policy_inputs import PolicyInputs
from penstock.planner.settings import PlannerSettings

__all__ = ["PolicyInputs", "make", "plugins_of"]

NOTHING_KNOWN = PolicyInputs()


def plugins_of(settings: PlannerSettings, inputs: PolicyInputs = NOTHING_KNOWN) -> list[PlannerPlugin]:
    """Return the plugins for the settings: the policy, or thresholds where the target is not ``sla``.

    Raises:
        ConfigError: the policy lacks a setting or a library.
    """
    return make("thresholds" if settings.optimization_target != "sla" else settings.policy, settings, inputs)


def make(name: str, settings: PlannerSettings, inputs: PolicyInputs = NOTHING_KNOWN) -> list[PlannerPlugin]:
    """Return the plugins of a policy.

    Args:
        name: of the policy; ``thresholds`` is Dynamo's default target, throughput, or another that is set.
        inputs: known speeds of engines before they serve, and traces for predictors to begin with.
    Raises:
        ConfigError: there is no such policy, or it lacks a setting or a library.
    """
    if name == "static":
        return []
    if name == "slo":
        # Imported where they are used: a policy that is not chosen costs nothing.
        from penstock.planner.policies.per_model import PerModel
        from penstock.planner.policies.slo import SloPropose
        from penstock.planner.policies.slo_predict import SloPredict

        return [
            PerModel("slo_predict", SloPredict),
            PerModel("slo_propose", lambda model: SloPropose(model, settings.slo, inputs)),
        ]
    if not extension.offers("policy", name):
        raise ConfigError(
            f"there is no planner policy {name!r}", hint=f"slo and static need none; {extension.known('policy')}"
        )
    plugins: list[PlannerPlugin] = extension.entry("policy", name, "planner.policy")(settings, inputs)
    return plugins
