"""KV connector for vLLM that keeps blocks in the tiers of a tier process; loaded by module path, without a fork.

    --kv-transfer-config '{"kv_connector": "PenstockConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "penstock_kv.inside.vllm_connector",
      "kv_connector_extra_config": {"socket": "/run/tiers", "staging_bytes": 1073741824}}'

Blocks go through a staging region of its own in /dev/shm: the scheduler's part asks the tier process and has blocks
loaded into rows of it before vLLM hears of them; the worker's part copies between rows and KV cache, within a step.
vLLM's native tiering (`penstock_kv.inside.vllm_tier`) is the other way to the same tiers, for engines of several GPUs.
"""

import hashlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base as connector_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from penstock.inside.weights.vllm_adapters import identity_of, watch_adapters
from penstock.inside.weights.weights_identity import weights_identity
from penstock.kernel.errors import ConfigError
from penstock_kv.inside.request_hints import TierParams, tier_params
from penstock_kv.inside.restored_blocks import restored_blocks
from penstock_kv.inside.staging_ledger import RowCopy, StagingLedger
from penstock_kv.inside.staging_region import PAGE, SHARED, StagingRegion, remove_leftovers
from penstock_kv.inside.tier_client import TierClient
from penstock_kv.inside.tier_protocol import SPEED_PERIOD, SPEED_TOKENS, PrefetchBlocks, PrefillSpeed, TierHello

log = logging.getLogger("vllm.penstock")

CRYPTOGRAPHIC = ("sha256", "sha256_cbor")
UNIT = torch.int32
"""Blocks are copied as whole numbers of four bytes, whatever the type of the cache."""
PACKED = 64 << 20
"""Bytes of an engine's memory that copies take for a moment. On an H100, 1 GiB in blocks of 2 MiB and 32 layers takes
27 ms (40 GB/s) this way, and some 350 ms block by block and layer by layer."""
STAGING = 256 << 20
"""Bytes of the staging region where ``staging_bytes`` does not say: 256 blocks of 1 MiB."""


@dataclass
class StepCopies(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker has to copy in a step."""

    step: int
    region: str
    rows: int
    row_bytes: int
    loads: list[RowCopy] = field(default_factory=list)
    saves: list[RowCopy] = field(default_factory=list)


@dataclass
class StepsCopied(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Steps whose copies are made."""

    steps: set[int]

    def aggregate(self, other: "StepsCopied") -> "StepsCopied":
        """Return what both say."""
        return StepsCopied(self.steps & other.steps)


class _Progress:
    """A request that runs: its blocks, and how many of them have been offered."""

    def __init__(self, request: Any, params: TierParams) -> None:
        self.request = request
        self.params = params
        self.blocks: list[int] = []
        self.offered: int | None = None


class PenstockConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both parts of the connector, by role.

    Raises:
        ConfigError: the model, its parallelism or its block hash is not one that this connector takes.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._stride: int = vllm_config.cache_config.block_size
        self._check(vllm_config, kv_cache_config)
        (group,) = kv_cache_config.kv_cache_groups
        self._block_bytes: int = group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        self._region: StagingRegion | None = None
        # worker
        self._cache: list[torch.Tensor] = []
        self._copied: set[int] = set()
        self._restored = restored_blocks()
        # scheduler
        self._running: dict[str, _Progress] = {}
        self._computed: dict[str, int] = {}
        self._loads: list[RowCopy] = []
        self._steps: dict[int, tuple[float, int, int]] = {}
        """Step -> when it was scheduled, its prompt tokens, all its tokens."""
        self._speed = float("inf")
        self._reported = time.monotonic()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._reports_speed = bool(extra.get("report_speed", True))
        if role is connector_base.KVConnectorRole.SCHEDULER:
            watch_adapters()
            self._start_scheduler(vllm_config, group)

    # --- worker -------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV cache, block by block."""
        blocks = self._kv_cache_config.num_blocks
        for name, tensor in kv_caches.items():
            axis = next((axis for axis in range(min(2, tensor.dim())) if tensor.shape[axis] == blocks), None)
            if axis is None:
                raise ConfigError(
                    f"the KV cache of {name} has the shape {tuple(tensor.shape)}, without {blocks} blocks"
                )
            self._cache.append(tensor.view(UNIT).movedim(axis, 0))
        bytes_found = sum(tensor[0].numel() * tensor.element_size() for tensor in self._cache)
        if bytes_found != self._block_bytes:
            raise ConfigError(f"a block has {bytes_found} bytes in the KV cache, and {self._block_bytes} in its config")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy rows into blocks, before the forward pass."""
        copies: StepCopies = self._get_connector_metadata()
        self._copy(copies, copies.loads, save=False)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing: `start_load_kv` has copied all layers."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Save nothing yet: `wait_for_save` copies all layers."""

    def wait_for_save(self) -> None:
        """Copy blocks into rows, after the forward pass."""
        copies: StepCopies = self._get_connector_metadata()
        self._copy(copies, copies.saves, save=True)
        if (copies.loads or copies.saves) and self._cache[0].is_cuda:
            torch.cuda.current_stream().synchronize()  # rows that are said to be copied may be used again
        self._copied.add(copies.step)

    def build_connector_worker_meta(self) -> StepsCopied | None:
        """Return the steps whose copies are made since the last call."""
        copied, self._copied = self._copied, set()
        return StepsCopied(copied) if copied else None

    # --- scheduler ----------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens that lie in rows; None until the tier process has answered and loaded."""
        computed = num_computed_tokens // self._stride
        limit = (request.num_tokens - 1) // self._stride  # the last token is always computed: it gives the next one
        params = self._params(request)
        blocks = self._ledger.matched(request.request_id, request.block_hashes, computed, limit, params)
        if blocks is None:
            return None, False
        self._computed[request.request_id] = computed
        return blocks * self._stride, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note which blocks the rows go into."""
        name = request.request_id
        computed = self._computed.pop(name, 0)
        count = num_external_tokens // self._stride
        allocated = list(blocks.get_block_ids()[0])[computed : computed + count] if count else []
        self._loads += self._ledger.take(name, computed, allocated)
        self._running[name] = _Progress(request, self._params(request))

    def build_connector_meta(self, scheduler_output: Any) -> StepCopies:
        """Return the step's copies: what was taken from rows, and the blocks that are full after it."""
        saves: list[RowCopy] = []
        scheduled, prompt = scheduler_output.num_scheduled_tokens, 0
        for new in scheduler_output.scheduled_new_reqs:
            progress = self._running[new.req_id]
            progress.blocks = list(new.block_ids[0])
            saves += self._offer(progress, new.num_computed_tokens, scheduled[new.req_id])
            prompt += scheduled[new.req_id]
        cached = scheduler_output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            progress = self._running[name]
            if name in cached.resumed_req_ids:
                progress.blocks = []
            progress.blocks += list(blocks[0]) if blocks else []
            saves += self._offer(progress, computed, scheduled[name])
            prompt += scheduled[name] if scheduled[name] > 1 else 0
        step = self._ledger.begin_step()
        self._steps[step] = (time.monotonic(), prompt, sum(scheduled.values()))
        loads, self._loads = self._loads, []
        region = self._region
        assert region is not None
        return StepCopies(step, str(region.path), region.rows, region.row_bytes, loads, saves)

    def update_connector_output(self, connector_output: Any) -> None:
        """Give rows back, and blocks to the tier process, of steps that the worker has copied."""
        copied = connector_output.kv_connector_worker_meta
        for step in sorted(copied.steps) if copied is not None else ():
            self._ledger.end_step(step)
            self._measure(*self._steps.pop(step))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; where its hints say so, have its blocks brought up."""
        name = request.request_id
        self._running.pop(name, None)
        self._computed.pop(name, None)
        self._ledger.finished(name)
        params = self._params(request)
        if params.prefetch and request.block_hashes:
            self._client.tell(PrefetchBlocks(hashes=list(request.block_hashes), hints=params.hints, after=params.after))
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`: there is one group."""
        return self.request_finished(request, block_ids[0])

    def shutdown(self) -> None:
        """End the connection, then the region."""
        client = getattr(self, "_client", None)
        if client is not None:
            client.close()
        if self._region is not None:
            self._region.close()

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _check(self, config: Any, kv_cache_config: Any) -> None:
        groups, workers = len(kv_cache_config.kv_cache_groups), config.parallel_config.world_size
        if groups != 1 or workers != 1:
            raise ConfigError(
                f"PenstockConnector takes one attention group on one worker, and here are {groups} on {workers}",
                hint="use vLLM's native tiering with PenstockTier, which takes several workers and groups",
            )
        algorithm = config.cache_config.prefix_caching_hash_algo
        if algorithm not in CRYPTOGRAPHIC:
            raise ConfigError(
                f"prefix caching hash {algorithm!r} can't name stored KV: it is not cryptographic",
                hint="start vLLM with --prefix-caching-hash-algo sha256_cbor",
            )
        if not hasattr(connector_base.KVConnectorBase_V1, "build_connector_worker_meta"):
            raise ConfigError(
                f"vLLM {vllm.__version__} has another connector interface than the one known here",
                hint="use vLLM 0.32",
            )

    def _start_scheduler(self, config: Any, group: Any) -> None:
        extra = config.kv_transfer_config.kv_connector_extra_config
        if not extra.get("socket"):
            raise ConfigError(
                "PenstockConnector has no socket",
                hint='give kv_connector_extra_config a "socket": the path at which `penstock cache serve` listens',
            )
        row_bytes = -(-self._block_bytes // PAGE) * PAGE
        rows = int(extra.get("staging_bytes", STAGING)) // row_bytes
        if rows < 2:
            raise ConfigError(f"staging_bytes: there is no room for two blocks of {row_bytes} bytes")
        remove_leftovers("penstock-connector-*.rows")
        path = SHARED / f"penstock-connector-{config.kv_transfer_config.engine_id}.rows"
        self._region = StagingRegion(path, rows, row_bytes, create=True)
        cache = config.cache_config
        layout = (
            repr(group.kv_cache_spec),
            list(group.layer_names),
            getattr(cache, "kv_cache_layout", None),
            row_bytes,
        )
        dtype = config.model_config.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
        self._client = TierClient(
            extra["socket"],
            TierHello(
                worker=extra.get("worker", ""),
                model=config.model_config.model,
                dtype=str(dtype).removeprefix("torch."),
                layout=hashlib.sha256(repr(layout).encode()).hexdigest()[:12],
                weights=weights_identity(config.model_config.model, config.model_config.revision or ""),
                block_tokens=self._stride,
                hash_algorithm=cache.prefix_caching_hash_algo,
                region=str(path),
                rows=rows,
                row_bytes=row_bytes,
            ),
        )
        self._ledger = StagingLedger(self._client, rows, self._stride)

    def _params(self, request: Any) -> TierParams:
        running = self._running.get(request.request_id)
        return tier_params(request.kv_transfer_params, identity_of(request)) if running is None else running.params

    def _offer(self, progress: _Progress, computed: int, scheduled: int) -> list[RowCopy]:
        if progress.offered is None:
            progress.offered = computed // self._stride
        hashes = progress.request.block_hashes
        first, full = progress.offered, min((computed + scheduled) // self._stride, len(hashes), len(progress.blocks))
        if full <= first:
            return []
        progress.offered = full
        parent = hashes[first - 1] if first else None
        return self._ledger.offer(hashes[first:full], progress.blocks[first:full], parent, progress.params)

    def _measure(self, began: float, prompt: int, tokens: int) -> None:
        """Report the least seconds per prompt token: loading has to beat the engine at its best."""
        now = time.monotonic()
        if not self._reports_speed:
            return
        if prompt >= SPEED_TOKENS and prompt > tokens // 2:
            self._speed = min(self._speed, (now - began) / tokens)
        if self._speed < float("inf") and now - self._reported > SPEED_PERIOD:
            self._reported = now
            self._client.tell(PrefillSpeed(seconds_per_token=self._speed))

    def _copy(self, copies: StepCopies, wanted: list[RowCopy], *, save: bool) -> None:
        if wanted and self._region is None:
            self._region = StagingRegion(Path(copies.region), copies.rows, copies.row_bytes)
            if self._cache[0].is_cuda:
                _pin(self._region)
        stride = max(1, PACKED // self._block_bytes)
        for first in range(0, len(wanted), stride):
            self._copy_packed(wanted[first : first + stride], save=save)

    def _copy_packed(self, wanted: list[RowCopy], *, save: bool) -> None:
        """Copy by way of one tensor that has the blocks as rows have them: a call per layer, and one per block."""
        assert self._region is not None
        device = self._cache[0].device
        blocks = torch.tensor([copy.block for copy in wanted]).to(device, non_blocking=True)
        units = self._block_bytes // UNIT.itemsize
        rows = [torch.frombuffer(self._region.row(copy.row), dtype=UNIT, count=units) for copy in wanted]
        packed = torch.empty((len(wanted), units), dtype=UNIT, device=device)
        if not save:
            for place, row in zip(packed, rows, strict=True):
                place.copy_(row, non_blocking=True)
        at = 0
        for tensor in self._cache:
            size = tensor[0].numel()
            part = packed[:, at : at + size]
            if save:
                part.copy_(tensor.index_select(0, blocks).view(len(wanted), size))
            else:
                tensor.index_copy_(0, blocks, part.reshape(len(wanted), *tensor.shape[1:]))
            at += size
        if save:
            for place, row in zip(packed, rows, strict=True):
                row.copy_(place, non_blocking=True)
        if self._restored is not None:
            for copy in wanted:
                data = b"".join(tensor[copy.block].contiguous().cpu().numpy().tobytes() for tensor in self._cache)
                (self._restored.stored if save else self._restored.restored)(copy.hash, memoryview(data))


def _pin(region: StagingRegion) -> None:
    """Page-lock a region, so that a GPU copies at the speed of its bus; without it copies are right, and slow."""
    memory = torch.frombuffer(region.memory, dtype=torch.uint8)
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code):
        log.warning("CUDA can't pin the staging region of %d bytes (%s): copies will be slow", memory.numel(), code)
