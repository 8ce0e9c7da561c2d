"""Guard tier for vLLM's native tiering: wraps any secondary tier and serves no block that is not what was stored.

vLLM's own tiers take on trust what storage gives them: with some flipped bytes in a file, `fs` of vLLM 0.32 answers
HTTP 200 with wrong text. The guard keeps length, checksum and generation of each block's key in an index of its own;
a block without a record is a miss, and one that does not fit its record is a failed load, which vLLM computes again.

In ``kv_connector_extra_config`` of vLLM's ``OffloadingConnector``::

    "secondary_tiers": [{"type": "GuardedTier", "module_path": "penstock_kv.inside.vllm_guard",
                         "inner": {"type": "fs", "root_dir": "/cache"}}]
"""

import hashlib
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import vllm
from vllm.v1.kv_offload import base as offload_base
from vllm.v1.kv_offload.tiering import base as tiering_base
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from penstock.inside.weights.vllm_adapters import adapter_of, watch_adapters
from penstock.inside.weights.weights_identity import weights_identity
from penstock.kernel.errors import ConfigError
from penstock_kv.inside.block_checksum import ALGORITHM, ALGORITHM_NAMES
from penstock_kv.inside.block_guard import BlockGuard, GuardedJob
from penstock_kv.inside.guard_index import GuardIndex
from penstock_kv.inside.tier_protocol import READ_BACK
from penstock_kv.inside.tier_seam import TierSeam, row_layout

log = logging.getLogger("vllm.penstock")

BRINGERS = ("p2p", "kvcr")
"""Tiers that bring blocks of other engines, which never passed this guard: each of them would be a miss."""
READBACK_LIMIT = 30.0
"""Seconds that the block of the read-back at start may take to go to the tier, and again to come back."""
READBACK_JOB = -1
"""vLLM counts its jobs from 0 on."""
REFRESH = 1.0
"""Seconds between looks at what engines that share the tier have recorded."""

STORED = "penstock_guard_stored_blocks"
SERVED = "penstock_guard_served_blocks"
REFUSED = "penstock_guard_refused_blocks"
READBACK = "penstock_guard_readback_ok"


class _GuardedMove(NamedTuple):
    """A job that the inner tier has. ``generations``: of a load."""

    keys: list[bytes]
    rows: list[int]
    generations: list[int] | None


class GuardedTier(SecondaryTierManager):  # type: ignore[misc]
    """A secondary tier around another one.

    Args:
        inner: configuration of the tier to guard, as it would stand in ``secondary_tiers`` by itself.
        index_dir: folder of the index; ``root_dir`` of the inner tier where it is not given.
        readback: store a block at start and load it again. A tier that fails this is not used.
        revision: of the model, where its name is one of a hub and the cache there has several.
    Raises:
        ConfigError: the inner tier can't be guarded, or vLLM's seam is another one.
        OSError: the index can't be opened.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        inner: Mapping[str, Any],
        index_dir: str | None = None,
        readback: bool = True,
        revision: str = "",
        locality: str | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._seam = TierSeam(offload_base, tiering_base, vllm.__version__)
        if inner.get("type") in BRINGERS:
            raise ConfigError(
                f"secondary tier {inner['type']!r} brings blocks that this engine did not store, so none has a record",
                hint="put it beside the guard, as a tier of its own",
            )
        folder = index_dir or inner.get("root_dir")
        if not folder:
            raise ConfigError(
                f"the guard of tier {inner.get('type')!r} has no folder for its index",
                hint='give the guard "index_dir": a folder on a disk that survives as long as the tier',
            )
        placed = {"locality": locality} if locality else {}
        self._inner = SecondaryTierFactory.create_secondary_tier({**inner, **placed}, primary_kv_view, offloading_spec)
        self.medium = self._inner.medium
        self.locality = self._inner.locality
        if hasattr(self._inner, "cache_hit_source"):
            self.cache_hit_source = self._inner.cache_hit_source
        self._flat = primary_kv_view.cast("B")
        watch_adapters()
        kind = (
            f"{row_layout(offloading_spec, self.block_size_bytes)}-"
            f"{weights_identity(offloading_spec.config.model.name, revision)}"
        )
        self._index = GuardIndex(Path(folder) / f"penstock-guard-{kind}.log")
        self._guard = BlockGuard(self._index, self._row, self._discard)
        self._open: dict[int, _GuardedMove] = {}
        self._results: dict[int, Any] = {}
        """Inner results of jobs that the guard has now."""
        self._ready: list[Any] = []
        self._events: list[Any] = []
        self._announces = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        self._refreshed = time.monotonic()
        self._usable = True
        self._unsaid = True
        """Whether the result of the read-back is not in the statistics yet."""
        if readback:
            self._usable = self._read_back()
        log.info(
            "tier %s is guarded: %s per block, %d blocks known, index %s",
            inner.get("type"),
            ALGORITHM_NAMES[ALGORITHM],
            len(self._index),
            self._index.path,
        )

    # --- what vLLM asks -----------------------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return what the inner tier says of a block that has a record; an adapter's have none (`submit_store`)."""
        if not self._usable or adapter_of(req_context) or self._guard.generation(key) is None:
            return self._seam.miss
        return self._inner.lookup(key, req_context)

    def submit_store(self, job_metadata: Any) -> None:
        """Give blocks to the inner tier, without those that it has.

        The bytes of a block that is computed again may differ in their last bits, and `fs` keeps its old file: a new
        record would not fit it. The inner tier has an adapter's blocks by its name, which may stand for other weights
        later: they are not stored.
        """
        keys, rows = list(job_metadata.keys), self._seam.rows(job_metadata)
        if not self._usable or adapter_of(job_metadata.req_context):
            self._ready.append(self._seam.result(job_metadata.job_id, (), keys))
            return
        fresh = [place for place, key in enumerate(keys) if self._guard.generation(key) is None]
        if not fresh:
            self._ready.append(self._seam.result(job_metadata.job_id, keys, ()))
            return
        self._open[job_metadata.job_id] = _GuardedMove(
            [keys[place] for place in fresh], [rows[place] for place in fresh], None
        )
        self._inner.submit_store(job_metadata if len(fresh) == len(keys) else self._seam.part(job_metadata, fresh))

    def submit_load(self, job_metadata: Any) -> None:
        """Have the inner tier write rows."""
        keys = list(job_metadata.keys)
        # A record that is gone since the look-up is generation -1, which no load proves.
        generations = [-1 if found is None else found for found in map(self._guard.generation, keys)]
        self._open[job_metadata.job_id] = _GuardedMove(keys, self._seam.rows(job_metadata), generations)
        self._inner.submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return jobs that the inner tier ended and the guard has recorded or proven."""
        self._take_from_inner()
        for result in self._guard.finished():
            inner = self._results.pop(result.job)
            opened = self._open.pop(result.job)
            right = set(result.right)
            lost = [key for key in opened.keys if key not in right]
            if result.load:
                self._announce(lost, removed=True)
            else:
                self._announce(result.right, removed=False)
            self._ready.append(self._seam.result(result.job, result.right, lost, inner))
        ready, self._ready = self._ready, []
        return ready

    def drain_jobs(self) -> None:
        """Wait until nothing of any job touches the rows; the results come with the next `get_finished_jobs`."""
        self._inner.drain_jobs()
        self._take_from_inner()
        self._guard.wait_idle()

    def has_pending_work(self) -> bool:
        """Return whether the engine has to go on stepping for the inner tier."""
        return bool(self._inner.has_pending_work())

    def take_events(self) -> Iterable[Any]:
        """Yield blocks stored and removed. What the inner tier says of stores counts only once it is recorded."""
        for event in self._inner.take_events():
            if event.removed:
                self._guard.forget(event.keys)
                self._events.append(event)
        events, self._events = self._events, []
        return events

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Pass on that blocks are used."""
        self._inner.touch(keys, req_context)

    def on_new_request(self, req_context: Any) -> Any:
        """Pass on; the inner tier says how it wants the request's blocks."""
        return self._inner.on_new_request(req_context)

    def on_request_finished(self, req_context: Any) -> None:
        """Pass on."""
        self._inner.on_request_finished(req_context)

    def serve_external_requests(self, parent: Any) -> None:
        """Pass on."""
        self._inner.serve_external_requests(parent)

    def on_schedule_end(self, context: Any) -> None:
        """Pass on, and read at times what other engines recorded."""
        self._inner.on_schedule_end(context)
        if time.monotonic() - self._refreshed > REFRESH:
            self._refreshed = time.monotonic()
            self._guard.refresh()

    def shutdown(self) -> None:
        """End the inner tier, then the guard."""
        self._inner.shutdown()
        self._guard.close()
        self._flat.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inner tier's metrics and ours."""
        counter, gauge = offload_base.OffloadingCounterMetadata, offload_base.OffloadingGaugeMetadata
        inner = SecondaryTierFactory.get_tier_class(extra_config["inner"])
        return {
            **inner.build_metric_definitions(extra_config["inner"]),
            STORED: counter(documentation="KV blocks that the guarded tier stored and the guard recorded."),
            SERVED: counter(documentation="KV blocks that the guarded tier gave back as they were stored."),
            REFUSED: counter(
                documentation="KV blocks that the guard refused, by reason; they are computed again.",
                labelnames=("reason",),
            ),
            READBACK: gauge(documentation="1 where the guarded tier gave the block of the start back, 0 where not."),
        }

    def get_stats(self) -> Any:
        """Return the observations since the last call."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

        stats = OffloadingConnectorStats()
        for name, blocks in self._guard.take_counts().items():
            if blocks and name in ("stored", "served"):
                stats.increase_counter(STORED if name == "stored" else SERVED, blocks)
            elif blocks:
                stats.increase_counter(REFUSED, blocks, (name,))
        if self._unsaid:
            self._unsaid = False
            stats.set_gauge(READBACK, int(self._usable))
        inner = self._inner.get_stats()
        if inner is not None:
            stats.aggregate(inner)
        return stats

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _row(self, row: int) -> memoryview:
        return self._flat[row * self.block_size_bytes : (row + 1) * self.block_size_bytes]

    def _discard(self, key: bytes) -> None:
        """Remove a block's file; tiers without files overwrite."""
        mapper = getattr(self._inner, "file_mapper", None)
        if mapper is not None:
            Path(mapper.get_file_name(key)).unlink(missing_ok=True)

    def _take_from_inner(self) -> None:
        for result in self._inner.get_finished_jobs():
            opened = self._open.get(result.job_id)
            if opened is None:  # one that it began itself, for another engine
                self._ready.append(result)
                continue
            right = set(self._seam.right_keys(result, opened.keys))
            places = [place for place, key in enumerate(opened.keys) if key in right]
            keys = [opened.keys[place] for place in places]
            rows = [opened.rows[place] for place in places]
            self._results[result.job_id] = result
            if opened.generations is None:
                self._guard.stored(GuardedJob(result.job_id, keys, rows))
            else:
                if len(right) < len(opened.keys):
                    self._guard.forget([key for key in opened.keys if key not in right])
                generations = [opened.generations[place] for place in places]
                self._guard.loaded(GuardedJob(result.job_id, keys, rows, generations))

    def _announce(self, keys: list[bytes], *, removed: bool) -> None:
        if keys and self._announces and self.medium is not None:
            event = offload_base.OffloadingEvent(keys=keys, medium=self.medium, removed=removed)
            event.locality = self.locality
            self._events.append(event)

    def _read_back(self) -> bool:
        """Store a block and load it again, through all of the path that requests take. No request runs yet."""
        key = offload_base.make_offload_key(READ_BACK, 0)
        pattern = hashlib.shake_128(b"penstock read-back").digest(self.block_size_bytes)
        row, context = self._row(0), offload_base.ReqContext(req_id="penstock-read-back")
        problem = ""
        try:
            row[:] = pattern
            self._guard.forget([key])
            self._discard(key)
            self.on_new_request(context)
            self.submit_store(self._seam.job(READBACK_JOB, key, 0, load=False, context=context))
            if not self._ended(READBACK_JOB):
                problem = "it did not store a block"
            elif not self._offers(key, context):
                problem = "it does not know the block that it has just stored"
            else:
                row[:] = bytes(len(row))
                self.submit_load(self._seam.job(READBACK_JOB - 1, key, 0, load=True, context=context))
                if not self._ended(READBACK_JOB - 1) or row != pattern:
                    problem = "it did not give back the block that it has just stored"
            self.on_request_finished(context)
        except OSError as error:
            problem = str(error)
        if self._open:
            log.warning("tier %s still moves the block of the read-back: the start waits for it", self.tier_type)
            self.drain_jobs()  # nothing may write row 0 once vLLM uses it
            self.get_finished_jobs()
        row[:] = bytes(len(row))
        self._guard.take_counts()
        self._events.clear()
        if problem:
            log.error("the guarded tier is not used: %s", problem)
        return not problem

    def _ended(self, job: int) -> bool:
        end = time.monotonic() + READBACK_LIMIT
        while time.monotonic() < end:
            for result in self.get_finished_jobs():
                if result.job_id == job:
                    return bool(result.success)
            time.sleep(0.005)
        return False

    def _offers(self, key: bytes, context: Any) -> bool:
        end = time.monotonic() + READBACK_LIMIT
        step = offload_base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        while time.monotonic() < end:
            answer = self.lookup(key, context)
            if answer != self._seam.retry:
                return bool(answer == self._seam.hit)
            self.on_schedule_end(step)
            time.sleep(0.005)
        return False
