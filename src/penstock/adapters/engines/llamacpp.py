"""What does llama.cpp's server do in its own way?

Told: ``/v1/models`` (name), ``/props`` (context of one slot, number of slots). Its native server can't be installed on
the machine that Penstock is developed on: written from its documentation, tested with recorded shapes.

While it loads, every route answers 503 with "Loading model". A prompt's KV lives in the slot that served it last and
has no blocks: its cache is guessed from routing history.
"""

from collections.abc import Mapping
from typing import Any

from penstock.adapters.engines.asking import Server, whole
from penstock.adapters.engines.dialect import Counters, Dialect, Told


async def card(server: Server, model: Mapping[str, Any]) -> Told | None:
    """Read a llama.cpp server."""
    props = await server.object("/props")
    settings = props.get("default_generation_settings")
    if model.get("owned_by") != "llamacpp" and not (isinstance(settings, dict) and "total_slots" in props):
        return None
    told: Told = {
        "max_seqs": whole(props.get("total_slots")),
        "max_len": whole(settings.get("n_ctx")) if isinstance(settings, dict) else None,
    }
    if isinstance(props.get("build_info"), str):
        told["labels"] = {"version": props["build_info"]}
    return told


LLAMACPP = Dialect(
    name="llamacpp",
    title="llama.cpp",
    card=card,
    counters=Counters(
        running="llamacpp:requests_processing",
        waiting="llamacpp:requests_deferred",
        kv_usage="llamacpp:kv_cache_usage_ratio",
        prompt_tokens="llamacpp:prompt_tokens_total",
        generation_tokens="llamacpp:tokens_predicted_total",
        passes="llamacpp:n_decode_total",
    ),
)
