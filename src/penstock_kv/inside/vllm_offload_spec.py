"""Offloading spec for vLLM: its own multi-tier spec, which also runs on a CPU-only vLLM and leaves no region behind.

On CUDA and XPU the worker is vLLM's own. On a CPU, where vLLM 0.32 has none, ours copies between the KV cache and
the region. vLLM leaves its region in /dev/shm when it is told to end; a region of this spec is removed by the next
engine that starts.
"""

import time
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from penstock.kernel.errors import ConfigError
from penstock_kv.inside.staging_region import SHARED, lock_region, remove_leftovers
from penstock_kv.inside.tier_seam import TierResidency

OURS = "penstock-"
"""Begins the name of our regions, so that nobody else's is ever removed."""


class PenstockOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's `TieringOffloadingSpec` with a worker for CPUs."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._engine_id: str = f"{OURS}{config.engine_id}"
        self._worker: Any = None
        self._lock = -1

    def get_manager(self) -> Any:
        """Return vLLM's tiering manager; the region is locked for as long as this process lives."""
        remove_leftovers(f"vllm_offload_{OURS}*.mmap")
        manager = super().get_manager()
        if self._lock < 0:
            self._lock = lock_region(SHARED / f"vllm_offload_{self._engine_id}.mmap")
            merge_removals(manager)
        return manager

    def get_worker(self, kv_caches: Any) -> Any:
        """Return the worker that copies between KV cache and region."""
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            return super().get_worker(kv_caches)
        if not self._worker:
            if self.config.canonical_layout:
                raise ConfigError(
                    "canonical_layout: the CPU worker copies blocks as they lie", hint="leave it out on a CPU"
                )
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuCopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


def merge_removals(manager: Any) -> None:
    """Have a manager announce a block as removed once no tier of that medium has it."""
    residency, take_events, reset_cache = TierResidency(), manager.take_events, manager.reset_cache

    def reset() -> None:
        reset_cache()
        residency.cleared()

    manager.take_events = lambda: residency.merge(take_events())
    manager.reset_cache = reset


class CpuCopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, in the call: between two places of the same memory there is nothing to overlap with."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._cache = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        self._rows = [region.create_next_worker_view(t.page_size_bytes * blocks_per_chunk) for t in kv_caches.tensors]
        self._refs = kv_caches.group_data_refs
        self._ended: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks into rows."""
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy rows into blocks."""
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[Any]:
        """Return the results since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Wait for nothing: jobs end in their call."""

    def shutdown(self) -> None:
        """Unmap the region."""
        self._cache, self._rows = [], []
        self._region.cleanup()

    def _copy(self, job: int, blocks: Any, rows: Any, *, store: bool) -> bool:
        began, moved = time.perf_counter(), 0
        block_ids, row_ids = blocks.block_ids.tolist(), rows.block_ids.tolist()
        first_block = first_row = 0
        for group, (size, start) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            if not size:
                continue
            skip = start % self._blocks_per_chunk  # blocks of the first row before the job's first one
            for number in range(size):
                place = number + skip
                row = row_ids[first_row + place // self._blocks_per_chunk]
                for ref in self._refs[group]:
                    cache, region = self._cache[ref.tensor_idx], self._rows[ref.tensor_idx]
                    page = cache.shape[1]
                    at = place % self._blocks_per_chunk * page
                    here, there = cache[block_ids[first_block + number]], region[row, at : at + page]
                    (there if store else here).copy_(here if store else there)
                    moved += page
            first_block += size
            first_row += -(-(size + skip) // self._blocks_per_chunk)
        self._ended.append(TransferResult(job, True, moved, time.perf_counter() - began))
        return True
