"""Tables of the options of Dynamo's planners, one row per option, with our settings for each generation.

``load-classic`` is the threshold planner with its 15 options, ``sla-classic`` the one with interpolators and correction
factors, ``planner-config`` today's PlannerConfig with its groups. A row gives settings below ``planner`` (parts
joined by ``/``, since ids may hold dots), or a reason.
"""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from penstock.config.settings.planning_settings import PROMETHEUS_TIMEOUT
from penstock.planner.performance.regressions import OBSERVATIONS_MIN
from penstock.planner.performance.sample_retention import BUCKETS, SAMPLES_MAX
from penstock.planner.planner import TICK_TIMEOUT
from penstock.planner.settings_plugins import MESSAGE_MAX
from penstock_dynamo.importing.frontend_options import FRONTEND
from penstock_dynamo.importing.option_rules import (
    Generation,
    LeftOut,
    OptionSource,
    Rule,
    Translated,
    all_left,
    bound,
    fixed,
    left,
    number,
    optional,
    seconds_of_ms,
    share_of_percent,
    text,
    to,
    truth,
    whole,
    words,
)
from penstock_dynamo.policies.load_classic import GPUS_MAX

# --- rows that several generations share ------------------------------------------------------------------------------

IN_CLUSTER = "http://prometheus-kube-prometheus-prometheus.monitoring.svc.cluster.local:9090"
"""Prometheus that Dynamo's planners ask in Kubernetes where nothing names another."""
OF_POOLS = "engines are said by the pools: models.NAME.pools.POOL.engine"
OF_MODELS = "models are those of the config: models.NAME"
DRAWN = "what a replica draws is not measured: set planner.budget.pools.POOL.watts"
RUN_FOLDER = "reports lie in the run folder (runs.dir), as planner-report.html"
INSECURE = (
    "off loopback only TLS is spoken: planner.plugins.cert and .key; planner.plugins.insecure would also take plugins "
    "without a token"
)
VERSIONS = "penstock.planner.v1 has one version, 1.0"
SECRET = "a secret is not written into a config"


def _environment(value: Any, source: OptionSource) -> Translated:
    if value == "virtual":
        return Translated({"connector": "virtual"}, "keys in the etcd of discovery.etcd")
    if value == "local":
        return Translated({"connector": "process"}, "engines that penstock up starts")
    if value == "global-planner":
        raise LeftOut(
            "one planner here plans all pools and models under one planner.budget; there is no planner above it"
        )
    if value == "kubernetes":
        return Translated(
            {"connector": "kubernetes"},
            "it scales the DynamoGraphDeployment of planner.kubernetes.target, or of DYN_PARENT_DGD_K8S_NAME",
        )
    raise ValueError("it takes kubernetes, virtual, local or global-planner")


def _namespace(value: Any, source: OptionSource) -> Translated:
    found: dict[str, Any] = {}
    if source.virtual:
        found["virtual/namespace"] = str(value)
    if _prometheus(source):
        found["prometheus/namespace"] = str(value)
    if not found:
        raise LeftOut("it names keys in etcd and a label in Prometheus, and neither is used here")
    return Translated(found)


def _graph(value: Any, source: OptionSource) -> Translated:
    if source.options.get("environment") != "kubernetes":
        raise LeftOut("it names what is scaled in Kubernetes, and environment is another")
    return Translated({"kubernetes/target": f"DynamoGraphDeployment/{value}"})


def _prometheus(source: OptionSource) -> bool:
    return "metric_pulling_prometheus_endpoint" in source.options or "prometheus_endpoint" in source.options


def _gpus(role: str) -> Rule:
    def rule(value: Any, source: OptionSource) -> Translated:
        if value is None:
            raise LeftOut("unset: the pool's own engines say it")
        if source.virtual:
            return Translated({f"virtual/gpus_{role}": whole(value)})
        raise LeftOut(f"it belongs to the pool: models.NAME.pools.POOL.gpus: {whole(value)}, of role {role}")

    return rule


def _minimum(role: str) -> Rule:
    def rule(value: Any, _: OptionSource) -> Translated:
        if value is None:
            raise LeftOut("unset: planner.budget.min_replicas counts")
        return Translated({f"budget/pools/{role}/min_replicas": whole(value)}, f"of a pool that is named {role}")

    return rule


def _model(value: Any, source: OptionSource) -> Translated:
    if value is None or not source.virtual:
        raise LeftOut(OF_MODELS)
    return Translated({"virtual/model": str(value)})


COMMON: dict[str, Rule] = {
    "environment": _environment,
    "backend": left(OF_POOLS),
    "namespace": _namespace,
    "parent_dgd_k8s_name": _graph,
    "no_operation": to("advisory", truth),
    "log_dir": to("tensorboard", lambda value: None if value is None else str(value)),
    "max_gpu_budget": to("budget/max_gpus", bound),
    "min_gpu_budget": to("budget/min_gpus", bound),
    "min_endpoint": to("budget/min_replicas", whole),
    "decode_engine_num_gpu": _gpus("decode"),
    "prefill_engine_num_gpu": _gpus("prefill"),
    "served_model_name": _model,
    "model_name": _model,
}


# --- today's ----------------------------------------------------------------------------------------------------------


def _target(value: Any, source: OptionSource) -> Translated:
    if value in ("throughput", "latency", "load"):
        return Translated({"optimization_target": value})
    if value != "sla":
        raise ValueError("it takes throughput, latency, load or sla")
    return Translated({"optimization_target": "sla", "policy": _policy(source)}, "policy slo is ours, and the default")


def _policy(source: OptionSource) -> str:
    throughput = truth(source.options.get("enable_throughput_scaling", True))
    load = truth(source.options.get("enable_load_scaling", False))
    return "hybrid" if throughput and load else "load-fpm-1.6" if load else "throughput-fpm"


def _latency(name: str, most: float) -> Rule:
    """Read seconds of older versions and milliseconds of later ones: a target below ``most`` counts as seconds."""

    def rule(value: Any, _: OptionSource) -> Translated:
        told = number(value)
        if told < most:
            return Translated({f"/slo/{name}": told}, "read as seconds")
        return Translated({f"/slo/{name}": seconds_of_ms(told)}, "read as milliseconds")

    return rule


def _loop(value: Any, source: OptionSource) -> Translated:
    if source.options.get("optimization_target") != "sla":
        raise LeftOut("optimization_target is not sla, so it was without effect")
    truth(value)
    return Translated({"policy": _policy(source)})


def _endpoint(value: Any, _: OptionSource) -> Translated:
    if value is None:
        raise LeftOut("unset")
    return Translated({"source": "prometheus", "prometheus/url": str(value).rstrip("/")})


def _secret(where: str) -> Rule:
    def rule(value: Any, _: OptionSource) -> Translated:
        raise LeftOut(f"{SECRET}: {where}" if value else "unset")

    return rule


def _params(value: Any, _: OptionSource) -> Translated:
    found = dict(value) if isinstance(value, Mapping) else dict(parse_qsl(str(value or ""), strict_parsing=bool(value)))
    return Translated({"prometheus/params": {str(name): str(one) for name, one in found.items()}})


def _hours(value: Any) -> float:
    return 0.0 if value is None else round(number(value) * 3600, 6)


def _power(value: Any, source: OptionSource) -> Translated:
    if value is None or not truth(source.options.get("enable_power_awareness", False)):
        raise LeftOut("enable_power_awareness is false, so it was without effect")
    return Translated(
        {"budget/watts": number(value)},
        "say what a replica draws with planner.budget.pools.POOL.watts, which is not read",
    )


def _power_on(value: Any, source: OptionSource) -> Translated:
    if not truth(value):
        raise LeftOut("without planner.budget.watts there is no ceiling of power")
    if source.options.get("total_gpu_power_limit") is None:
        raise LeftOut("total_gpu_power_limit is not given")
    return Translated({"budget/watts": number(source.options["total_gpu_power_limit"])}, DRAWN)


HOLDS = {"HOLD_LAST": "hold_last", "ACCEPT_WHEN_IDLE": "accept_when_idle", "1": "hold_last", "0": "accept_when_idle"}
NEEDS = {"observations.traffic": "traffic", "observations.fpm": "engines", "observations.workers": "pools"}


def _of_plugin(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a plugin's calls (stage, priority, interval, needs) from its entry."""
    stage = str(entry["plugin_type"]).lower()
    found: dict[str, Any] = {
        "stage": stage,
        "priority": whole(entry.get("priority", 100)),
        "interval": number(entry.get("execution_interval_seconds", 0)),
        "hold": HOLDS[str(entry.get("hold_policy", "HOLD_LAST"))],
    }
    needs = [
        next((ours for theirs, ours in NEEDS.items() if str(n).startswith(theirs)), None)
        for n in entry.get("needs") or ()
    ]
    if any(needs):
        found["needs"] = list(dict.fromkeys(name for name in needs if name))
    if entry.get("requires_produced_fields"):
        found["requires"] = ["predictions"]
    if entry.get("observation_window_seconds"):
        found["window"] = number(entry["observation_window_seconds"])
    return found


def _external(value: Any, _: OptionSource) -> Translated:
    found: dict[str, Any] = {}
    notes = []
    for entry in value or ():
        id, endpoint = str(entry["plugin_id"]), str(entry["endpoint"])
        if endpoint.startswith("inproc:"):
            notes.append(f"{id} is in process: name its module in planner.plugins.use")
            continue
        found[f"plugins/use/{id}"] = {"endpoint": endpoint, **_of_plugin(entry)}
        if entry.get("auth_token"):
            notes.append(f"the token of {id} goes into planner.plugins.tokens_file, a line: {id} TOKEN")
    if value and not found:
        raise LeftOut("; ".join(notes))
    if not value:
        raise LeftOut("the list is empty")
    return Translated(
        found, "; ".join([*notes, "they must speak penstock.planner.v1, see docs/guides/planner-plugins.md"])
    )


def _modules(value: Any, _: OptionSource) -> Translated:
    if not value:
        raise LeftOut("the list is empty")
    found: dict[str, Any] = {}
    for entry in value:
        options = {str(name): yaml_text(one) for name, one in (entry.get("kwargs") or {}).items()}
        named = {"module": str(entry["module"]), "name": str(entry["class"])}
        found[f"plugins/use/{entry['plugin_id']}"] = {**named, **_of_plugin(entry), "options": options}
    return Translated(
        found, "the class is called with its Spec and has evaluate(context), see docs/guides/planner-plugins.md"
    )


def yaml_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _listen(value: Any, source: OptionSource) -> Translated:
    if not truth(source.options.get("scheduling.gateway.enabled", False)):
        raise LeftOut(
            "scheduling.gateway.enabled is false, so nothing listens; planner.plugins.listen unset is the same"
        )
    return Translated({"plugins/listen": str(value)})


def _gateway(value: Any, source: OptionSource) -> Translated:
    if not truth(value):
        raise LeftOut("planner.plugins.listen unset is the same")
    listen = source.options.get("scheduling.gateway.listen", "unix:///var/run/dynamo/planner/registry.sock")
    return Translated({"plugins/listen": str(listen)}, "without planner.plugins.tokens everybody is refused")


def _heartbeat(value: Any, source: OptionSource) -> Translated:
    silent = number(source.options.get("plugin_registration.heartbeat_timeout_seconds", 15.0))
    missed = whole(source.options.get("plugin_registration.heartbeat_missed_threshold", 2))
    return Translated({"plugins/heartbeat": silent * missed}, "time-out times missed; nobody checked it there")


PLANNER_CONFIG: dict[str, Rule] = {
    **COMMON,
    "pre_deployment_sweeping_mode": left("it is the profiler's, which runs on its own and before the planner"),
    "mode": words("mode", {"disagg": "disaggregated", "prefill": "prefill", "decode": "decode", "agg": "aggregated"}),
    "optimization_target": _target,
    "throughput_adjustment_interval_seconds": to("throughput_interval", number),
    "throughput_adjustment_interval": to("throughput_interval", number),
    "load_adjustment_interval_seconds": to("load_interval", number),
    "load_adjustment_interval": to("load_interval", number),
    "max_throughput_scaling_replicas": to("classic/fpm/max_throughput_scaling_replicas", whole),
    "prefill_min_endpoint": _minimum("prefill"),
    "decode_min_endpoint": _minimum("decode"),
    "control_api_port": left("penstock set planner.budget.KEY=VALUE changes limits of a running cluster"),
    "profile_results_dir": to("classic/profile", text),
    "aic_interpolation": left("a profile comes from a folder (planner.classic.profile) or from the engines themselves"),
    "ais_perf_model": left("engines are measured while they run; a profile may come from planner.classic.profile"),
    "aic_perf_model": left("it was retired there as well"),
    "ttft_ms": to("/slo/ttft", seconds_of_ms),
    "ttft": to("/slo/ttft", seconds_of_ms),
    "itl_ms": to("/slo/itl", seconds_of_ms),
    "itl": to("/slo/itl", seconds_of_ms),
    "load_predictor": to("classic/forecast/predictor", text, "policy slo has forecasts of its own"),
    "load_predictor_log1p": to("classic/forecast/log1p", truth),
    "prophet_window_size": to("classic/sla/load_prediction_window_size", whole),
    "load_predictor_warmup_trace": optional("classic/forecast/warm_up_trace", text),
    "kalman_q_level": to("classic/forecast/kalman_q_level", number),
    "kalman_q_trend": to("classic/forecast/kalman_q_trend", number),
    "kalman_r": to("classic/forecast/kalman_r", number),
    "kalman_min_points": to("classic/forecast/kalman_min_points", whole),
    "metric_pulling_prometheus_endpoint": _endpoint,
    "metric_pulling_prometheus_endpoint_token": _secret("write it into the file of planner.prometheus.token_file"),
    "metric_pulling_prometheus_token": _secret("write it into the file of planner.prometheus.token_file"),
    "metric_pulling_prometheus_token_file": optional("prometheus/token_file", text),
    "metric_pulling_prometheus_ssl_verify": to("prometheus/verify", truth, "here it is true unless said otherwise"),
    "metric_pulling_prometheus_extra_query_params": _params,
    "metric_pulling_prometheus_ca_bundle": optional("prometheus/ca", text),
    "metric_pulling_prometheus_request_timeout_seconds": fixed(PROMETHEUS_TIMEOUT),
    "metric_reporting_prometheus_port": to("metrics_port", whole),
    "throughput_metrics_source": to("prometheus/throughput_metrics_source", text),
    "global_planner_namespace": left("one planner here plans all pools and models under one planner.budget"),
    "enable_throughput_scaling": _loop,
    "enable_load_scaling": _loop,
    "max_num_fpm_samples": fixed(SAMPLES_MAX),
    "fpm_sample_bucket_size": fixed(BUCKETS),
    "load_scaling_down_sensitivity": to("classic/fpm/load_scaling_down_sensitivity", share_of_percent),
    "prefill_scale_up_queue_tokens": optional("classic/thresholds/prefill_scale_up_queue_tokens", whole),
    "prefill_scale_down_queue_tokens": optional("classic/thresholds/prefill_scale_down_queue_tokens", whole),
    "decode_scale_up_kv_rate": optional("classic/thresholds/decode_scale_up_kv_rate", share_of_percent),
    "decode_scale_down_kv_rate": optional("classic/thresholds/decode_scale_down_kv_rate", share_of_percent),
    "load_min_observations": fixed(OBSERVATIONS_MIN),
    "speculative_nextn": left("how many tokens a step accepts is read from the engines, and is not capped"),
    "advisory": to("advisory", truth),
    "enable_power_awareness": _power_on,
    "total_gpu_power_limit": _power,
    "report_interval_hours": to("report/interval", _hours),
    **all_left(RUN_FOLDER, "report_output_dir", "report_filename"),
    "report_write_gzip_log": left("planner.jsonl in the run folder has every tick, uncompressed"),
    "live_dashboard_port": left("the frontend's page shows the planner, at /ui"),
    "scheduling.scale_interval_seconds": optional("tick", number),
    "scheduling.tick_max_duration_seconds": fixed(TICK_TIMEOUT),
    "scheduling.external_plugins": _external,
    "scheduling.gateway.enabled": _gateway,
    "scheduling.gateway.listen": _listen,
    **all_left(INSECURE, "scheduling.gateway.allow_insecure", "plugin_registration.transport.allow_insecure_grpc"),
    "plugin_registration.auth.trusted_sources": left(
        "a plugin is trusted when it shows its token of planner.plugins.tokens, and only then"
    ),
    "plugin_registration.auth.static_secrets": _secret(
        "write a line ID TOKEN for each plugin into planner.plugins.tokens_file; a token is of one id here"
    ),
    "plugin_registration.transport.request_timeout_seconds": to("plugins/deadline", number),
    "plugin_registration.transport.keepalive_time_ms": left(
        "signs of life are calls of the registry: planner.plugins.heartbeat"
    ),
    "plugin_registration.transport.max_message_size_bytes": fixed(MESSAGE_MAX),
    **all_left(VERSIONS, "plugin_registration.protocol_version_min", "plugin_registration.protocol_version_max"),
    "plugin_registration.heartbeat_timeout_seconds": _heartbeat,
    "plugin_registration.heartbeat_missed_threshold": _heartbeat,
    "plugin_registration.in_process_plugins": _modules,
    "plugin_registration.admin.mode": left("only a client with a plugin's token may list them"),
}
"""Today's PlannerConfig, groups with dots; retired spellings beside today's."""


# --- the classic ones -------------------------------------------------------------------------------------------------


def _load_gpus(value: Any, source: OptionSource) -> Translated:
    if bound(value) is None:
        raise LeftOut(f"set planner.budget.max_gpus: without it policy load-classic takes at most {GPUS_MAX} GPUs")
    return COMMON["max_gpu_budget"](value, source)


LOAD_CLASSIC: dict[str, Rule] = {
    **COMMON,
    "adjustment_interval": to("classic/load/adjustment_interval", number),
    "metric_pulling_interval": to("classic/load/metric_pulling_interval", number),
    "max_gpu_budget": _load_gpus,
    "decode_kv_scale_up_threshold": to("classic/load/decode_kv_scale_up_threshold", number),
    "decode_kv_scale_down_threshold": to("classic/load/decode_kv_scale_down_threshold", number),
    "prefill_queue_scale_up_threshold": to("classic/load/prefill_queue_scale_up_threshold", number),
    "prefill_queue_scale_down_threshold": to("classic/load/prefill_queue_scale_down_threshold", number),
}
"""The threshold planner."""

SLA_CLASSIC: dict[str, Rule] = {
    **COMMON,
    "adjustment_interval": to("classic/sla/adjustment_interval", number),
    "profile_results_dir": to("classic/profile", text),
    "ttft": _latency("ttft", 10.0),
    "itl": _latency("itl", 1.0),
    "isl": left("input lengths are forecast from what arrives"),
    "osl": left("output lengths are forecast from what is answered"),
    "load_predictor": to("classic/forecast/predictor", text),
    "load_prediction_window_size": to("classic/sla/load_prediction_window_size", whole),
    "no_correction": to("classic/sla/no_correction", truth),
    "prometheus_endpoint": _endpoint,
    "metric_pulling_prometheus_endpoint": _endpoint,
    "prometheus_port": to("metrics_port", whole),
    "metric_reporting_prometheus_port": to("metrics_port", whole),
}
"""The planner with interpolators and correction factors."""

RULES: dict[Generation, dict[str, Rule]] = {
    "planner-config": PLANNER_CONFIG,
    "load-classic": LOAD_CLASSIC,
    "sla-classic": SLA_CLASSIC,
    "frontend": FRONTEND,
}
POLICIES: dict[Generation, str | None] = {
    "planner-config": None,  # by optimization_target
    "load-classic": "load-classic",
    "sla-classic": "sla-classic",
    "frontend": None,
}


def implied(generation: Generation, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return Dynamo's defaults for options that are not given, where our defaults differ."""
    if generation == "load-classic":
        return {}  # policy load-classic has Dynamo's defaults
    if generation == "frontend":
        return {} if given.get("load_aware") else _absent(given, {"router_mode": "round-robin"})
    asked: dict[str, object] = {}
    if given.get("environment") == "kubernetes" and not {"prometheus_endpoint"} & set(given):
        asked = {"metric_pulling_prometheus_endpoint": IN_CLUSTER}
    if generation == "sla-classic":
        return _absent(given, {**asked, "max_gpu_budget": 8, "load_predictor": "arima"})
    found: dict[str, Any] = {**asked, "optimization_target": "throughput", "mode": "disagg", "max_gpu_budget": 8}
    if given.get("optimization_target") == "sla":
        found |= {"load_predictor": "arima"}
        if not {"ttft", "ttft_ms"} & set(given):
            found["ttft_ms"] = 500.0
        if not {"itl", "itl_ms"} & set(given):
            found["itl_ms"] = 50.0
    return _absent(given, found)


def _absent(given: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in given}
