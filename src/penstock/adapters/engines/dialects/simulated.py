"""Simulated engine's dialect: vLLM's HTTP dialect, with Penstock's own block hashes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from penstock.adapters.engines.dialects.dialect import CardFields
from penstock.adapters.engines.dialects.vllm import VLLM, cache_card, cache_labels, event_card
from penstock.adapters.engines.http.engine_http import EngineServer


async def card(server: EngineServer, model: Mapping[str, Any]) -> CardFields | None:
    """Read a simulated engine."""
    if model.get("owned_by") != "penstock":
        return None
    labels = cache_labels(await server.text("/metrics"))
    if labels is None:
        return None  # a Penstock frontend, which has other engines behind it
    return {**cache_card(labels), **await event_card(server)}


SIM = dataclasses.replace(VLLM, name="sim", title="the simulated engine", card=card, clear_is_late=False)
