"""Which kinds of engines are known, and of which kind is this one?"""

from collections.abc import Mapping
from typing import Any

from penstock.adapters.engines.asking import Server
from penstock.adapters.engines.dialect import Dialect, Told
from penstock.adapters.engines.llamacpp import LLAMACPP
from penstock.adapters.engines.plain import OPENAI
from penstock.adapters.engines.sglang import SGLANG
from penstock.adapters.engines.sim.dialect import SIM
from penstock.adapters.engines.trtllm import TRTLLM
from penstock.adapters.engines.vllm import VLLM

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (SIM, VLLM, SGLANG, TRTLLM, LLAMACPP, OPENAI)}
"""By name, in the order in which a server is tried; the last takes any."""


def dialect_of(engine: str) -> Dialect:
    """Return the dialect of a card's ``engine``; that of a plain OpenAI server where the name is not known."""
    return DIALECTS.get(engine, OPENAI)


async def recognise(server: Server, model: Mapping[str, Any]) -> tuple[Dialect, Told]:
    """Ask a server of which kind it is, and what it tells of itself.

    Args:
        model: its entry in ``/v1/models``. Most engines name themselves there, as the model's owner.
    """
    for dialect in DIALECTS.values():
        told = await dialect.card(server, model)
        if told is not None:
            return dialect, told
    return OPENAI, {}
