"""VRAM through torch, which is imported when the first tensor comes, and host memory that is page-locked for GPUs."""

import importlib
from collections.abc import Iterable
from typing import Any

from penstock_kv.transfer.transfer_status import TransferRefused, TransferStatus


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


def synchronise(devices: Iterable[Any]) -> None:
    """Wait until the copies that these devices have been given are made; a device of the host has none."""
    for device in devices:
        if device.type != "cpu":
            _torch().cuda.synchronize(device)


def pin(array: Any) -> None:
    """Page-lock host memory, so that a GPU reads and writes it at the speed of its bus, beside other work.

    Raises:
        TransferRefused: NOT_SUPPORTED: there is no GPU; BACKEND: CUDA can't lock so much.
    """
    torch = _torch()
    if not torch.cuda.is_available():
        raise TransferRefused(
            TransferStatus.NOT_SUPPORTED, "memory is pinned for a GPU, and torch sees none", hint="leave pinned out"
        )
    code = torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0)
    if int(code):
        raise TransferRefused(
            TransferStatus.BACKEND,
            f"CUDA can't pin {array.nbytes:,} bytes at {array.ctypes.data:#x}: {code}",
            hint="raise the limit of locked memory (ulimit -l), or pin memory once only",
        )


def unpin(array: Any) -> None:
    """Unlock memory that `pin` locked."""
    torch = _torch()
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(array.ctypes.data)))
