"""Rules of single options of Dynamo's planners: those whose settings depend on the value or on other options."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from penstock_dynamo.importing.option_rules import (
    OptionSource,
    Rule,
    Translated,
    bound,
    number,
    seconds_of_ms,
    truth,
    whole,
)
from penstock_dynamo.policies.load_classic import GPUS_MAX

GATEWAY = "unix:///var/run/dynamo/planner/registry.sock"
"""Where Dynamo's planner listens for plugins where nothing names another place."""
OF_MODELS = "models are those of the config: models.NAME"
DRAWN = "what a replica draws is not measured: set planner.budget.pools.POOL.watts"
PLUGIN_GUIDE = "see docs/guides/planner-plugins.md"


def namespace_of_keys(value: Any, source: OptionSource) -> Translated | str:
    settings = {"virtual/namespace": str(value)} if source.virtual else {}
    if {"metric_pulling_prometheus_endpoint", "prometheus_endpoint"} & source.options.keys():
        settings["prometheus/namespace"] = str(value)
    if not settings:
        return "it names keys in etcd and a label in Prometheus, and neither is used here"
    return Translated(settings)


def graph_deployment(value: Any, source: OptionSource) -> Translated | str:
    if source.options.get("environment") != "kubernetes":
        return "it names what is scaled in Kubernetes, and environment is another"
    return Translated({"kubernetes/target": f"DynamoGraphDeployment/{value}"})


def gpus_of_role(role: str, value: Any, source: OptionSource) -> Translated | str:
    if value is None:
        return "unset: the pool's own engines say it"
    if source.virtual:
        return Translated({f"virtual/gpus_{role}": whole(value)})
    return f"it belongs to the pool: models.NAME.pools.POOL.gpus: {whole(value)}, of role {role}"


def minimum_of_role(role: str, value: Any, _: OptionSource) -> Translated | str:
    if value is None:
        return "unset: planner.budget.min_replicas counts"
    return Translated({f"budget/pools/{role}/min_replicas": whole(value)}, f"of a pool that is named {role}")


def model_name(value: Any, source: OptionSource) -> Translated | str:
    return OF_MODELS if value is None or not source.virtual else Translated({"virtual/model": str(value)})


def optimization_target(value: Any, source: OptionSource) -> Translated:
    if value in ("throughput", "latency", "load"):
        return Translated({"optimization_target": value})
    if value != "sla":
        raise ValueError("it takes throughput, latency, load or sla")
    return Translated(
        {"optimization_target": "sla", "policy": _policy_name(source)}, "policy slo is ours, and the default"
    )


def _policy_name(source: OptionSource) -> str:
    throughput = truth(source.options.get("enable_throughput_scaling", True))
    load = truth(source.options.get("enable_load_scaling", False))
    return "hybrid" if throughput and load else "load-fpm-1.6" if load else "throughput-fpm"


def scaling_loop(value: Any, source: OptionSource) -> Translated | str:
    if source.options.get("optimization_target") != "sla":
        return "optimization_target is not sla, so it was without effect"
    truth(value)
    return Translated({"policy": _policy_name(source)})


def latency_target(name: str, seconds_max: float, value: Any, _: OptionSource) -> Translated:
    """Read seconds of older versions and milliseconds of later ones: a target below ``seconds_max`` is in seconds."""
    target = number(value)
    if target < seconds_max:
        return Translated({f"/slo/{name}": target}, "read as seconds")
    return Translated({f"/slo/{name}": seconds_of_ms(target)}, "read as milliseconds")


def prometheus_endpoint(value: Any, _: OptionSource) -> Translated | str:
    if value is None:
        return "unset"
    return Translated({"source": "prometheus", "prometheus/url": str(value).rstrip("/")})


def left_secret(where: str) -> Rule:
    return lambda value, _: f"a secret is not written into a config: {where}" if value else "unset"


def query_params(value: Any) -> dict[str, str]:
    params = value if isinstance(value, Mapping) else dict(parse_qsl(str(value or ""), strict_parsing=bool(value)))
    return {str(name): str(text) for name, text in params.items()}


def seconds_of_hours(value: Any) -> float:
    return 0.0 if value is None else round(number(value) * 3600, 6)


def power_limit(value: Any, source: OptionSource) -> Translated | str:
    if value is None or not truth(source.options.get("enable_power_awareness", False)):
        return "enable_power_awareness is false, so it was without effect"
    note = "say what a replica draws with planner.budget.pools.POOL.watts, which is not read"
    return Translated({"budget/watts": number(value)}, note)


def power_awareness(value: Any, source: OptionSource) -> Translated | str:
    if not truth(value):
        return "without planner.budget.watts there is no ceiling of power"
    if source.options.get("total_gpu_power_limit") is None:
        return "total_gpu_power_limit is not given"
    return Translated({"budget/watts": number(source.options["total_gpu_power_limit"])}, DRAWN)


HOLDS = {"HOLD_LAST": "hold_last", "ACCEPT_WHEN_IDLE": "accept_when_idle", "1": "hold_last", "0": "accept_when_idle"}
NEEDS = {"observations.traffic": "traffic", "observations.fpm": "engines", "observations.workers": "pools"}


def _plugin_calls(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a plugin's calls (stage, priority, interval, needs) from its entry."""
    calls: dict[str, Any] = {
        "stage": str(entry["plugin_type"]).lower(),
        "priority": whole(entry.get("priority", 100)),
        "interval": number(entry.get("execution_interval_seconds", 0)),
        "hold": HOLDS[str(entry.get("hold_policy", "HOLD_LAST"))],
    }
    observed = [str(name) for name in entry.get("needs") or ()]
    needs = [next((ours for theirs, ours in NEEDS.items() if name.startswith(theirs)), None) for name in observed]
    if any(needs):
        calls["needs"] = list(dict.fromkeys(name for name in needs if name))
    if entry.get("requires_produced_fields"):
        calls["requires"] = ["predictions"]
    if entry.get("observation_window_seconds"):
        calls["window"] = number(entry["observation_window_seconds"])
    return calls


def external_plugins(value: Any, _: OptionSource) -> Translated | str:
    settings, notes = {}, []
    for entry in value or ():
        id, endpoint = str(entry["plugin_id"]), str(entry["endpoint"])
        if endpoint.startswith("inproc:"):
            notes.append(f"{id} is in process: name its module in planner.plugins.use")
            continue
        settings[f"plugins/use/{id}"] = {"endpoint": endpoint, **_plugin_calls(entry)}
        if entry.get("auth_token"):
            notes.append(f"the token of {id} goes into planner.plugins.tokens_file, a line: {id} TOKEN")
    if not value:
        return "the list is empty"
    if not settings:
        return "; ".join(notes)
    return Translated(settings, "; ".join([*notes, f"they must speak penstock.planner.v1, {PLUGIN_GUIDE}"]))


def in_process_plugins(value: Any, _: OptionSource) -> Translated | str:
    if not value:
        return "the list is empty"
    settings = {}
    for entry in value:
        options = {str(name): _text_or_json(option) for name, option in (entry.get("kwargs") or {}).items()}
        module = {"module": str(entry["module"]), "name": str(entry["class"])}
        settings[f"plugins/use/{entry['plugin_id']}"] = {**module, **_plugin_calls(entry), "options": options}
    return Translated(settings, f"the class is called with its Spec and has evaluate(context), {PLUGIN_GUIDE}")


def _text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def gateway_listen(value: Any, source: OptionSource) -> Translated | str:
    if not truth(source.options.get("scheduling.gateway.enabled", False)):
        return "scheduling.gateway.enabled is false, so nothing listens; planner.plugins.listen unset is the same"
    return Translated({"plugins/listen": str(value)})


def gateway_enabled(value: Any, source: OptionSource) -> Translated | str:
    if not truth(value):
        return "planner.plugins.listen unset is the same"
    listen = str(source.options.get("scheduling.gateway.listen", GATEWAY))
    return Translated({"plugins/listen": listen}, "without planner.plugins.tokens everybody is refused")


def heartbeat(value: Any, source: OptionSource) -> Translated:
    silent = number(source.options.get("plugin_registration.heartbeat_timeout_seconds", 15.0))
    missed = whole(source.options.get("plugin_registration.heartbeat_missed_threshold", 2))
    return Translated({"plugins/heartbeat": silent * missed}, "time-out times missed; nobody checked it there")


def load_classic_gpus(value: Any, _: OptionSource) -> Translated | str:
    if bound(value) is None:
        return f"set planner.budget.max_gpus: without it policy load-classic takes at most {GPUS_MAX} GPUs"
    return Translated({"budget/max_gpus": bound(value)})
