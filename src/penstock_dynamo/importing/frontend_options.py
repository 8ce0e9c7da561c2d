"""Options of Dynamo's frontend and router (1.0 to 1.6) as settings of ours, one row per option, as for its planners.

Paths are below the config's root. What an engine reports itself, and what Dynamo's request plane needs, become nothing.
"""

import json
from collections.abc import Mapping
from typing import Any

from penstock.router.selection.cost import CREDIT_DECAY
from penstock.router.stage_graph import NEW_SHARE_MAX
from penstock_dynamo.importing.option_rules import (
    LeftOut,
    OptionSource,
    Rule,
    Translated,
    all_left,
    fixed,
    left,
    number,
    optional,
    text,
    to,
    truth,
    whole,
    words,
)

STORE = "a cluster has one store of its own (discovery.store), whose keys begin with the cluster's name"
HTTP = "engines are called over their own HTTP, so there is no plane for requests"
CHAT = "the engine renders chats and parses what comes of them: its answers are passed on as they are"
UNKEYED = "hashes between frontends are not keyed; the cluster's secret signs who may speak"
ESTIMATES = "router.cost.kind: latency predicts prefill from what was measured; no model of engines is asked"
ALIASES = {
    "kv_overlap_score_weight": "router_kv_overlap_score_weight",
    "kv_events": "router_kv_events",
    "durable_kv_events": "router_durable_kv_events",
    "track_active_blocks": "router_track_active_blocks",
    "track_output_blocks": "router_track_output_blocks",
    "assume_kv_reuse": "router_assume_kv_reuse",
}
"""Older names of options."""
NEGATABLE = {
    "interactive",
    "serve_indexer",
    "enforce_disagg",
    "load_aware",
    "router_kv_events",
    "router_durable_kv_events",
    "router_reset_states",
    "router_replica_sync",
    "router_track_active_blocks",
    "router_track_output_blocks",
    "router_assume_kv_reuse",
    "router_track_prefill_tokens",
    "router_conditional_disagg",
    "use_remote_indexer",
    "enable_session_prefix_index",
    "nats_tls_insecure",
    "kserve_grpc_server",
    "enable_anthropic_api",
    "strip_anthropic_preamble",
    "enable_streaming_tool_dispatch",
    "enable_streaming_reasoning_dispatch",
    "exclude_tools_when_tool_choice_none",
    "dyn_debug_perf",
    "tokenizer_fallback",
    "trust_remote_code",
    *ALIASES,
} - {"kv_overlap_score_weight"}
"""Options that take no value on a command line, and have a form with no- before them."""


def _host(value: Any, _: OptionSource) -> Translated:
    note = "" if str(value) in ("127.0.0.1", "localhost", "::1") else "off loopback it needs frontend.security.api_keys"
    return Translated({"frontend/host": str(value)}, note)


def _weight(value: Any, _: OptionSource) -> Translated:
    weight = number(value)
    if weight == 0.0:
        return Translated({"router/cost/overlap_credit": 0.0}, "0 asked for no regard to caches")
    return Translated({"router/cost/prefill_scale": weight})


def _kv_events(value: Any, _: OptionSource) -> Translated:
    if truth(value):
        return Translated({"router/index/kind": "auto"}, "exact where a worker announces its blocks")
    return Translated({"router/index/kind": "approximate"})


def _durable(value: Any, _: OptionSource) -> Translated:
    if not truth(value):
        raise LeftOut("as here")
    return Translated({"discovery/kv_events": "jetstream"}, "the broker is that of discovery.nats.urls")


def _load_aware(value: Any, _: OptionSource) -> Translated:
    if not truth(value):
        raise LeftOut("as here")
    return Translated({"router/mode": "kv", "router/index/kind": "none", "router/cost/overlap_credit": 0.0})


def _active_blocks(value: Any, _: OptionSource) -> Translated:
    if truth(value):
        raise LeftOut("as here")
    return Translated({"router/cost/decode_scale": 0.0})


def _conditional(value: Any, _: OptionSource) -> Translated:
    return Translated({"router/handoff/conditional": "thresholds" if truth(value) else "off"})


def _conditional_config(value: Any, _: OptionSource) -> Translated:
    told = json.loads(value) if isinstance(value, str) else dict(value)
    others = ", ".join(name for name in told if name not in ("eff_isl_threshold", "eff_isl_ratio_threshold"))
    notes = [f"{others} became nothing"] if others else []
    if told.get("eff_isl_ratio_threshold", NEW_SHARE_MAX) != NEW_SHARE_MAX:
        notes.append(f"eff_isl_ratio_threshold is fixed at {NEW_SHARE_MAX:g} here")
    if "eff_isl_threshold" not in told:
        raise LeftOut("; ".join([*notes, "router.handoff.new_tokens_max is the threshold here"]))
    return Translated({"router/handoff/new_tokens_max": told["eff_isl_threshold"]}, "; ".join(notes))


def _affinity_ttl(value: Any, source: OptionSource) -> Translated:
    if value is None:
        raise LeftOut("unset, as here")
    mode = str(source.options.get("router_session_affinity_mode", "hard"))
    return Translated({"router/affinity/ttl": number(value), "router/affinity/mode": mode})


def _affinity_mode(value: Any, source: OptionSource) -> Translated:
    if source.options.get("router_session_affinity_ttl_secs") is None:
        raise LeftOut("without --router-session-affinity-ttl-secs sessions have no affinity")
    return Translated({"router/affinity/mode": str(value)})


def _as_here(expected: bool, why: str) -> Rule:
    """Return a rule that sets nothing; ``why`` is for values that differ from what is done here anyway."""

    def rule(value: Any, _: OptionSource) -> Translated:
        raise LeftOut("as here" if truth(value) == expected else why)

    return rule


def _where_positive(path: str) -> Rule:
    def rule(value: Any, _: OptionSource) -> Translated:
        if whole(value) == 0:
            raise LeftOut("0 leaves it to the frontend, as here")
        return Translated({path: whole(value)})

    return rule


FRONTEND: dict[str, Rule] = {
    # --- routing
    "router_mode": words(
        "router/mode",
        ("round-robin", "random", "power-of-two", "kv", "direct", "least-loaded"),
        {"device-aware-weighted": "workers are not weighed by their device; router.mode: least_loaded is the nearest"},
    ),
    "load_aware": _load_aware,
    "router_kv_overlap_score_credit": to("router/cost/overlap_credit", number),
    "router_kv_overlap_score_credit_decay": fixed(CREDIT_DECAY),
    "router_kv_overlap_score_weight": _weight,
    "router_prefill_load_scale": to("router/cost/prefill_scale", number),
    "router_decode_active_request_weight": to("router/cost/request_weight", number),
    "router_host_cache_hit_weight": to("router/cost/host_credit", number),
    "router_disk_cache_hit_weight": to("router/cost/disk_credit", number),
    "router_temperature": to("router/cost/temperature", number),
    "router_kv_events": _kv_events,
    "router_ttl_secs": to("router/index/approximate_ttl", number),
    "router_predicted_ttl_secs": optional("router/index/predicted_ttl", number),
    "router_approximate_cache_policy": left("what an approximate index holds ends by router.index.approximate_ttl"),
    "router_queue_threshold": optional("router/queue/threshold", number),
    "router_queue_policy": words("router/queue/policy", ("fcfs", "lcfs", "wspt")),
    "router_policy_config": left("its file is not read: give its options one by one"),
    "router_prefill_policy": left("router.handoff.prefill.mode is what prefill workers have of their own"),
    "router_decode_policy": left("router.handoff.decode.mode is what decode workers have of their own"),
    "router_track_active_blocks": _active_blocks,
    "router_track_output_blocks": to("router/track_output", truth),
    "router_track_prefill_tokens": _as_here(True, "queued prefill always counts; router.cost.prefill_scale weighs it"),
    "router_assume_kv_reuse": _as_here(True, "blocks in use always count once on a worker"),
    "router_replica_sync": left("frontends always tell each other what they placed, over discovery.plane"),
    **all_left(UNKEYED, "router_tracking_hash", "router_tracking_key_file", "router_tracking_key_id"),
    "router_prefill_load_model": left(ESTIMATES),
    "router_durable_kv_events": _durable,
    "router_snapshot_threshold": left(
        "with discovery.kv_events: jetstream a snapshot of a worker is written every 2,000 batches of its events"
    ),
    "router_reset_states": left("each life of a worker has a stream of its own, so there is nothing old to forget"),
    "router_event_threads": left("one thread reads KV events; more frontends share the load (frontend.processes)"),
    **all_left("each frontend has an index of its own", "serve_indexer", "use_remote_indexer"),
    "enable_session_prefix_index": left("sessions are router.affinity"),
    **all_left("no cache outside of the engines is asked", "shared_cache_type", "shared_cache_multiplier"),
    "router_min_initial_workers": left("requests to a model without workers wait: router.queue.start_wait"),
    "router_session_affinity_ttl_secs": _affinity_ttl,
    "router_session_affinity_mode": _affinity_mode,
    # --- hand-offs, refusals, migration
    "router_conditional_disagg": _conditional,
    "router_conditional_disagg_config": _conditional_config,
    "enforce_disagg": left("Dynamo takes no notice of it; roles are those of the pools"),
    "active_decode_blocks_threshold": optional("router/overload/blocks", number),
    "active_prefill_tokens_threshold": optional("router/overload/prefill_tokens", whole),
    "active_prefill_tokens_threshold_frac": left(
        "router.overload.prefill_tokens is in tokens; router.queue.threshold holds requests by a share"
    ),
    "admission_control": left("router.overload and router.queue refuse; they are off until set"),
    "migration_limit": to("router/migration/limit", whole),
    "migration_max_seq_len": optional("router/migration/tokens_max", whole),
    # --- where it listens and what it discovers
    "http_host": _host,
    "http_port": to("frontend/port", whole),
    "tls_cert_path": optional("frontend/security/tls_cert", text),
    "tls_key_path": optional("frontend/security/tls_key", text),
    "tls_client_ca_cert_path": left("clients show keys, not certificates: frontend.security.api_keys"),
    "discovery_backend": words(
        "discovery/store",
        {"etcd": "etcd", "file": "sqlite", "kubernetes": "kubernetes"},
        {"mem": STORE},
    ),
    "event_plane": words("discovery/plane", ("zmq", "nats")),
    "nats_tls_ca_cert_path": optional("discovery/nats/ca", text),
    "nats_tls_client_cert_path": optional("discovery/nats/cert", text),
    "nats_tls_client_key_path": optional("discovery/nats/key", text),
    "nats_tls_insecure": left("a NATS server over TLS is always checked; discovery.nats.ca says whom to trust"),
    **all_left(HTTP, "request_plane", "response_plane"),
    **{
        f"tcp_tls_{name}_path": left(HTTP)
        for name in ("cert", "key", "ca_cert", "client_cert", "client_key", "client_ca_cert")
    },
    **all_left(STORE, "namespace", "namespace_prefix"),
    "kv_cache_block_size": left("engines tell it, or the pool does: models.NAME.pools.POOL.block_size"),
    "model_name": left("models are those of the config: models.NAME"),
    **all_left("a model's tokenizer is models.NAME.tokenizer", "model_path", "tokenizer", "tokenizer_fallback"),
    # --- the dialect
    "dyn_preprocess_workers": _where_positive("frontend/tokenize/threads"),
    "trust_remote_code": left("no code of a model is run here"),
    **all_left(
        CHAT,
        "dyn_chat_processor",
        "reasoning_field_name",
        "exclude_tools_when_tool_choice_none",
        "enable_streaming_tool_dispatch",
        "enable_streaming_reasoning_dispatch",
    ),
    **all_left("only OpenAI's dialect is served", "enable_anthropic_api", "strip_anthropic_preamble"),
    **all_left(
        "frontend.grpc_port serves KServe's gRPC",
        "kserve_grpc_server",
        "grpc_metrics_port",
    ),
    "frontend_route_extension": left("frontend.proxied_routes names further routes of engines"),
    "metrics_prefix": left("metrics keep their names: dynamo_frontend_* and penstock_*"),
    "interactive": left("penstock chat asks a running cluster"),
    "dump_config_to": left("penstock config show prints every setting"),
    "dyn_debug_perf": left("logs.level: debug and frontend.otlp_endpoint show where time goes"),
    "ais_perf_config": left(ESTIMATES),
    **{
        f"{kind}_{name}": left(ESTIMATES)
        for kind in ("ais", "aic")
        for name in (
            *("backend", "system", "backend_version", "tp_size", "model_path", "moe_tp_size", "moe_ep_size"),
            *("attention_dp_size", "nextn", "nextn_accept_rates", "mtp_seed"),
        )
    },
}
"""Names as on the command line, with underscores."""


def named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with older names replaced by newer ones."""
    return {ALIASES.get(name, name): value for name, value in options.items()}
