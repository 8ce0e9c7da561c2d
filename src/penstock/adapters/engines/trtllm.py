"""What does ``trtllm-serve`` (TensorRT-LLM) do in its own way?

Told: ``/v1/models`` (name), ``/version``. It can't run on the machine that Penstock is developed on: written from its
source, tested with recorded shapes.

``/metrics`` and ``/kv_cache_events`` hand each entry to the first who asks and forget it, so that two routers, or a
router and a dashboard, would each see half. They are left alone: its cache is guessed from routing history.
"""

from collections.abc import Mapping
from typing import Any

from penstock.adapters.engines.asking import Server
from penstock.adapters.engines.dialect import Dialect, Told


async def card(server: Server, model: Mapping[str, Any]) -> Told | None:
    """Read a TensorRT-LLM server."""
    if model.get("owned_by") != "tensorrt_llm":
        return None
    version = (await server.object("/version")).get("version")
    return {"labels": {"version": version}} if isinstance(version, str) else {}


TRTLLM = Dialect(
    name="trtllm",
    title="TensorRT-LLM",
    card=card,
    gave_up=frozenset({"cancelled"}),
    salt_field="cache_salt",
)
