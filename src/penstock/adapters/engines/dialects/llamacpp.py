"""llama.cpp dialect: recognises its native server and its Python server, and reads their cards.

There are two servers. The native one, ``llama-server``, has ``/v1/models`` (name) and ``/props`` (context of one
slot, number of slots); while it loads, every route answers 503 with "Loading model". It can't be installed on the
machine that Penstock is developed on: written from its documentation, tested with recorded shapes. The server of the
Python package (``python -m llama_cpp.server``) has neither ``/props`` nor ``/metrics``, serves one request at a time,
and answers 400 to an ``x-request-id`` that is no UUID: `make test-llamacpp` runs it.

A prompt's KV lives in the slot that served it last and has no blocks: its cache is estimated from routing history.
"""

from collections.abc import Mapping
from typing import Any

from penstock.adapters.engines.dialects.dialect import CardFields, Dialect, MetricNames
from penstock.adapters.engines.http.engine_http import EngineServer, whole


async def card(server: EngineServer, model: Mapping[str, Any]) -> CardFields | None:
    """Read a llama.cpp server."""
    props = await server.object("/props")
    settings = props.get("default_generation_settings")
    if model.get("owned_by") != "llamacpp" and not (isinstance(settings, dict) and "total_slots" in props):
        return None
    reported: CardFields = {
        "max_num_seqs": whole(props.get("total_slots")),
        "max_model_len": whole(settings.get("n_ctx")) if isinstance(settings, dict) else None,
    }
    if isinstance(props.get("build_info"), str):
        reported["labels"] = {"version": props["build_info"]}
    return reported


LLAMACPP = Dialect(
    name="llamacpp",
    title="llama.cpp",
    card=card,
    request_ids=False,
    counters=MetricNames(
        running="llamacpp:requests_processing",
        waiting="llamacpp:requests_deferred",
        kv_usage="llamacpp:kv_cache_usage_ratio",
        prompt_tokens="llamacpp:prompt_tokens_total",
        generation_tokens="llamacpp:tokens_predicted_total",
        passes="llamacpp:n_decode_total",
    ),
)
