"""Planner policies by name, each as the plugins that it is made of."""

from penstock.kernel.errors import ConfigError
from penstock.planner.limits.contradictions import of_hybrid, refuse
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
    if settings.optimization_target != "sla":
        from penstock.planner.policies.thresholds import thresholds

        return thresholds(settings, settings.optimization_target)
    return make(settings.policy, settings, inputs)


def make(name: str, settings: PlannerSettings, inputs: PolicyInputs = NOTHING_KNOWN) -> list[PlannerPlugin]:
    """Return the plugins of a policy.

    Args:
        name: of the policy; ``thresholds`` is Dynamo's default target, throughput.
        inputs: known speeds of engines before they serve, and traces for predictors to begin with.
    Raises:
        ConfigError: there is no such policy, or it lacks a setting or a library.
    """
    # Imported where they are used: a policy that is not chosen costs nothing.
    if name == "static":
        return []
    if name == "slo":
        from penstock.planner.policies.per_model import PerModel
        from penstock.planner.policies.slo import SloPropose
        from penstock.planner.policies.slo_predict import SloPredict

        return [
            PerModel("slo_predict", SloPredict),
            PerModel("slo_propose", lambda model: SloPropose(model, settings.slo, inputs)),
        ]
    if name == "thresholds":
        from penstock.planner.policies.thresholds import thresholds

        return thresholds(settings, "throughput")
    if name == "load-classic":
        from penstock.planner.policies.load_classic import load_classic

        return load_classic(settings)
    if name == "sla-classic":
        from penstock.planner.policies.sla_classic import sla_classic

        return sla_classic(settings, inputs)
    if name in ("throughput-fpm", "hybrid"):
        from penstock.planner.policies.load_fpm import LoadFpm
        from penstock.planner.policies.throughput_fpm import ThroughputPredict, ThroughputPropose

        predict = ThroughputPredict(settings, inputs)
        if name == "throughput-fpm":
            return [predict, ThroughputPropose(settings, inputs)]
        refuse(of_hybrid(settings))
        floor = ThroughputPropose(settings, inputs, floor=True)
        return [predict, floor, LoadFpm(settings, inputs, "consolidation", floor)]
    if name in ("load-fpm", "load-fpm-1.6"):
        from penstock.planner.policies.load_fpm import LoadFpm

        return [LoadFpm(settings, inputs, "all-under" if name == "load-fpm" else "consolidation")]
    raise ConfigError(f"there is no planner policy {name!r}", hint="slo, hybrid, static and so on: see planner.policy")
