"""vLLM model loader: takes weights from a sibling's host memory, through vLLM's public plug-in point for loaders.

``--load-format penstock`` asks the weight process of this machine (`penstock_kv.inside.weights.weight_protocol`). Where
that fails, the files on disk are read, as vLLM's own loader does, and the log says why.
"""

import copy
import logging
import mmap
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from penstock_kv.inside.weights.weight_protocol import (
    LOAD_FORMAT,
    WEIGHTS_ENV,
    WantWeights,
    WeightsHere,
    WeightsRefused,
    ask,
)

log = logging.getLogger("vllm.penstock")

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class SiblingLoader(DefaultModelLoader):  # type: ignore[misc]
    """Load from a sibling where that works, else from the files."""

    def __init__(self, load_config: Any) -> None:
        own = copy.copy(load_config)
        own.load_format = "auto"  # of the files
        super().__init__(own)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor) of the whole checkpoint."""
        socket_path = os.environ.get(WEIGHTS_ENV)
        if socket_path is None:
            reason = f"{WEIGHTS_ENV} is not set"
        elif getattr(model, "secondary_weights", ()):
            reason = "the model reads more than one checkpoint"
        else:
            self.counter_before_loading_weights = time.perf_counter()  # vLLM logs the seconds since then
            try:
                yield from tensors_of(model_config.model, socket_path)
            except WeightsUnavailable as error:
                reason = str(error)
            else:
                return
        log.warning("Weights are read from the files: %s", reason)
        yield from super().get_all_weights(model_config, model)


class WeightsUnavailable(Exception):
    """No sibling has them; nothing was yielded yet."""


def tensors_of(folder: str, socket_path: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) from the memory that the weight process hands over.

    Raises:
        WeightsUnavailable: it hands over nothing, before the first tensor.
    """
    try:
        here, fd = ask(socket_path, WantWeights(folder))
    except (OSError, ValueError) as error:
        raise WeightsUnavailable(f"the weight process at {socket_path} does not answer: {error}") from error
    if isinstance(here, WeightsRefused) or fd is None:
        raise WeightsUnavailable(here.reason if isinstance(here, WeightsRefused) else "no memory came with the answer")
    assert isinstance(here, WeightsHere)
    unknown = {tensor.dtype for tensor in here.tensors if tensor.dtype not in DTYPES}
    if unknown:
        os.close(fd)
        raise WeightsUnavailable(f"tensors have types that this loader does not know: {', '.join(sorted(unknown))}")
    try:
        # Private, because torch wants memory that it could write; nothing does, so that no page is copied.
        memory = mmap.mmap(fd, here.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise WeightsUnavailable(f"the memory can't be mapped: {error}") from error
    finally:
        os.close(fd)
    log.info("Weights came from %s: %.2f GiB in %.2f s", here.sibling, here.size / 2**30, here.seconds)
    for tensor in here.tensors:
        if tensor.length:
            flat = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.length, offset=tensor.offset)
            yield tensor.name, flat.view(DTYPES[tensor.dtype]).view(tensor.shape)
        else:
            yield tensor.name, torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])


def register() -> None:
    """Register the loader; vLLM calls it in each of its processes, possibly more than once."""
    register_model_loader(LOAD_FORMAT)(SiblingLoader)
