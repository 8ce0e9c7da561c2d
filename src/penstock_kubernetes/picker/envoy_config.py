"""Envoy's configuration for a picker, as JSON: listener, ext_proc filter, engines and pickers."""

import socket
from collections.abc import Sequence
from typing import NamedTuple

from penstock.adapters.http1_connection import LOST_AFTER, PROBE_EVERY, PROBES_AFTER, PROBES_UNANSWERED
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock_kubernetes.picker.ext_proc_stream import DESTINATION
from penstock_kubernetes.picker.worker_endpoints import endpoint_in

TYPE = "type.googleapis.com/"
MESSAGE_TIMEOUT = "30s"
"""Longest wait for an answer of the picker: a request may wait in its queue for a worker."""
PICKER_GONE = "connect-failure,refused-stream,reset"
"""When Envoy asks the next picker: this one can't be reached, or ended before it answered anything."""
PING_EVERY, PONG_WITHIN = "1s", "5s"
"""How soon a picker that hangs is noticed: Envoy closes its connection then, and what was in choice asks the next one.
Long enough for an event loop that is busy."""
BODY_MAX = 32 << 20
"""Bytes of a body that Envoy buffers where it has to, as frontend.limits.body_max; its own limit is 1 MiB."""
USER_TIMEOUT = {
    "description": "TCP_USER_TIMEOUT",
    "level": socket.IPPROTO_TCP,
    "name": 18,  # Linux's number of it, which Python on another system does not know
    "int_value": 1000 * LOST_AFTER,
    "state": "STATE_PREBIND",
}
"""Milliseconds that sent bytes may wait to be acknowledged: meanwhile nothing probes the connection."""
MANY = 65_536
"""Connections and requests that Envoy may have open: its own limit of 1,024 would refuse before the router does."""


class EnvoyPlan(NamedTuple):
    """What the configuration is for.

    Args:
        listen: ``host:port`` for clients.
        pickers: ``host:port`` of each picker process.
        engines: those that fallbacks and fail-open may reach; none lets Envoy reach any endpoint that a picker names,
            without fallbacks.
        fallbacks: how many of them Envoy tries after the chosen one.
        watch_answers: answers are shown to the picker, which reads usage and first tokens from them; off costs less.
        fail_open: requests go to any engine while no picker answers; else they are refused then.
        admin: ``host:port`` of Envoy's own admin page.
    """

    listen: str
    pickers: Sequence[str]
    engines: Sequence[str] = ()
    fallbacks: int = 2
    tls: bool = False
    watch_answers: bool = True
    fail_open: bool = False
    admin: str | None = None


def plan_of(
    settings: ClusterSettings, urls: Sequence[str], listen: str, *, watch_answers: bool, fail_open: bool
) -> EnvoyPlan:
    """Return what the settings of a picker need; ``urls``: of the engines, where they do not change.

    Raises:
        ConfigError: the engines are not known beforehand, and Envoy is to have what needs that.
    """
    if not urls and (settings.picker.fallbacks or fail_open):
        raise ConfigError(
            "Envoy can't fall back to engines that its config does not name, and this config has no urls",
            hint="set picker.fallbacks=0 and --failure close, or name the engines",
        )
    picker, host = settings.picker, settings.frontend.host
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return EnvoyPlan(
        listen=listen,
        pickers=[f"{shown}:{picker.listen_port + index}" for index in range(settings.frontend.processes)],
        engines=[endpoint_in(url) for url in urls],
        fallbacks=picker.fallbacks,
        tls=picker.tls,
        watch_answers=watch_answers,
        fail_open=fail_open,
    )


def envoy_config(plan: EnvoyPlan) -> JsonObject:
    """Return a whole configuration."""
    filters = [
        _ext_proc(plan),
        _typed_config("envoy.filters.http.router", "envoy.extensions.filters.http.router.v3.Router"),
    ]
    route: JsonObject = {"cluster": "engines", "timeout": "0s", "idle_timeout": "0s"}
    if plan.engines and plan.fallbacks:
        route["retry_policy"] = {"retry_on": "connect-failure,refused-stream", "num_retries": plan.fallbacks}
    manager = {
        "@type": f"{TYPE}envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "penstock",
        "stream_idle_timeout": "0s",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": _routes(plan, route)}]},
        "http_filters": filters,
    }
    listener = {
        "name": "clients",
        **_address(plan.listen),
        "per_connection_buffer_limit_bytes": BODY_MAX,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    config: JsonObject = {
        "static_resources": {"listeners": [listener], "clusters": [_engine_cluster(plan), _pickers(plan)]}
    }
    if plan.admin is not None:
        config["admin"] = _address(plan.admin)
    return config


def _routes(plan: EnvoyPlan, route: JsonObject) -> list[JsonObject]:
    """Return the routes: to the engines, but where nothing is chosen, a refusal: the filter itself lets that pass."""
    if plan.fail_open:
        return [{"match": {"prefix": "/"}, "route": route}]
    chosen = {"prefix": "/", "headers": [{"name": DESTINATION, "present_match": True}]}
    refusal = {"status": 503, "body": {"inline_string": "no picker answers\n"}}
    return [{"match": chosen, "route": route}, {"match": {"prefix": "/"}, "direct_response": refusal}]


def _ext_proc(plan: EnvoyPlan) -> JsonObject:
    """Return the filter: in modes in which Envoy 1.40 has all of a body itself until the picker has answered.

    So a killed picker costs no answer that has begun. With a body in duplex mode Envoy ends the request when the picker
    goes, whatever failure_mode_allow says: the bytes are with the picker then.
    """
    mode = {
        "request_header_mode": "SEND",
        "request_body_mode": "BUFFERED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "STREAMED" if plan.watch_answers else "NONE",
        # Without it Envoy ends the stream at the answer's head where no body passes, and we would not see its end.
        "response_trailer_mode": "SEND",
    }
    # A picker that is gone costs no request where another one is there.
    previous = "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    retry = {
        "retry_on": PICKER_GONE,
        "num_retries": max(1, len(plan.pickers) - 1),
        "retry_host_predicate": [_typed_config("envoy.retry_host_predicates.previous_hosts", previous)],
        "host_selection_retry_max_attempts": len(plan.pickers) * 4,
    }
    return _typed_config(
        "envoy.filters.http.ext_proc",
        "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "pickers"}, "retry_policy": retry},
        processing_mode=mode,
        message_timeout=MESSAGE_TIMEOUT,
        failure_mode_allow=True,
        response_attributes=["upstream.address"],
        metadata_options={"forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]}},
    )


def _engine_cluster(plan: EnvoyPlan) -> JsonObject:
    cluster: JsonObject = {
        "name": "engines",
        "connect_timeout": "5s",
        # Without it Envoy waits for ever for a host that is gone: answers may take any time.
        "upstream_connection_options": {
            "tcp_keepalive": {
                "keepalive_time": PROBES_AFTER,
                "keepalive_interval": PROBE_EVERY,
                "keepalive_probes": PROBES_UNANSWERED,
            }
        },
        "upstream_bind_config": {"socket_options": [USER_TIMEOUT]},
        "circuit_breakers": {
            "thresholds": [{"max_connections": MANY, "max_pending_requests": MANY, "max_requests": MANY}]
        },
    }
    if not plan.engines:
        original = {"use_http_header": True, "http_header_name": DESTINATION}
        return {
            **cluster,
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": original,
        }
    spread = _balancing_policy("round_robin.v3.RoundRobin")
    chosen = _balancing_policy(
        "override_host.v3.OverrideHost", override_host_sources=[{"header": DESTINATION}], fallback_policy=spread
    )
    return {
        **cluster,
        "type": "STATIC",
        "load_balancing_policy": chosen,
        "load_assignment": _assignment("engines", plan.engines),
    }


def _pickers(plan: EnvoyPlan) -> JsonObject:
    cluster: JsonObject = {
        "name": "pickers",
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": _assignment("pickers", plan.pickers),
        # One that hangs is asked nothing until it goes on; all of them may be left out.
        "health_checks": [
            {
                "interval": PING_EVERY,
                "no_traffic_interval": PING_EVERY,
                "timeout": PONG_WITHIN,
                "unhealthy_threshold": 2,  # one may meet the port of a picker that is being replaced
                "healthy_threshold": 1,
                "grpc_health_check": {"service_name": "liveness"},
            }
        ],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "circuit_breakers": {"thresholds": [{"max_requests": MANY, "max_pending_requests": MANY, "max_retries": MANY}]},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{TYPE}envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {
                    "http2_protocol_options": {"connection_keepalive": {"interval": PING_EVERY, "timeout": PONG_WITHIN}}
                },
            }
        },
    }
    if plan.tls:
        cluster["transport_socket"] = _typed_config(
            "envoy.transport_sockets.tls", "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        )
    return cluster


def _typed_config(name: str, kind: str, **fields: object) -> JsonObject:
    return {"name": name, "typed_config": {"@type": TYPE + kind, **fields}}


def _balancing_policy(kind: str, **fields: object) -> JsonObject:
    name = f"envoy.load_balancing_policies.{kind.partition('.')[0]}"
    return {
        "policies": [
            {
                "typed_extension_config": _typed_config(
                    name, f"envoy.extensions.load_balancing_policies.{kind}", **fields
                )
            }
        ]
    }


def _assignment(name: str, endpoints: Sequence[str]) -> JsonObject:
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": _address(one)} for one in endpoints]}]}


def _address(endpoint: str) -> JsonObject:
    host, _, port = endpoint.rpartition(":")
    return {"address": {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}}
