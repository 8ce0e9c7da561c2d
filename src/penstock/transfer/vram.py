"""VRAM through torch, which is imported when the first tensor comes; written without a GPU, and not run on a GPU."""

import importlib
from typing import Any

from penstock.transfer.transfer_status import TransferRefused, TransferStatus


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise TransferRefused(
            TransferStatus.NOT_SUPPORTED, "regions of tensors need torch", hint="pip install torch"
        ) from error


def tensor_bytes(tensor: Any) -> Any:
    """Return the bytes of a contiguous tensor as a one-dimensional uint8 tensor that shares its memory."""
    torch = _torch()
    if not tensor.is_contiguous():
        raise TransferRefused(TransferStatus.INVALID, "the tensor is not contiguous", hint="register its storage")
    return tensor.detach().reshape(-1).view(torch.uint8)


def is_on_gpu(tensor: Any) -> bool:
    """Tell whether a tensor's memory is a device's."""
    return bool(tensor.device.type != "cpu")


def as_tensor(array: Any) -> Any:
    """Return host bytes as a tensor of the same memory."""
    return _torch().from_numpy(array)


def synchronise() -> None:
    """Wait until copies between host and device have ended."""
    torch = _torch()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
