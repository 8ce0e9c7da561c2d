"""SGLang dialect: recognises an SGLang server, reads its card and finds its KV event endpoints.

Read: ``/v1/models`` (name, longest request), ``/get_server_info`` (its whole start-up settings; ``/server_info`` in
newer ones). It can't run on the machine that Penstock is developed on: written from its documentation and source,
tested with recorded shapes.

It caches by pages, whose size is 1 token by default. It reports cached tokens only with ``--enable-cache-report``.
Its start-up settings hold its KV event endpoint; a rank's port is the first one's plus its number. An endpoint
without a star makes SGLang's socket connect, so we must bind.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.adapters.engines.dialects.dialect import CardFields, Dialect, MetricNames
from penstock.adapters.engines.dialects.vllm import reachable
from penstock.adapters.engines.http.engine_http import EngineServer, folder, whole


async def card(server: EngineServer, model: Mapping[str, Any]) -> CardFields | None:
    """Read an SGLang server."""
    info = await server.object("/get_server_info") or await server.object("/server_info")
    if model.get("owned_by") != "sglang" and "page_size" not in info:
        return None
    page = whole(info.get("page_size"))
    tokens = whole(info.get("max_total_num_tokens"))
    reported: CardFields = {
        "block_size": page,
        "kv_blocks": tokens // page if tokens is not None and page is not None else None,
        "max_num_seqs": whole(info.get("max_running_requests")),
        "max_num_batched_tokens": whole(info.get("chunked_prefill_size")),
        "max_model_len": whole(info.get("context_length")) or whole(info.get("max_req_input_len")),
        "tokenizer": folder(info.get("tokenizer_path")),
    }
    if isinstance(info.get("version"), str):
        reported["labels"] = {"version": info["version"]}
    return {**reported, **event_card(info, server.url)}


def event_card(info: Mapping[str, Any], url: str) -> CardFields:
    """Return where its KV events are, from its start-up settings; nothing where they are off."""
    config = info.get("kv_events_config")
    if isinstance(config, str):
        try:
            config = msgspec.json.decode(config)
        except msgspec.DecodeError:
            return {}
    if not isinstance(config, dict) or config.get("publisher") != "zmq":
        return {}
    ranks = whole(info.get("dp_size")) or 1  # with DP attention or without: each has a cache of its own
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
    return f"@{_plain(endpoint, rank)}" if connects else reachable(endpoint, url, rank)


def _plain(endpoint: str, rank: int) -> str:
    head, colon, port = endpoint.rpartition(":")
    return f"{head}{colon}{int(port) + rank}" if port.isdigit() else endpoint


SGLANG = Dialect(
    name="sglang",
    title="SGLang",
    raw_tool_choice="auto",  # with "none" its template leaves the tools out
    special_tokens_field="skip_special_tokens",
    card=card,
    resume="message",
    continue_fields=(("continue_final_message", True),),
    priority_field="priority",
    salt_field="cache_salt",
    lora_field="lora_path",
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
