"""Table of Dynamo's options, those of its planners and of its frontend and router (1.0 to 1.6), one row per option.

A row is the reason why an option has no counterpart here, or a rule that gives our settings. Parts of a path are joined
by ``/``, since ids may hold dots; paths of planners' options are below ``planner``, the frontend's below the root.
Generations are ``load-classic``, the threshold planner with its 15 options, ``sla-classic``, the one with interpolators
and correction factors, ``planner-config``, today's PlannerConfig with its groups, and ``frontend``.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from penstock.config.settings.planning_settings import PROMETHEUS_TIMEOUT
from penstock.planner.performance.regressions import OBSERVATIONS_MIN
from penstock.planner.performance.sample_retention import BUCKETS, SAMPLES_MAX
from penstock.planner.planner import TICK_TIMEOUT
from penstock.planner.settings_plugins import MESSAGE_MAX
from penstock.router.selection.cost import CREDIT_DECAY
from penstock.router.stage_graph import NEW_SHARE_MAX
from penstock_dynamo.importing import planner_rules as planner
from penstock_dynamo.importing.option_rules import (
    AS_HERE,
    Generation,
    OptionSource,
    Rule,
    Translated,
    bound,
    choice,
    fixed,
    number,
    optional,
    same_names,
    seconds_of_ms,
    share_of_percent,
    switch,
    to,
    truth,
    whole,
    words,
)

Rows = dict[str, Rule | str]

IN_CLUSTER = "http://prometheus-kube-prometheus-prometheus.monitoring.svc.cluster.local:9090"
"""Prometheus that Dynamo's planners ask in Kubernetes where nothing names another."""

# --- reasons that several rows share ----------------------------------------------------------------------------------

OF_POOLS = "engines are said by the pools: models.NAME.pools.POOL.engine"
ONE_PLANNER = "one planner here plans all pools and models under one planner.budget"
RUN_FOLDER = "reports lie in the run folder (runs.dir), as planner-report.html"
INSECURE = (
    "off loopback only TLS is spoken: planner.plugins.cert and .key; planner.plugins.insecure would also take plugins "
    "without a token"
)
VERSIONS = "penstock.planner.v1 has one version, 1.0"
TOKEN_FILE = "write it into the file of planner.prometheus.token_file"
STORE = "a cluster has one store of its own (discovery.store), whose keys begin with the cluster's name"
HTTP = "engines are called over their own HTTP, so there is no plane for requests"
CHAT = "the engine renders chats and parses what comes of them: its answers are passed on as they are"
UNKEYED = "hashes between frontends are not keyed; the cluster's secret signs who may speak"
ESTIMATES = "router.cost.kind: latency predicts prefill from what was measured; no model of engines is asked"

# --- planners' options ------------------------------------------------------------------------------------------------

COMMON: Rows = {
    "environment": choice(
        "kubernetes, virtual, local or global-planner",
        {
            "virtual": Translated({"connector": "virtual"}, "keys in the etcd of discovery.etcd"),
            "local": Translated({"connector": "process"}, "engines that penstock up starts"),
            "global-planner": f"{ONE_PLANNER}; there is no planner above it",
            "kubernetes": Translated(
                {"connector": "kubernetes"},
                "it scales the DynamoGraphDeployment of planner.kubernetes.target, or of DYN_PARENT_DGD_K8S_NAME",
            ),
        },
    ),
    "backend": OF_POOLS,
    "namespace": planner.namespace_of_keys,
    "parent_dgd_k8s_name": planner.graph_deployment,
    "no_operation": to("advisory", truth),
    "log_dir": to("tensorboard", lambda value: None if value is None else str(value)),
    "max_gpu_budget": to("budget/max_gpus", bound),
    "min_gpu_budget": to("budget/min_gpus", bound),
    "min_endpoint": to("budget/min_replicas", whole),
    "decode_engine_num_gpu": partial(planner.gpus_of_role, "decode"),
    "prefill_engine_num_gpu": partial(planner.gpus_of_role, "prefill"),
    "served_model_name": planner.model_name,
    "model_name": planner.model_name,
}
PLANNER_CONFIG: Rows = {
    **COMMON,
    "pre_deployment_sweeping_mode": "it is the profiler's, which runs on its own and before the planner",
    "mode": words("mode", {"disagg": "disaggregated", "prefill": "prefill", "decode": "decode", "agg": "aggregated"}),
    "optimization_target": planner.optimization_target,
    "throughput_adjustment_interval_seconds": to("throughput_interval", number),
    "throughput_adjustment_interval": to("throughput_interval", number),
    "load_adjustment_interval_seconds": to("load_interval", number),
    "load_adjustment_interval": to("load_interval", number),
    **same_names("classic/fpm", whole, "max_throughput_scaling_replicas"),
    "prefill_min_endpoint": partial(planner.minimum_of_role, "prefill"),
    "decode_min_endpoint": partial(planner.minimum_of_role, "decode"),
    "control_api_port": "penstock set planner.budget.KEY=VALUE changes limits of a running cluster",
    "profile_results_dir": to("classic/profile", str),
    "aic_interpolation": "a profile comes from a folder (planner.classic.profile) or from the engines themselves",
    "ais_perf_model": "engines are measured while they run; a profile may come from planner.classic.profile",
    "aic_perf_model": "it was retired there as well",
    **dict.fromkeys(("ttft_ms", "ttft"), to("/slo/ttft", seconds_of_ms)),
    **dict.fromkeys(("itl_ms", "itl"), to("/slo/itl", seconds_of_ms)),
    "load_predictor": to("classic/forecast/predictor", str, "policy slo has forecasts of its own"),
    "load_predictor_log1p": to("classic/forecast/log1p", truth),
    "prophet_window_size": to("classic/sla/load_prediction_window_size", whole),
    "load_predictor_warmup_trace": optional("classic/forecast/warm_up_trace", str),
    **same_names("classic/forecast", number, "kalman_q_level", "kalman_q_trend", "kalman_r"),
    **same_names("classic/forecast", whole, "kalman_min_points"),
    "metric_pulling_prometheus_endpoint": planner.prometheus_endpoint,
    "metric_pulling_prometheus_endpoint_token": planner.left_secret(TOKEN_FILE),
    "metric_pulling_prometheus_token": planner.left_secret(TOKEN_FILE),
    "metric_pulling_prometheus_token_file": optional("prometheus/token_file", str),
    "metric_pulling_prometheus_ssl_verify": to("prometheus/verify", truth, "here it is true unless said otherwise"),
    "metric_pulling_prometheus_extra_query_params": to("prometheus/params", planner.query_params),
    "metric_pulling_prometheus_ca_bundle": optional("prometheus/ca", str),
    "metric_pulling_prometheus_request_timeout_seconds": fixed(PROMETHEUS_TIMEOUT),
    "metric_reporting_prometheus_port": to("metrics_port", whole),
    **same_names("prometheus", str, "throughput_metrics_source"),
    "global_planner_namespace": ONE_PLANNER,
    "enable_throughput_scaling": planner.scaling_loop,
    "enable_load_scaling": planner.scaling_loop,
    "max_num_fpm_samples": fixed(SAMPLES_MAX),
    "fpm_sample_bucket_size": fixed(BUCKETS),
    **same_names("classic/fpm", share_of_percent, "load_scaling_down_sensitivity"),
    "prefill_scale_up_queue_tokens": optional("classic/thresholds/prefill_scale_up_queue_tokens", whole),
    "prefill_scale_down_queue_tokens": optional("classic/thresholds/prefill_scale_down_queue_tokens", whole),
    "decode_scale_up_kv_rate": optional("classic/thresholds/decode_scale_up_kv_rate", share_of_percent),
    "decode_scale_down_kv_rate": optional("classic/thresholds/decode_scale_down_kv_rate", share_of_percent),
    "load_min_observations": fixed(OBSERVATIONS_MIN),
    "speculative_nextn": "how many tokens a step accepts is read from the engines, and is not capped",
    "advisory": to("advisory", truth),
    "enable_power_awareness": planner.power_awareness,
    "total_gpu_power_limit": planner.power_limit,
    "report_interval_hours": to("report/interval", planner.seconds_of_hours),
    **dict.fromkeys(("report_output_dir", "report_filename"), RUN_FOLDER),
    "report_write_gzip_log": "planner.jsonl in the run folder has every tick, uncompressed",
    "live_dashboard_port": "the frontend's page shows the planner, at /ui",
    "scheduling.scale_interval_seconds": optional("tick", number),
    "scheduling.tick_max_duration_seconds": fixed(TICK_TIMEOUT),
    "scheduling.external_plugins": planner.external_plugins,
    "scheduling.gateway.enabled": planner.gateway_enabled,
    "scheduling.gateway.listen": planner.gateway_listen,
    "scheduling.gateway.allow_insecure": INSECURE,
    "plugin_registration.transport.allow_insecure_grpc": INSECURE,
    "plugin_registration.auth.trusted_sources": (
        "a plugin is trusted when it shows its token of planner.plugins.tokens, and only then"
    ),
    "plugin_registration.auth.static_secrets": planner.left_secret(
        "write a line ID TOKEN for each plugin into planner.plugins.tokens_file; a token is of one id here"
    ),
    "plugin_registration.transport.request_timeout_seconds": to("plugins/deadline", number),
    "plugin_registration.transport.keepalive_time_ms": (
        "signs of life are calls of the registry: planner.plugins.heartbeat"
    ),
    "plugin_registration.transport.max_message_size_bytes": fixed(MESSAGE_MAX),
    "plugin_registration.protocol_version_min": VERSIONS,
    "plugin_registration.protocol_version_max": VERSIONS,
    "plugin_registration.heartbeat_timeout_seconds": planner.heartbeat,
    "plugin_registration.heartbeat_missed_threshold": planner.heartbeat,
    "plugin_registration.in_process_plugins": planner.in_process_plugins,
    "plugin_registration.admin.mode": "only a client with a plugin's token may list them",
}
"""Today's PlannerConfig, groups with dots; retired spellings beside today's."""


LOAD_CLASSIC: Rows = {
    **COMMON,
    "max_gpu_budget": planner.load_classic_gpus,
    **same_names(
        "classic/load",
        number,
        *("adjustment_interval", "metric_pulling_interval"),
        *("decode_kv_scale_up_threshold", "decode_kv_scale_down_threshold"),
        *("prefill_queue_scale_up_threshold", "prefill_queue_scale_down_threshold"),
    ),
}
SLA_CLASSIC: Rows = {
    **COMMON,
    **same_names("classic/sla", number, "adjustment_interval"),
    "profile_results_dir": to("classic/profile", str),
    "ttft": partial(planner.latency_target, "ttft", 10.0),
    "itl": partial(planner.latency_target, "itl", 1.0),
    "isl": "input lengths are forecast from what arrives",
    "osl": "output lengths are forecast from what is answered",
    "load_predictor": to("classic/forecast/predictor", str),
    **same_names("classic/sla", whole, "load_prediction_window_size"),
    **same_names("classic/sla", truth, "no_correction"),
    **dict.fromkeys(("prometheus_endpoint", "metric_pulling_prometheus_endpoint"), planner.prometheus_endpoint),
    **dict.fromkeys(("prometheus_port", "metric_reporting_prometheus_port"), to("metrics_port", whole)),
}

# --- the frontend's options -------------------------------------------------------------------------------------------

ALIASES = {
    name: f"router_{name}"
    for name in (
        *("kv_overlap_score_weight", "kv_events", "durable_kv_events"),
        *("track_active_blocks", "track_output_blocks", "assume_kv_reuse"),
    )
}
"""Older names of options."""
NEGATABLE = {
    *("interactive", "serve_indexer", "enforce_disagg", "load_aware"),
    *("router_kv_events", "router_durable_kv_events", "router_reset_states", "router_replica_sync"),
    *("router_track_active_blocks", "router_track_output_blocks", "router_assume_kv_reuse"),
    *("router_track_prefill_tokens", "router_conditional_disagg", "use_remote_indexer"),
    *("enable_session_prefix_index", "nats_tls_insecure", "kserve_grpc_server", "enable_anthropic_api"),
    *("strip_anthropic_preamble", "enable_streaming_tool_dispatch", "enable_streaming_reasoning_dispatch"),
    *("exclude_tools_when_tool_choice_none", "dyn_debug_perf", "tokenizer_fallback", "trust_remote_code"),
    *(ALIASES.keys() - {"kv_overlap_score_weight"}),
}
"""Options that take no value on a command line, and have a form with no- before them."""


def _host(value: Any, _: OptionSource) -> Translated:
    note = "" if str(value) in ("127.0.0.1", "localhost", "::1") else "off loopback it needs frontend.security.api_keys"
    return Translated({"frontend/host": str(value)}, note)


def _overlap_weight(value: Any, _: OptionSource) -> Translated:
    if number(value) == 0.0:
        return Translated({"router/cost/overlap_credit": 0.0}, "0 asked for no regard to caches")
    return Translated({"router/cost/prefill_scale": number(value)})


def _conditional_config(value: Any, _: OptionSource) -> Translated | str:
    thresholds = json.loads(value) if isinstance(value, str) else dict(value)
    others = ", ".join(name for name in thresholds if name not in ("eff_isl_threshold", "eff_isl_ratio_threshold"))
    notes = [f"{others} became nothing"] if others else []
    if thresholds.get("eff_isl_ratio_threshold", NEW_SHARE_MAX) != NEW_SHARE_MAX:
        notes.append(f"eff_isl_ratio_threshold is fixed at {NEW_SHARE_MAX:g} here")
    if "eff_isl_threshold" not in thresholds:
        return "; ".join([*notes, "router.handoff.new_tokens_max is the threshold here"])
    return Translated({"router/handoff/new_tokens_max": thresholds["eff_isl_threshold"]}, "; ".join(notes))


def _affinity_ttl(value: Any, source: OptionSource) -> Translated | str:
    if value is None:
        return "unset, as here"
    mode = str(source.options.get("router_session_affinity_mode", "hard"))
    return Translated({"router/affinity/ttl": number(value), "router/affinity/mode": mode})


def _affinity_mode(value: Any, source: OptionSource) -> Translated | str:
    if source.options.get("router_session_affinity_ttl_secs") is None:
        return "without --router-session-affinity-ttl-secs sessions have no affinity"
    return Translated({"router/affinity/mode": str(value)})


def _tokenize_threads(value: Any, _: OptionSource) -> Translated | str:
    if whole(value) == 0:
        return "0 leaves it to the frontend, as here"
    return Translated({"frontend/tokenize/threads": whole(value)})


FRONTEND: Rows = {
    # --- routing
    "router_mode": words(
        "router/mode",
        ("round-robin", "random", "power-of-two", "kv", "direct", "least-loaded"),
        {"device-aware-weighted": "workers are not weighed by their device; router.mode: least_loaded is the nearest"},
    ),
    "load_aware": switch(
        Translated({"router/mode": "kv", "router/index/kind": "none", "router/cost/overlap_credit": 0.0}), AS_HERE
    ),
    "router_kv_overlap_score_credit": to("router/cost/overlap_credit", number),
    "router_kv_overlap_score_credit_decay": fixed(CREDIT_DECAY),
    "router_kv_overlap_score_weight": _overlap_weight,
    "router_prefill_load_scale": to("router/cost/prefill_scale", number),
    "router_decode_active_request_weight": to("router/cost/request_weight", number),
    "router_host_cache_hit_weight": to("router/cost/host_credit", number),
    "router_disk_cache_hit_weight": to("router/cost/disk_credit", number),
    "router_temperature": to("router/cost/temperature", number),
    "router_kv_events": switch(
        Translated({"router/index/kind": "auto"}, "exact where a worker announces its blocks"),
        Translated({"router/index/kind": "approximate"}),
    ),
    "router_ttl_secs": to("router/index/approximate_ttl", number),
    "router_predicted_ttl_secs": optional("router/index/predicted_ttl", number),
    "router_approximate_cache_policy": "what an approximate index holds ends by router.index.approximate_ttl",
    "router_queue_threshold": optional("router/queue/threshold", number),
    "router_queue_policy": words("router/queue/policy", ("fcfs", "lcfs", "wspt")),
    "router_policy_config": "its file is not read: give its options one by one",
    "router_prefill_policy": "router.handoff.prefill.mode is what prefill workers have of their own",
    "router_decode_policy": "router.handoff.decode.mode is what decode workers have of their own",
    "router_track_active_blocks": switch(AS_HERE, Translated({"router/cost/decode_scale": 0.0})),
    "router_track_output_blocks": to("router/track_output", truth),
    "router_track_prefill_tokens": switch(AS_HERE, "queued prefill always counts; router.cost.prefill_scale weighs it"),
    "router_assume_kv_reuse": switch(AS_HERE, "blocks in use always count once on a worker"),
    "router_replica_sync": "frontends always tell each other what they placed, over discovery.plane",
    **dict.fromkeys(("router_tracking_hash", "router_tracking_key_file", "router_tracking_key_id"), UNKEYED),
    "router_prefill_load_model": ESTIMATES,
    "router_durable_kv_events": switch(
        Translated({"discovery/kv_events": "jetstream"}, "the broker is that of discovery.nats.urls"), AS_HERE
    ),
    "router_snapshot_threshold": (
        "with discovery.kv_events: jetstream a snapshot of a worker is written every 2,000 batches of its events"
    ),
    "router_reset_states": "each life of a worker has a stream of its own, so there is nothing old to forget",
    "router_event_threads": "one thread reads KV events; more frontends share the load (frontend.processes)",
    **dict.fromkeys(("serve_indexer", "use_remote_indexer"), "each frontend has an index of its own"),
    "enable_session_prefix_index": "sessions are router.affinity",
    **dict.fromkeys(("shared_cache_type", "shared_cache_multiplier"), "no cache outside of the engines is asked"),
    "router_min_initial_workers": "requests to a model without workers wait: router.queue.start_wait",
    "router_session_affinity_ttl_secs": _affinity_ttl,
    "router_session_affinity_mode": _affinity_mode,
    # --- hand-offs, refusals, migration
    "router_conditional_disagg": switch(
        Translated({"router/handoff/conditional": "thresholds"}), Translated({"router/handoff/conditional": "off"})
    ),
    "router_conditional_disagg_config": _conditional_config,
    "enforce_disagg": "Dynamo takes no notice of it; roles are those of the pools",
    "active_decode_blocks_threshold": optional("router/overload/blocks", number),
    "active_prefill_tokens_threshold": optional("router/overload/prefill_tokens", whole),
    "active_prefill_tokens_threshold_frac": (
        "router.overload.prefill_tokens is in tokens; router.queue.threshold holds requests by a share"
    ),
    "admission_control": "router.overload and router.queue refuse; they are off until set",
    "migration_limit": to("router/migration/limit", whole),
    "migration_max_seq_len": optional("router/migration/tokens_max", whole),
    # --- where it listens and what it discovers
    "http_host": _host,
    "http_port": to("frontend/port", whole),
    "tls_cert_path": optional("frontend/security/tls_cert", str),
    "tls_key_path": optional("frontend/security/tls_key", str),
    "tls_client_ca_cert_path": "clients show keys, not certificates: frontend.security.api_keys",
    "discovery_backend": words(
        "discovery/store", {"etcd": "etcd", "file": "sqlite", "kubernetes": "kubernetes"}, {"mem": STORE}
    ),
    "event_plane": words("discovery/plane", ("zmq", "nats")),
    "nats_tls_ca_cert_path": optional("discovery/nats/ca", str),
    "nats_tls_client_cert_path": optional("discovery/nats/cert", str),
    "nats_tls_client_key_path": optional("discovery/nats/key", str),
    "nats_tls_insecure": "a NATS server over TLS is always checked; discovery.nats.ca says whom to trust",
    **dict.fromkeys(("request_plane", "response_plane"), HTTP),
    **{
        f"tcp_tls_{name}_path": HTTP
        for name in ("cert", "key", "ca_cert", "client_cert", "client_key", "client_ca_cert")
    },
    **dict.fromkeys(("namespace", "namespace_prefix"), STORE),
    "kv_cache_block_size": "engines tell it, or the pool does: models.NAME.pools.POOL.block_size",
    "model_name": planner.OF_MODELS,
    **dict.fromkeys(("model_path", "tokenizer", "tokenizer_fallback"), "a model's tokenizer is models.NAME.tokenizer"),
    # --- the dialect
    "dyn_preprocess_workers": _tokenize_threads,
    "trust_remote_code": "no code of a model is run here",
    "dyn_chat_processor": CHAT,
    "reasoning_field_name": CHAT,
    "exclude_tools_when_tool_choice_none": CHAT,
    "enable_streaming_tool_dispatch": CHAT,
    "enable_streaming_reasoning_dispatch": CHAT,
    **dict.fromkeys(("enable_anthropic_api", "strip_anthropic_preamble"), "only OpenAI's dialect is served"),
    **dict.fromkeys(("kserve_grpc_server", "grpc_metrics_port"), "frontend.grpc_port serves KServe's gRPC"),
    "frontend_route_extension": "frontend.proxied_routes names further routes of engines",
    "metrics_prefix": "metrics keep their names: dynamo_frontend_* and penstock_*",
    "interactive": "penstock chat asks a running cluster",
    "dump_config_to": "penstock config show prints every setting",
    "dyn_debug_perf": "logs.level: debug and frontend.otlp_endpoint show where time goes",
    "ais_perf_config": ESTIMATES,
    **{
        f"{kind}_{name}": ESTIMATES
        for kind in ("ais", "aic")
        for name in (
            *("backend", "system", "backend_version", "tp_size", "model_path", "moe_tp_size", "moe_ep_size"),
            *("attention_dp_size", "nextn", "nextn_accept_rates", "mtp_seed"),
        )
    },
}
"""Names as on the command line, with underscores."""

RULES: dict[Generation, Rows] = {
    "planner-config": PLANNER_CONFIG,
    "load-classic": LOAD_CLASSIC,
    "sla-classic": SLA_CLASSIC,
    "frontend": FRONTEND,
}


# --- what is not given ------------------------------------------------------------------------------------------------


def implied(generation: Generation, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return Dynamo's defaults for options that are not given, where our defaults differ."""
    defaults: dict[str, Any] = {}
    if generation == "load-classic" or (generation == "frontend" and given.get("load_aware")):
        return {}  # policy load-classic has Dynamo's defaults
    if generation == "frontend":
        defaults = {"router_mode": "round-robin"}
    elif given.get("environment") == "kubernetes" and "prometheus_endpoint" not in given:
        defaults = {"metric_pulling_prometheus_endpoint": IN_CLUSTER}
    if generation == "sla-classic":
        defaults |= {"max_gpu_budget": 8, "load_predictor": "arima"}
    if generation == "planner-config":
        defaults |= {"optimization_target": "throughput", "mode": "disagg", "max_gpu_budget": 8}
        if given.get("optimization_target") == "sla":
            defaults |= {"load_predictor": "arima"}
            defaults |= {"ttft_ms": 500.0} if "ttft" not in given else {}
            defaults |= {"itl_ms": 50.0} if "itl" not in given else {}
    return {name: value for name, value in defaults.items() if name not in given}


def renewed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the frontend's options with older names replaced by newer ones."""
    return {ALIASES.get(name, name): value for name, value in options.items()}
