"""The policies of Dynamo's planners by name, each made of settings and of what is known before any observation."""

from penstock.planner.limits.contradictions import refuse
from penstock.planner.plugins.plugin_registry import PlannerPlugin
from penstock.planner.policies.policy_inputs import PolicyInputs
from penstock.planner.settings import PlannerSettings
from penstock_dynamo.policies.classic_contradictions import of_hybrid

# Each imports its own: a policy that is not chosen costs nothing.


def of_thresholds(settings: PlannerSettings, inputs: PolicyInputs) -> list[PlannerPlugin]:
    """Return the plugins of Dynamo's targets beside ``sla``; ``throughput`` is its default."""
    from penstock_dynamo.policies.thresholds import thresholds

    target = settings.optimization_target
    return thresholds(settings, "throughput" if target == "sla" else target)


def of_load_classic(settings: PlannerSettings, inputs: PolicyInputs) -> list[PlannerPlugin]:
    from penstock_dynamo.policies.load_classic import load_classic

    return load_classic(settings)


def of_sla_classic(settings: PlannerSettings, inputs: PolicyInputs) -> list[PlannerPlugin]:
    from penstock_dynamo.policies.sla_classic import sla_classic

    return sla_classic(settings, inputs)


def of_throughput_fpm(settings: PlannerSettings, inputs: PolicyInputs) -> list[PlannerPlugin]:
    from penstock_dynamo.policies.throughput_fpm import ThroughputPredict, ThroughputPropose

    return [ThroughputPredict(settings, inputs), ThroughputPropose(settings, inputs)]


def of_hybrid_fpm(settings: PlannerSettings, inputs: PolicyInputs) -> list[PlannerPlugin]:
    from penstock_dynamo.policies.load_fpm import LoadFpm
    from penstock_dynamo.policies.throughput_fpm import ThroughputPredict, ThroughputPropose

    predict = ThroughputPredict(settings, inputs)
    refuse(of_hybrid(settings))
    floor = ThroughputPropose(settings, inputs, floor=True)
    return [predict, floor, LoadFpm(settings, inputs, "consolidation", floor)]


def of_load_fpm(settings: PlannerSettings, inputs: PolicyInputs) -> list[PlannerPlugin]:
    from penstock_dynamo.policies.load_fpm import LoadFpm

    return [LoadFpm(settings, inputs, "all-under")]


def of_load_fpm_1_6(settings: PlannerSettings, inputs: PolicyInputs) -> list[PlannerPlugin]:
    from penstock_dynamo.policies.load_fpm import LoadFpm

    return [LoadFpm(settings, inputs, "consolidation")]
