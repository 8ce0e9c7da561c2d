"""What does a server of the OpenAI dialect do that says nothing of its kind? The least that all of them have."""

from collections.abc import Mapping
from typing import Any

from penstock.adapters.engines.asking import Server, whole
from penstock.adapters.engines.dialect import Dialect, Told


async def card(server: Server, model: Mapping[str, Any]) -> Told | None:
    """Read what a listing may hold beside the name."""
    meta = model.get("meta")
    return {
        "max_len": whole(model.get("context_length")) or (whole(meta.get("n_ctx")) if isinstance(meta, dict) else None)
    }


OPENAI = Dialect(
    name="openai",
    title="an OpenAI-compatible server",
    card=card,
    gave_up=frozenset({"abort"}),
    clear_cache="/reset_prefix_cache",  # many of them are vLLM behind something
)
