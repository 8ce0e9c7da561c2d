"""Dialect registry: the known kinds of engines, and the recognition of a server's kind."""

from collections.abc import Mapping
from typing import Any

from penstock.adapters.engines.dialects.dialect import CardFields, Dialect
from penstock.adapters.engines.dialects.llamacpp import LLAMACPP
from penstock.adapters.engines.dialects.openai_compatible import OPENAI
from penstock.adapters.engines.dialects.sglang import SGLANG
from penstock.adapters.engines.dialects.simulated import SIM
from penstock.adapters.engines.dialects.trtllm import TRTLLM
from penstock.adapters.engines.dialects.vllm import VLLM
from penstock.adapters.engines.http.engine_http import EngineServer

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (SIM, TRTLLM, VLLM, SGLANG, LLAMACPP, OPENAI)}
"""By name, in the order in which a server is tried; the last takes any. TensorRT-LLM comes before those that are known
by their ``/metrics``: it forgets what it tells there."""


def dialect_of(engine: str) -> Dialect:
    """Return the dialect of a card's ``engine``; that of a plain OpenAI server where the name is not known."""
    return DIALECTS.get(engine, OPENAI)


async def recognise(server: EngineServer, model: Mapping[str, Any]) -> tuple[Dialect, CardFields]:
    """Find a server's kind, and read the card fields that it reports.

    Args:
        model: its entry in ``/v1/models``. Most engines name themselves there, as the model's owner.
    """
    for dialect in DIALECTS.values():
        reported = await dialect.card(server, model)
        if reported is not None:
            return dialect, reported
    return OPENAI, {}
