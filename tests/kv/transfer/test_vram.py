"""Tensors as regions. A CPU tensor stands in for a GPU's where no GPU is there: the copies run, not the bus."""

import sys

import numpy as np
import pytest

from penstock_kv.transfer import transfer_agent
from penstock_kv.transfer.backends.memcpy_backend import MemcpyBackend
from penstock_kv.transfer.transfer_agent import TransferAgent
from penstock_kv.transfer.transfer_status import TransferRefused, TransferState
from tests.conftest import skip_or_fail

try:
    import torch
except ImportError:
    torch = None


async def test_without_torch_the_refusal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    async with TransferAgent("a", []) as agent:
        with pytest.raises(TransferRefused, match="need torch"):
            agent.register_tensor(np.zeros(4))


async def test_memory_is_pinned_only_for_a_gpu() -> None:
    if torch is None:
        skip_or_fail("torch", "it is not installed")
    buffer = np.zeros(1 << 16, np.uint8)
    async with TransferAgent("a", []) as agent:
        if torch.cuda.is_available():
            region = agent.register_memory(buffer, pinned=True)
            assert torch.from_numpy(buffer).is_pinned()
            agent.deregister(region)
            assert not torch.from_numpy(buffer).is_pinned()
        else:
            with pytest.raises(TransferRefused, match="torch sees none"):
                agent.register_memory(buffer, pinned=True)
            assert not agent.regions


@pytest.mark.parametrize("device", ["cpu", "stand-in", "cuda", "cuda, pinned"])
@pytest.mark.parametrize("direction", ["read", "write"])
async def test_bytes_of_a_tensor_move_both_ways(monkeypatch: pytest.MonkeyPatch, device: str, direction: str) -> None:
    if torch is None:
        skip_or_fail("torch", "it is not installed")
    if "cuda" in device and not torch.cuda.is_available():
        skip_or_fail("gpu", "torch sees no GPU")
    if device == "stand-in":
        monkeypatch.setattr(transfer_agent, "is_on_gpu", lambda tensor: True)
    async with TransferAgent("a", [MemcpyBackend()]) as a, TransferAgent("b", [MemcpyBackend()]) as b:
        kv = torch.arange(4096, dtype=torch.float32, device="cuda" if "cuda" in device else "cpu").reshape(4, 1024)
        tensor = a.register_tensor(kv)
        assert tensor.kind == ("dram" if device == "cpu" else "vram")
        host = b.register_memory(np.full(4096, -1, np.float32), pinned="pinned" in device)
        a.add_remote(b.metadata())
        parts = tensor.blocks([1, 3], 4096), host.blocks([0, 2], 4096)
        handle = a.prepare("read" if direction == "read" else "write", *parts, "b")
        handle.post()
        assert await handle.wait() is TransferState.DONE
        rows, there = kv.cpu().numpy(), host.bytes_of().view(np.float32).reshape(4, 1024)
        assert (rows[1] == there[0]).all() and (rows[3] == there[2]).all()
        assert (there[1] == -1).all() and rows[0, 1] == 1
        with pytest.raises(TransferRefused, match="contiguous"):
            a.register_tensor(kv.T)
