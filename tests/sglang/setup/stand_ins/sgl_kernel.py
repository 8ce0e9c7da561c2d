"""What does SGLang need of its kernel package on a CPU without AMX? Names at its imports, one operator, plain memory.

Everything else of that package runs on no path of the tests; whatever calls it fails, and says what it called.
"""

from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.0"


def assign_req_to_token_pool_cpu(rows: Any, table: Any, starts: Any, ends: Any, slots: Any, width: int) -> None:
    """Write the KV slots of a batch's new tokens into the table of requests, in place.

    Args:
        rows: (B,) row of each request in ``table``.
        table: (requests, ``width``) slot of each token of each request.
        starts, ends: (B,) first new token of each request, and the one behind its last.
        slots: the slots of all new tokens, request after request.
    """
    sizes = (ends - starts).tolist()
    for row, start, end, part in zip(rows.tolist(), starts.tolist(), ends.tolist(), slots.split(sizes), strict=True):
        table[row, start:end] = part.to(table.dtype)


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*arguments: object, **named: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in: see {__file__}")

    return absent


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *arguments, pin_memory=False, **named: make(*arguments, **named)


if not torch.accelerator.is_available():
    # SGLang pins what its LoRA layers pass on, whatever the device, and torch then wants one to pin it for.
    torch.tensor, torch.zeros, torch.empty = map(_unpinned, (torch.tensor, torch.zeros, torch.empty))
    torch.Tensor.pin_memory = lambda self, device=None: self
