"""TensorRT-LLM dialect (``trtllm-serve``): recognises a server and reads its card.

Read: ``/v1/models`` (name), ``/version``. It can't run on the machine that Penstock is developed on: written from its
source, and held to its own types by ``tests/adapters/test_trtllm_schema.py``. It refuses a request with any field that
it does not know, and a chat with both ``max_tokens`` and ``max_completion_tokens``, which are one field there.

``/metrics`` and ``/kv_cache_events`` hand each entry to the first reader and forget it, so that two routers, or a
router and a dashboard, would each get half. Penstock does not read them: the cache is estimated from routing history.
"""

from collections.abc import Mapping
from typing import Any

from penstock.adapters.engines.dialects.dialect import GAVE_UP, CardFields, Dialect
from penstock.adapters.engines.http.engine_http import EngineServer


async def card(server: EngineServer, model: Mapping[str, Any]) -> CardFields | None:
    """Read a TensorRT-LLM server."""
    if model.get("owned_by") != "tensorrt_llm":
        return None
    version = (await server.object("/version")).get("version")
    return {"labels": {"version": version}} if isinstance(version, str) else {}


TRTLLM = Dialect(
    name="trtllm",
    title="TensorRT-LLM",
    card=card,
    gave_up=GAVE_UP | {"cancelled", "timeout"},
    salt_field="cache_salt",
    salts_chats_only=True,
    special_tokens_field="skip_special_tokens",
)
