"""Who decides how many? Each policy by its name, as the plugins that it is made of."""

from penstock.kernel.errors import ConfigError
from penstock.planner.plugins import Plugin
from penstock.planner.policies.known import Inputs
from penstock.planner.settings import PlannerSettings

__all__ = ["Inputs", "make", "plugins_of"]

NOTHING_KNOWN = Inputs()


def plugins_of(settings: PlannerSettings, inputs: Inputs = NOTHING_KNOWN) -> list[Plugin]:
    """Return the plugins of what the settings ask for: the policy, or thresholds where the target is not ``sla``.

    Raises:
        ConfigError: the policy lacks a setting or a library.
    """
    if settings.optimization_target != "sla":
        from penstock.planner.policies.thresholds import thresholds

        return thresholds(settings, settings.optimization_target)
    return make(settings.policy, settings, inputs)


def make(name: str, settings: PlannerSettings, inputs: Inputs = NOTHING_KNOWN) -> list[Plugin]:
    """Return the plugins of a policy.

    Args:
        name: of the policy; ``thresholds`` is the field's default target, throughput.
        inputs: what is known of engines before they serve, and traces for predictors to begin with.
    Raises:
        ConfigError: there is no such policy, or it lacks a setting or a library.
    """
    # Imported where they are used: nobody pays for a policy that is not chosen.
    if name == "static":
        return []
    if name == "slo":
        from penstock.planner.policies.per_model import PerModel
        from penstock.planner.policies.slo import SloPropose
        from penstock.planner.policies.slo_predict import SloPredict

        return [
            PerModel("slo_predict", SloPredict),
            PerModel("slo_propose", lambda model: SloPropose(model, settings.slo, inputs.of(model))),
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
        if settings.load_interval >= settings.throughput_interval:
            raise ConfigError(
                f"planner.load_interval {settings.load_interval:g} s is not shorter than "
                f"planner.throughput_interval {settings.throughput_interval:g} s",
                hint="in policy hybrid the load loop works between two decisions for throughput",
            )
        floor = ThroughputPropose(settings, inputs, floor=True)
        return [predict, floor, LoadFpm(settings, "consolidation", floor)]
    if name in ("load-fpm", "load-fpm-1.6"):
        from penstock.planner.policies.load_fpm import load_fpm

        return load_fpm(settings, "all-under" if name == "load-fpm" else "consolidation")
    raise ConfigError(f"there is no planner policy {name!r}", hint="slo, hybrid, static and so on: see planner.policy")
