"""vLLM dialect: recognises a vLLM server, reads its card, cache settings and KV event endpoints.

Read: ``/v1/models`` (name, longest request, adapters), ``/metrics`` (``cache_config_info``), ``/kv_event_sources``.

Its health stays 200 while it drains, and it refuses in three ways: 500 with a text where the prompt is text, 200 with
the finish reason ``abort`` and no token where it is token ids, and 200 with nothing but ``[DONE]`` where it streams
(all observed with 0.32). Once its shutdown timeout is over, open streams fall silent and stay open.
"""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from penstock.adapters.engines.dialects.dialect import CardFields, Dialect, MetricNames
from penstock.adapters.engines.dialects.scale_out_routes import token_routes
from penstock.adapters.engines.http.engine_http import EngineServer, folder, whole

_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LORA = re.compile(r"^vllm:lora_requests_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_ANYWHERE = ("*", "0.0.0.0", "[::]", "::")
_LOOPBACK = ("localhost", "127.", "[::1]")
_ALIKE = ("sha256", "sha256_cbor")
"""Hash algorithms that give a block one hash on every server; the others are seeded at random by default."""


async def card(server: EngineServer, model: Mapping[str, Any]) -> CardFields | None:
    """Read a vLLM server."""
    metrics = await server.text("/metrics")
    labels = cache_labels(metrics)
    if labels is None and model.get("owned_by") != "vllm":
        return None
    reported = cache_card(labels or {})
    if (labels or {}).get("prefix_caching_hash_algo") in _ALIKE:
        reported["hash_scheme"] = f"vllm {(labels or {})['prefix_caching_hash_algo']}"
    reported["adapter_slots"] = adapter_slots(metrics)
    reported["tokenizer"] = folder(model.get("root"))
    version = (await server.object("/version")).get("version")
    if isinstance(version, str):
        reported["labels"] = {"version": version, **await token_routes(server)}
        # Its hand-shake refuses KV of another version, and of another type.
        reported["layout"] = f"vllm {version} {(labels or {}).get('cache_dtype', 'auto')}"
    return {**reported, **await event_card(server)}


def cache_labels(metrics: str | None) -> dict[str, str] | None:
    """Return the labels of ``cache_config_info``, or None where there is none."""
    match = None if metrics is None else _CACHE_CONFIG.search(metrics)
    return None if match is None else dict(_LABEL.findall(match.group(1)))


def cache_card(labels: Mapping[str, str]) -> CardFields:
    """Return the card fields of the cache's settings."""
    return {
        "block_size": whole(labels.get("block_size")),
        "kv_blocks": whole(labels.get("num_gpu_blocks")),
        "max_num_seqs": whole(labels.get("max_num_seqs")),
        "max_num_batched_tokens": whole(labels.get("max_num_batched_tokens")),
    }


def adapter_slots(metrics: str | None) -> int | None:
    """Return how many adapters a batch may have, the fewest that the server holds; None where it takes none."""
    match = None if metrics is None else _LORA.search(metrics)
    return None if match is None else whole(dict(_LABEL.findall(match.group(1))).get("max_lora"))


async def event_card(server: EngineServer) -> CardFields:
    """Return where its KV events are, by rank; nothing where the answer has another shape (some answer anything)."""
    sources = await server.json("/kv_event_sources")
    if not isinstance(sources, dict) or not sources or not all(str(key).isdigit() for key in sources):
        return {}
    ranks = [sources[key] for key in sorted(sources, key=int)]
    if not all(isinstance(rank, dict) and isinstance(rank.get("endpoint"), str) for rank in ranks):
        return {}
    replay = [rank.get("replay_endpoint") for rank in ranks]
    reported: CardFields = {
        "ranks": len(ranks),
        "events": tuple(reachable(rank["endpoint"], server.url) for rank in ranks),
        "topic": ranks[0].get("topic") or "",
        "hash_scheme": ranks[0].get("hash_scheme"),
        "events_security": ranks[0].get("security"),
    }
    if all(isinstance(endpoint, str) and endpoint for endpoint in replay):
        reported["replay"] = tuple(reachable(str(endpoint), server.url) for endpoint in replay)
    return {name: value for name, value in reported.items() if value is not None}


def reachable(endpoint: str, url: str, offset: int = 0) -> str:
    """Return a server's event endpoint as this process reaches it.

    A server reports its sockets under its own address: where that is a wildcard, or loopback and the server is
    elsewhere, its URL's host takes the place. ``offset`` is added to the port.
    """
    scheme, mark, rest = endpoint.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not mark or not colon or not port.isdigit():
        return endpoint
    theirs = urlsplit(url).hostname or "127.0.0.1"
    away = not theirs.startswith(("localhost", "127.")) and theirs != "::1"
    if host in _ANYWHERE or (away and host.startswith(_LOOPBACK)):
        host = f"[{theirs}]" if ":" in theirs else theirs
    return f"tcp://{host}:{int(port) + offset}"


VLLM = Dialect(
    name="vllm",
    title="vLLM",
    session_header="x-session-id",  # of 0.32: in its KV events; older ones pass it over
    card=card,
    resume="ids",
    continue_fields=(("add_generation_prompt", False), ("continue_final_message", True)),
    priority_field="priority",
    priority_sign=-1,
    salt_field="cache_salt",
    media_uuid=True,
    raw_tool_choice="none",  # it refuses "auto" without a parser of its own
    special_tokens_field="skip_special_tokens",
    rank_header="x-data-parallel-rank",
    lora_routes=("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    clear_cache="/reset_prefix_cache",
    clear_is_late=True,
    counters=MetricNames(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        kv_usage="vllm:kv_cache_usage_perc",
        prompt_tokens="vllm:prompt_tokens_total",
        cached_tokens="vllm:prompt_tokens_cached_total",
        hits="vllm:prefix_cache_hits_total",
        generation_tokens="vllm:generation_tokens_total",
        preemptions="vllm:num_preemptions_total",
        passes="vllm:iteration_tokens_total_count",
        first_tokens="vllm:time_to_first_token_seconds_count",
        itl_sum="vllm:inter_token_latency_seconds_sum",
        itl_count="vllm:inter_token_latency_seconds_count",
        kv_expired="vllm:nixl_num_kv_expired_reqs_total",
    ),
    leaving_words=(
        "cannot schedule new futures after shutdown",
        "EngineCore encountered an issue",
        "EngineDeadError",
    ),
)
