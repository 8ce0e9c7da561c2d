"""SGLang dialect: recognises an SGLang server, reads its card and finds its KV event endpoints.

Read: ``/v1/models`` (name, longest request), ``/server_info`` (its whole start-up settings; ``/get_server_info`` in
older ones). What is here was tried with SGLang 0.5.23 on a CPU (`make test-sglang`); ranks over several GPUs, its host
cache and its speculation were not.

It caches by pages, whose size is 1 token by default. It reports cached tokens only with ``--enable-cache-report``.
Its start-up settings hold its KV event endpoint; a rank's port is the first one's plus its number. An endpoint
without a star makes SGLang's socket connect, so we must bind.

A server of a pair, which prefills or decodes, refuses every request that does not name a room, a number under which
both sides meet at the prefill server's bootstrap port: it does nothing alone. Several answers to one prompt (``n``)
never come out of a pair: it uses a prompt's room a second time, and waits for ever.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.adapters.engines.dialects.dialect import CardFields, Dialect, MetricNames
from penstock.adapters.engines.dialects.vllm import reachable
from penstock.adapters.engines.http.engine_http import EngineServer, folder, whole

_ROLES = {"null": "aggregated", "prefill": "prefill", "decode": "decode"}
"""Its disaggregation mode -> the role of its card."""
FAKE_HOST = "2.2.2.2"
"""Bootstrap host by which SGLang knows a probe: a side of a pair then makes its token without the other."""


async def card(server: EngineServer, model: Mapping[str, Any]) -> CardFields | None:
    """Read an SGLang server."""
    info = await server.object("/server_info") or await server.object("/get_server_info")
    if model.get("owned_by") != "sglang" and "page_size" not in info:
        return None
    page = whole(info.get("page_size"))
    tokens = whole(info.get("max_total_num_tokens"))
    reported: CardFields = {
        "block_size": page,
        "kv_blocks": tokens // page if tokens is not None and page is not None else None,
        "max_num_seqs": _seats(info),
        "max_num_batched_tokens": whole(info.get("chunked_prefill_size")),
        "max_model_len": whole(model.get("max_model_len")) or whole(info.get("context_length")),
        "tokenizer": folder(info.get("tokenizer_path")),
        **_pair_card(info, server.url),
    }
    labels = {"version": info["version"]} if isinstance(info.get("version"), str) else {}
    if info.get("enable_priority_scheduling") and not info.get("schedule_low_priority_values_first"):
        labels["priority"] = "on"
    if labels:
        reported["labels"] = labels
    if info.get("enable_lora"):  # how many it holds has no limit where none is set: then those of a batch
        reported["adapter_slots"] = whole(info.get("max_loaded_loras")) or whole(info.get("max_loras_per_batch"))
    return {**reported, **event_card(info, server.url)}


def _seats(info: Mapping[str, Any]) -> int | None:
    """Return how many requests a rank runs at once; with DP attention ranks share what was set."""
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    return whole(state.get("effective_max_running_requests_per_dp")) or whole(info.get("max_running_requests"))


def _pair_card(info: Mapping[str, Any], url: str) -> CardFields:
    """Return its role, and where a prefill server meets the others; nothing where it does not tell (older ones)."""
    mode = info.get("disaggregation_mode")
    if mode not in _ROLES:
        return {}
    port = whole(info.get("disaggregation_bootstrap_port")) if mode == "prefill" else None
    host = urlsplit(url).hostname or ""
    meets = f"[{host}]" if ":" in host else host
    return {
        "role": _ROLES[mode],
        "fixed_role": True,
        "bootstrap": None if port is None else f"{meets}:{port}",
    }


def event_card(info: Mapping[str, Any], url: str) -> CardFields:
    """Return where its KV events are, from its start-up settings; nothing where they are off."""
    if info.get("disaggregation_mode") == "decode" and not info.get("disaggregation_decode_enable_radix_cache"):
        return {}  # it keeps no prefix, and announces nothing at the socket that its settings name
    config = info.get("kv_events_config")
    if isinstance(config, str):
        try:
            config = msgspec.json.decode(config)
        except msgspec.DecodeError:
            return {}
    if not isinstance(config, dict) or config.get("publisher") != "zmq":
        return {}
    # Each rank has a cache of its own. With DP attention 0.5.23 counts them in attn_dp_size, and one replica.
    ranks = (whole(info.get("dp_size")) or 1) * (whole(info.get("attn_dp_size")) or 1)
    endpoint = config.get("endpoint") or "tcp://*:5557"
    reported: CardFields = {
        "ranks": ranks,
        "events": tuple(_event_endpoint(endpoint, url, rank) for rank in range(ranks)),
        "topic": config.get("topic") or "",
    }
    replay = config.get("replay_endpoint")
    if isinstance(replay, str) and replay:
        reported["replay"] = tuple(reachable(replay, url, rank) for rank in range(ranks))
    return reported


def _event_endpoint(endpoint: str, url: str, rank: int) -> str:
    connects = endpoint.startswith("tcp://") and "*" not in endpoint and "::" not in endpoint
    return f"@{_endpoint_of_rank(endpoint, rank)}" if connects else reachable(endpoint, url, rank)


def _endpoint_of_rank(endpoint: str, rank: int) -> str:
    head, colon, port = endpoint.rpartition(":")
    return f"{head}{colon}{int(port) + rank}" if port.isdigit() else endpoint


SGLANG = Dialect(
    name="sglang",
    health="/ready",  # its /health makes a token, and takes a second for it
    probe_fields={"bootstrap_host": FAKE_HOST, "bootstrap_room": 0},
    title="SGLang",
    raw_tool_choice="auto",  # with "none" its template leaves the tools out
    special_tokens_field="skip_special_tokens",
    card=card,
    resume="message",
    continue_fields=(("continue_final_message", True),),
    priority_field="priority",
    priority_needed=True,
    salt_field="cache_salt",
    lora_field="lora_path",
    lora_missing="has never been loaded",
    lora_routes=("/load_lora_adapter", "/unload_lora_adapter"),
    rank_field="data_parallel_rank",
    clear_cache="/flush_cache",
    counters=MetricNames(
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        kv_usage="sglang:token_usage",
        prompt_tokens="sglang:prompt_tokens_total",
        cached_tokens="sglang:cached_tokens_total",
        hits="sglang:cached_tokens_total",
        generation_tokens="sglang:generation_tokens_total",
        first_tokens="sglang:time_to_first_token_seconds_count",
        itl_sum="sglang:inter_token_latency_seconds_sum",
        itl_count="sglang:inter_token_latency_seconds_count",
    ),
)
