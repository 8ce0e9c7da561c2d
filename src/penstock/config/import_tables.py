"""Which of our settings does each option of the field's planners become? One row an option, for each generation.

``load-classic`` is the threshold planner with its 15 options, ``sla-classic`` the one with interpolators and correction
factors, ``planner-config`` today's PlannerConfig with its groups. A row gives settings below ``planner`` (parts
joined by ``/``, since ids may hold dots), or a reason.
"""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from penstock.config.import_rules import (
    Became,
    Generation,
    Left,
    Rule,
    Source,
    bound,
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

# --- rows that several generations share ------------------------------------------------------------------------------

KUBERNETES = (
    "there is no connector for Kubernetes; planner.connector: virtual or webhook lets an operator of yours scale, and "
    "process scales the engines of penstock up"
)
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


def _environment(value: Any, source: Source) -> Became:
    if value == "virtual":
        return Became({"connector": "virtual"}, "keys in the etcd of discovery.etcd")
    if value == "local":
        return Became({"connector": "process"}, "engines that penstock up starts")
    if value == "global-planner":
        raise Left("one planner here plans all pools and models under one planner.budget; there is none above it")
    if value == "kubernetes":
        raise Left(KUBERNETES)
    raise ValueError("it takes kubernetes, virtual, local or global-planner")


def _namespace(value: Any, source: Source) -> Became:
    found: dict[str, Any] = {}
    if source.virtual:
        found["virtual/namespace"] = str(value)
    if _prometheus(source):
        found["prometheus/namespace"] = str(value)
    if not found:
        raise Left("it names keys in etcd and a label in Prometheus, and neither is used here")
    return Became(found)


def _prometheus(source: Source) -> bool:
    return "metric_pulling_prometheus_endpoint" in source.options or "prometheus_endpoint" in source.options


def _gpus(role: str) -> Rule:
    def rule(value: Any, source: Source) -> Became:
        if value is None:
            raise Left("unset: the pool's own engines say it")
        if source.virtual:
            return Became({f"virtual/gpus_{role}": whole(value)})
        raise Left(f"it belongs to the pool: models.NAME.pools.POOL.gpus: {whole(value)}, of role {role}")

    return rule


def _minimum(role: str) -> Rule:
    def rule(value: Any, _: Source) -> Became:
        if value is None:
            raise Left("unset: planner.budget.min_replicas counts")
        return Became({f"budget/pools/{role}/min_replicas": whole(value)}, f"of a pool that is named {role}")

    return rule


def _model(value: Any, source: Source) -> Became:
    if value is None or not source.virtual:
        raise Left(OF_MODELS)
    return Became({"virtual/model": str(value)})


COMMON: dict[str, Rule] = {
    "environment": _environment,
    "backend": left(OF_POOLS),
    "namespace": _namespace,
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


def _target(value: Any, source: Source) -> Became:
    if value in ("throughput", "latency", "load"):
        return Became({"optimization_target": value})
    if value != "sla":
        raise ValueError("it takes throughput, latency, load or sla")
    return Became({"optimization_target": "sla", "policy": _policy(source)}, "policy slo is ours, and the default")


def _policy(source: Source) -> str:
    throughput = truth(source.options.get("enable_throughput_scaling", True))
    load = truth(source.options.get("enable_load_scaling", False))
    return "hybrid" if throughput and load else "load-fpm-1.6" if load else "throughput-fpm"


def _latency(name: str, most: float) -> Rule:
    """Older ones took seconds, later ones milliseconds: a target below ``most`` is meant in seconds."""

    def rule(value: Any, _: Source) -> Became:
        told = number(value)
        if told < most:
            return Became({f"slo/{name}": told}, "read as seconds")
        return Became({f"slo/{name}": seconds_of_ms(told)}, "read as milliseconds")

    return rule


def _loop(value: Any, source: Source) -> Became:
    if source.options.get("optimization_target") != "sla":
        raise Left("optimization_target is not sla, so it was without effect")
    truth(value)
    return Became({"policy": _policy(source)})


def _endpoint(value: Any, _: Source) -> Became:
    if value is None:
        raise Left("unset")
    return Became({"source": "prometheus", "prometheus/url": str(value).rstrip("/")})


def _secret(where: str) -> Rule:
    def rule(value: Any, _: Source) -> Became:
        raise Left(f"{SECRET}: {where}" if value else "unset")

    return rule


def _params(value: Any, _: Source) -> Became:
    found = dict(value) if isinstance(value, Mapping) else dict(parse_qsl(str(value or ""), strict_parsing=bool(value)))
    return Became({"prometheus/params": {str(name): str(one) for name, one in found.items()}})


def _hours(value: Any) -> float:
    return 0.0 if value is None else round(number(value) * 3600, 6)


def _power(value: Any, source: Source) -> Became:
    if value is None or not truth(source.options.get("enable_power_awareness", False)):
        raise Left("enable_power_awareness is false, so it was without effect")
    return Became(
        {"budget/watts": number(value)},
        "say what a replica draws with planner.budget.pools.POOL.watts, which is not read",
    )


def _power_on(value: Any, source: Source) -> Became:
    if not truth(value):
        raise Left("without planner.budget.watts there is no ceiling of power")
    if source.options.get("total_gpu_power_limit") is None:
        raise Left("total_gpu_power_limit is not given")
    return Became({"budget/watts": number(source.options["total_gpu_power_limit"])}, DRAWN)


HOLDS = {"HOLD_LAST": "hold_last", "ACCEPT_WHEN_IDLE": "accept_when_idle", "1": "hold_last", "0": "accept_when_idle"}
NEEDS = {"observations.traffic": "traffic", "observations.fpm": "engines", "observations.workers": "pools"}


def _of_plugin(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a plugin's entry says of when it is asked."""
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


def _external(value: Any, _: Source) -> Became:
    found: dict[str, Any] = {}
    notes = []
    for entry in value or ():
        id, endpoint = str(entry["plugin_id"]), str(entry["endpoint"])
        if endpoint.startswith("inproc:"):
            notes.append(f"{id} is in process: name its module in planner.plugins.modules")
            continue
        found[f"plugins/external/{id}"] = {"endpoint": endpoint, **_of_plugin(entry)}
        if entry.get("auth_token"):
            notes.append(f"the token of {id} goes into planner.plugins.tokens_file, a line: {id} TOKEN")
    if value and not found:
        raise Left("; ".join(notes))
    if not value:
        raise Left("the list is empty")
    return Became(found, "; ".join([*notes, "they must speak penstock.planner.v1, see docs/planner-plugins.md"]))


def _modules(value: Any, _: Source) -> Became:
    if not value:
        raise Left("the list is empty")
    found: dict[str, Any] = {}
    for entry in value:
        options = {str(name): yaml_text(one) for name, one in (entry.get("kwargs") or {}).items()}
        named = {"module": str(entry["module"]), "name": str(entry["class"])}
        found[f"plugins/modules/{entry['plugin_id']}"] = {**named, **_of_plugin(entry), "options": options}
    return Became(found, "the class is called with its Spec and has evaluate(context), see docs/planner-plugins.md")


def yaml_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _listen(value: Any, source: Source) -> Became:
    if not truth(source.options.get("scheduling.gateway.enabled", False)):
        raise Left("scheduling.gateway.enabled is false, so nobody listens; planner.plugins.listen unset is the same")
    return Became({"plugins/listen": str(value)})


def _gateway(value: Any, source: Source) -> Became:
    if not truth(value):
        raise Left("planner.plugins.listen unset is the same")
    listen = source.options.get("scheduling.gateway.listen", "unix:///var/run/dynamo/planner/registry.sock")
    return Became({"plugins/listen": str(listen)}, "without planner.plugins.tokens everybody is refused")


def _heartbeat(value: Any, source: Source) -> Became:
    silent = number(source.options.get("plugin_registration.heartbeat_timeout_seconds", 15.0))
    missed = whole(source.options.get("plugin_registration.heartbeat_missed_threshold", 2))
    return Became({"plugins/heartbeat": silent * missed}, "time-out times missed; nobody checked it there")


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
    "ttft_ms": to("slo/ttft", seconds_of_ms),
    "ttft": to("slo/ttft", seconds_of_ms),
    "itl_ms": to("slo/itl", seconds_of_ms),
    "itl": to("slo/itl", seconds_of_ms),
    "load_predictor": to("classic/forecast/predictor", text, "policy slo has forecasts of its own"),
    "load_predictor_log1p": to("classic/forecast/log1p", truth),
    "prophet_window_size": to("classic/sla/load_prediction_window_size", whole),
    "load_predictor_warmup_trace": optional("classic/forecast/warm_up_trace", text),
    "kalman_q_level": to("classic/forecast/kalman_q_level", number),
    "kalman_q_trend": to("classic/forecast/kalman_q_trend", number),
    "kalman_r": to("classic/forecast/kalman_r", number),
    "kalman_min_points": to("classic/forecast/kalman_min_points", whole),
    "metric_pulling_prometheus_endpoint": _endpoint,
    "metric_pulling_prometheus_endpoint_token": _secret("set planner.prometheus.token_file, or the environment"),
    "metric_pulling_prometheus_token": _secret("set planner.prometheus.token_file, or the environment"),
    "metric_pulling_prometheus_token_file": optional("prometheus/token_file", text),
    "metric_pulling_prometheus_ssl_verify": to("prometheus/verify", truth, "here it is true unless said otherwise"),
    "metric_pulling_prometheus_extra_query_params": _params,
    "metric_pulling_prometheus_ca_bundle": optional("prometheus/ca", text),
    "metric_pulling_prometheus_request_timeout_seconds": to("prometheus/timeout", number),
    "metric_reporting_prometheus_port": to("metrics_port", whole),
    "throughput_metrics_source": to("prometheus/throughput_metrics_source", text),
    "global_planner_namespace": left("one planner here plans all pools and models under one planner.budget"),
    "enable_throughput_scaling": _loop,
    "enable_load_scaling": _loop,
    "max_num_fpm_samples": to("classic/fpm/max_num_fpm_samples", whole),
    "fpm_sample_bucket_size": to("classic/fpm/fpm_sample_bucket_size", whole),
    "load_scaling_down_sensitivity": to("classic/fpm/load_scaling_down_sensitivity", share_of_percent),
    "prefill_scale_up_queue_tokens": optional("classic/thresholds/prefill_scale_up_queue_tokens", whole),
    "prefill_scale_down_queue_tokens": optional("classic/thresholds/prefill_scale_down_queue_tokens", whole),
    "decode_scale_up_kv_rate": optional("classic/thresholds/decode_scale_up_kv_rate", share_of_percent),
    "decode_scale_down_kv_rate": optional("classic/thresholds/decode_scale_down_kv_rate", share_of_percent),
    "load_min_observations": to("classic/fpm/load_min_observations", whole),
    "speculative_nextn": left("how many tokens a step accepts is read from the engines, and is not capped"),
    "advisory": to("advisory", truth),
    "enable_power_awareness": _power_on,
    "total_gpu_power_limit": _power,
    "report_interval_hours": to("report/interval", _hours),
    "report_output_dir": left(RUN_FOLDER),
    "report_filename": left(RUN_FOLDER),
    "report_write_gzip_log": left("planner.jsonl in the run folder has every tick, uncompressed"),
    "live_dashboard_port": left("the frontend's page shows the planner, at /ui"),
    "scheduling.scale_interval_seconds": optional("tick", number),
    "scheduling.tick_max_duration_seconds": to("tick_timeout", number),
    "scheduling.external_plugins": _external,
    "scheduling.gateway.enabled": _gateway,
    "scheduling.gateway.listen": _listen,
    "scheduling.gateway.allow_insecure": left(INSECURE),
    "plugin_registration.auth.trusted_sources": left(
        "who shows the token of planner.plugins.tokens is trusted, and nobody else"
    ),
    "plugin_registration.auth.static_secrets": _secret(
        "write a line ID TOKEN for each plugin into planner.plugins.tokens_file; a token is of one id here"
    ),
    "plugin_registration.transport.allow_insecure_grpc": left(INSECURE),
    "plugin_registration.transport.request_timeout_seconds": to("plugins/deadline", number),
    "plugin_registration.transport.keepalive_time_ms": left(
        "signs of life are calls of the registry: planner.plugins.heartbeat"
    ),
    "plugin_registration.transport.max_message_size_bytes": to("plugins/message_max", whole),
    "plugin_registration.protocol_version_min": left(VERSIONS),
    "plugin_registration.protocol_version_max": left(VERSIONS),
    "plugin_registration.heartbeat_timeout_seconds": _heartbeat,
    "plugin_registration.heartbeat_missed_threshold": _heartbeat,
    "plugin_registration.in_process_plugins": _modules,
    "plugin_registration.admin.mode": left("whoever holds a plugin's token may list them; nobody else"),
}
"""Today's PlannerConfig, groups with dots; retired spellings beside those of today."""


# --- the classic ones -------------------------------------------------------------------------------------------------

LOAD_CLASSIC: dict[str, Rule] = {
    **COMMON,
    "served_model_name": to("classic/load/served_model_name", text),
    "namespace": to("classic/load/namespace", text, "it names nothing here; clusters are told apart by their store"),
    "adjustment_interval": to("classic/load/adjustment_interval", number),
    "metric_pulling_interval": to("classic/load/metric_pulling_interval", number),
    "max_gpu_budget": to(
        "classic/load/max_gpu_budget", whole, "planner.budget.max_gpus is the ceiling of all policies"
    ),
    "min_gpu_budget": to("classic/load/min_gpu_budget", whole),
    "decode_kv_scale_up_threshold": to("classic/load/decode_kv_scale_up_threshold", number),
    "decode_kv_scale_down_threshold": to("classic/load/decode_kv_scale_down_threshold", number),
    "prefill_queue_scale_up_threshold": to("classic/load/prefill_queue_scale_up_threshold", number),
    "prefill_queue_scale_down_threshold": to("classic/load/prefill_queue_scale_down_threshold", number),
    "decode_engine_num_gpu": to("classic/load/decode_engine_num_gpu", whole),
    "prefill_engine_num_gpu": to("classic/load/prefill_engine_num_gpu", whole),
}
"""The threshold planner."""

SLA_CLASSIC: dict[str, Rule] = {
    **COMMON,
    "adjustment_interval": to("classic/sla/adjustment_interval", number),
    "min_endpoint": to("classic/sla/min_endpoint", whole),
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
}
POLICIES: dict[Generation, str | None] = {
    "planner-config": None,  # by optimization_target
    "load-classic": "load-classic",
    "sla-classic": "sla-classic",
}


def implied(generation: Generation, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the field's planner takes for options that are not given, where ours would take something else."""
    if generation == "load-classic":
        return {}  # planner.classic.load has their defaults
    if generation == "sla-classic":
        return _absent(given, {"max_gpu_budget": 8, "load_predictor": "arima"})
    found: dict[str, Any] = {"optimization_target": "throughput", "mode": "disagg", "max_gpu_budget": 8}
    if given.get("optimization_target") == "sla":
        found |= {"load_predictor": "arima"}
        if not {"ttft", "ttft_ms"} & set(given):
            found["ttft_ms"] = 500.0
        if not {"itl", "itl_ms"} & set(given):
            found["itl_ms"] = 50.0
    return _absent(given, found)


def _absent(given: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in given}
