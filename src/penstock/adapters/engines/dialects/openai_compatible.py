"""OpenAI-compatible dialect: the least that all servers share, for a server that does not name its kind."""

from collections.abc import Mapping
from typing import Any

from penstock.adapters.engines.dialects.dialect import CardFields, Dialect
from penstock.adapters.engines.http.engine_http import EngineServer, whole


async def card(server: EngineServer, model: Mapping[str, Any]) -> CardFields | None:
    """Read what an entry of ``/v1/models`` may hold beside the name."""
    meta = model.get("meta")
    return {
        "max_model_len": whole(model.get("context_length"))
        or (whole(meta.get("n_ctx")) if isinstance(meta, dict) else None)
    }


OPENAI = Dialect(
    name="openai",
    title="an OpenAI-compatible server",
    card=card,
    clear_cache="/reset_prefix_cache",  # many of them are vLLM behind a proxy
)
