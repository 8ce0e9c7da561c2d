"""Simulated engine's dialect: vLLM's HTTP dialect, with Penstock's own block hashes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from penstock.adapters.engines.dialects.dialect import CardFields
from penstock.adapters.engines.dialects.scale_out_routes import token_routes
from penstock.adapters.engines.dialects.vllm import VLLM, adapter_slots, cache_card, cache_labels, event_card
from penstock.adapters.engines.http.engine_http import EngineServer


async def card(server: EngineServer, model: Mapping[str, Any]) -> CardFields | None:
    """Read a simulated engine."""
    if model.get("owned_by") != "penstock":
        return None
    metrics = await server.text("/metrics")
    labels = cache_labels(metrics)
    if labels is None:
        return None  # a Penstock frontend, which has other engines behind it
    reported = {**cache_card(labels), "adapter_slots": adapter_slots(metrics), **await event_card(server)}
    routes = await token_routes(server)
    return {**reported, "labels": routes} if routes else reported


SIM = dataclasses.replace(VLLM, name="sim", title="the simulated engine", card=card, clear_is_late=False)
