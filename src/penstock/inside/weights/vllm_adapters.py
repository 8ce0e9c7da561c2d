"""LoRA adapters of a vLLM engine, by what was loaded: vLLM's block hashes have an adapter's name alone.

A name may stand for other weights later (``load_inplace``, or a file that was replaced before vLLM loaded it again),
and what the tiers keep outlives that. So each request's context is given the identity of its adapter.
"""

from functools import wraps
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading_scheduler
from vllm.v1.engine.core import EngineCore

from penstock.inside.weights.weights_identity import AdapterIdentities

_adapters = AdapterIdentities()


class _Adapter:
    """What a request's context has of its adapter."""

    def __init__(self, identity: str) -> None:
        self.identity = identity


def identity_of(request: Any) -> str:
    """Return the identity of the adapter of one of vLLM's requests; nothing where it has none."""
    adapter = request.lora_request
    return "" if adapter is None else _adapters.of(adapter.lora_int_id, adapter.lora_path)


def adapter_of(context: Any) -> str:
    """Return the identity of the adapter of the request that a context is of; nothing where it has none."""
    adapter = context.get_state(_Adapter)
    return "" if adapter is None else str(adapter.identity)


def watch_adapters() -> None:
    """Follow which adapters this process loads, and have each new request's context know its own."""
    create, add = offloading_scheduler._create_req_context, EngineCore.add_lora
    if hasattr(create, "watched"):
        return

    def create_req_context(request: Any) -> Any:
        context, identity = create(request), identity_of(request)
        if identity:
            context.set_state(_Adapter(identity))
        return context

    @wraps(add)  # vLLM decodes a call by the types of the method's parameters
    def add_lora(core: Any, lora_request: Any) -> Any:
        _adapters.loading(lora_request.lora_int_id, lora_request.lora_path)
        return add(core, lora_request)

    create_req_context.watched = True  # type: ignore[attr-defined]
    offloading_scheduler._create_req_context = create_req_context
    EngineCore.add_lora = add_lora
