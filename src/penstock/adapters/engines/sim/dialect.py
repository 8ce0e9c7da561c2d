"""What does the simulated engine do in its own way? It speaks vLLM's dialect; its hashes are ours."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from penstock.adapters.engines.asking import Server
from penstock.adapters.engines.dialect import Told
from penstock.adapters.engines.vllm import VLLM, cache_card, cache_labels, event_card


async def card(server: Server, model: Mapping[str, Any]) -> Told | None:
    """Read a simulated engine."""
    if model.get("owned_by") != "penstock":
        return None
    labels = cache_labels(await server.text("/metrics"))
    if labels is None:
        return None  # a frontend of ours, behind which other engines are
    return {**cache_card(labels), **await event_card(server)}


SIM = dataclasses.replace(VLLM, name="sim", title="the simulated engine", card=card, clear_is_late=False)
