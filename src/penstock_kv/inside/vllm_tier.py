"""Secondary tier for vLLM's native tiering: a thin client of the tier process, which has all tiers below vLLM's own.

In ``kv_connector_extra_config`` of vLLM's ``OffloadingConnector``::

    "secondary_tiers": [{"type": "PenstockTier", "module_path": "penstock_kv.inside.vllm_tier", "socket": "/run/tiers"}]

The tier process maps vLLM's own region in /dev/shm. It checks every block before it writes it there, so what it says
is done is what was stored. While it is not there, everything is a miss.
"""

import hashlib
import itertools
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import vllm
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.kv_offload import base as offload_base
from vllm.v1.kv_offload.tiering import base as tiering_base
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from penstock.inside.weights.vllm_adapters import adapter_of, watch_adapters
from penstock.inside.weights.weights_identity import weights_identity
from penstock.kernel.pass_report import STATS_ENV
from penstock.kernel.tiers.load_worth import LOAD_METRICS, LoadCosts, metrics_of
from penstock_kv.inside.request_hints import TierParams, tier_params
from penstock_kv.inside.tier_client import TierClient, TiersLost
from penstock_kv.inside.tier_lookups import GROUP_BYTES, TierLookups, by_group, chain_runs, group_of
from penstock_kv.inside.tier_protocol import (
    READ_BACK,
    AnswerBlocks,
    JobDone,
    PrefetchBlocks,
    RemovedBlocks,
    StoredBlocks,
    TierHello,
    UsedBlocks,
)
from penstock_kv.inside.tier_seam import TierSeam, row_layout

log = logging.getLogger("vllm.penstock")

HASH_BYTES = 32
"""Of a block hash that can name stored KV; vLLM's other hashes are shorter and not cryptographic."""
START_LIMIT = 3.0
"""Seconds that the start waits for a tier process, to prove the way there and back."""

STORED, SERVED = "penstock_tier_stored_blocks", "penstock_tier_served_blocks"
FAILED = "penstock_tier_failed_blocks"
CONNECTED = "penstock_tier_connected"


class _TierMove:
    """A job of vLLM's. It may be several of ours; ``left`` counts those that are open."""

    def __init__(self, job: int, keys: list[bytes], *, load: bool) -> None:
        self.job = job
        self.keys = keys
        self.load = load
        self.left = 0
        self.right: list[bytes] = []
        self.began = time.monotonic()


class PenstockTier(SecondaryTierManager):  # type: ignore[misc]
    """The tiers of a tier process.

    Args:
        socket: path of its unix socket.
        hash_algorithm: vLLM's ``--prefix-caching-hash-algo``.
        worker: name of this engine.
        revision: of the model, where its name is one of a hub and the cache there has several.
    Raises:
        ConfigError: vLLM's seam is another one.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        socket: str,
        hash_algorithm: str = "sha256_cbor",
        worker: str = "",
        revision: str = "",
        locality: str | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._seam = TierSeam(offload_base, tiering_base, vllm.__version__)
        config = offloading_spec.config
        watch_adapters()
        self._strides = {each.group_id: each.tokens_per_block * config.cache.blocks_per_chunk for each in config.groups}
        """Tokens of a row, by attention group: sliding windows and states have blocks of their own in it."""
        self._flat = primary_kv_view.cast("B")
        self._client = TierClient(
            socket,
            TierHello(
                worker=worker,
                model=config.model.name,
                dtype=config.model.dtype,
                layout=row_layout(offloading_spec, self.block_size_bytes),
                weights=weights_identity(config.model.name, revision),
                block_tokens=min(self._strides.values()),
                hash_algorithm=hash_algorithm,
                region=offloading_spec._scheduler_mmap.mmap_path,
                rows=len(primary_kv_view),
                row_bytes=self.block_size_bytes,
                stats=_stats_endpoint(),
            ),
        )
        self._lookups = TierLookups()
        self._params: dict[str, TierParams] = {}
        self._chains: dict[tuple[str, int], dict[int, bytes]] = {}
        """Blocks of a request and a group, by the tokens up to their ends."""
        self._numbers = itertools.count(1)
        self._moves: dict[int, tuple[_TierMove, list[bytes]]] = {}
        self._ready: list[Any] = []
        self._events: list[Any] = []
        self._announced: dict[str, set[bytes]] = {}
        """Tier -> its blocks, as the routers know them."""
        self._announces = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        self._counts = {STORED: 0, SERVED: 0}
        self._failures = {"store": 0, "load": 0}
        self._costs: LoadCosts | None = None
        self._usable = self._read_back()

    # --- what vLLM asks -----------------------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return what the tier process answered; the first look-up of a key asks it at the end of the step."""
        request = req_context.req_id
        if not self._usable or len(key) != HASH_BYTES + GROUP_BYTES:
            return self._seam.miss
        verdict = self._lookups.lookup(request, key, self._note(key, req_context))
        if verdict is None:
            return self._seam.retry if self._client.connected else self._seam.miss
        return self._seam.hit if verdict else self._seam.miss

    def submit_store(self, job_metadata: Any) -> None:
        """Offer blocks."""
        keys, rows, context = list(job_metadata.keys), self._seam.rows(job_metadata), job_metadata.req_context
        ends = [self._note(key, context) for key in keys]
        move = _TierMove(job_metadata.job_id, keys, load=False)
        for group, members in by_group(keys) if self._usable else ():
            chain = self._chains.get((context.req_id, group), {})
            some = [keys[place] for place in members]
            for run in chain_runs(some, [ends[place] for place in members], chain, self._strides[group]):
                hashes = [some[place][:-GROUP_BYTES] for place in run.places]
                taken, number = [rows[members[place]] for place in run.places], next(self._numbers)
                if self._client.store(number, hashes, taken, group, run.parent, self._hints(context).hints):
                    self._moves[number] = (move, [some[place] for place in run.places])
                    move.left += 1
        if not move.left:
            self._end(move)

    def submit_load(self, job_metadata: Any) -> None:
        """Want blocks."""
        keys, rows, context = list(job_metadata.keys), self._seam.rows(job_metadata), job_metadata.req_context
        move = _TierMove(job_metadata.job_id, keys, load=True)
        for group, members in by_group(keys):
            hashes, number = [keys[place][:-GROUP_BYTES] for place in members], next(self._numbers)
            if self._client.load(number, hashes, [rows[place] for place in members], group, self._hints(context).hints):
                self._moves[number] = (move, [keys[place] for place in members])
                move.left += 1
        if not move.left:
            self._end(move)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the jobs that are over, and take all else that came."""
        for message in self._client.poll():
            if isinstance(message, JobDone):
                move, keys = self._moves.pop(message.job)
                move.right += [key for key, done in zip(keys, message.done, strict=True) if done]
                move.left -= 1
                if not move.left:
                    self._end(move)
            elif isinstance(message, AnswerBlocks):
                self._lookups.answered(message.id, message.blocks)
                self._costs = message.costs or self._costs
            elif isinstance(message, StoredBlocks | RemovedBlocks):
                self._announce(message)
            elif isinstance(message, TiersLost):
                self._withdraw()
        ready, self._ready = self._ready, []
        return ready

    def drain_jobs(self) -> None:
        """Wait until the tier process touches no row; the results come with the next `get_finished_jobs`."""
        self._client.wait_idle()

    def has_pending_work(self) -> bool:
        """Return whether answers are missing or wait to be taken."""
        return self._client.busy or bool(self._ready)

    def take_events(self) -> Iterable[Any]:
        """Return blocks that tiers have stored and lost."""
        events, self._events = self._events, []
        return events

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Tell that blocks are used."""
        for key in keys:
            self._note(key, req_context)
        listed = list(keys)
        for group, members in by_group(listed):
            hashes = [listed[place][:-GROUP_BYTES] for place in members]
            self._client.tell(UsedBlocks(hashes=hashes, group=group, hints=self._hints(req_context).hints))

    def on_new_request(self, req_context: Any) -> Any:
        """Read the request's hints."""
        self._params[req_context.req_id] = tier_params(req_context.kv_transfer_params, adapter_of(req_context))
        return offload_base.RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget the request; where its hints say so, have its blocks brought up."""
        params = self._params.pop(req_context.req_id, None)
        self._lookups.end(req_context.req_id)
        for group in self._strides:
            chain = self._chains.pop((req_context.req_id, group), {})
            if params is not None and params.prefetch and chain:
                hashes = [chain[end] for end in sorted(chain)]
                self._client.tell(PrefetchBlocks(hashes=hashes, group=group, hints=params.hints, after=params.after))

    def on_schedule_end(self, context: Any) -> None:
        """Ask what the step's look-ups want to know."""
        for question in self._lookups.due():
            hashes, group = [key[:-GROUP_BYTES] for key in question.keys], group_of(question.keys[0])
            before = 0 if question.window else max(0, (question.position or 0) - self._strides[group])
            hints = self._params.get(question.request, TierParams()).hints
            number = self._client.ask(hashes, group, before, hints)
            if number is None:
                self._lookups.settle(question, 0)
            else:
                self._lookups.sent(number, question)

    def shutdown(self) -> None:
        """End the connection, once the tier process touches no row."""
        self._client.close()
        self._flat.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return our metrics."""
        counter = offload_base.OffloadingCounterMetadata
        return {
            STORED: counter(documentation="KV blocks that the tier process took."),
            SERVED: counter(documentation="KV blocks that the tier process gave back."),
            FAILED: counter(
                documentation="KV blocks that the tier process did not take or give, by direction.",
                labelnames=("direction",),
            ),
            CONNECTED: offload_base.OffloadingGaugeMetadata(documentation="1 while a tier process is connected."),
            **{
                name: offload_base.OffloadingGaugeMetadata(documentation="Costs of loads, for routers.")
                for name in LOAD_METRICS.values()
            },
        }

    def get_stats(self) -> Any:
        """Return the observations since the last call."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

        stats = OffloadingConnectorStats()
        for name, blocks in self._counts.items():
            if blocks:
                stats.increase_counter(name, blocks)
        for direction, blocks in self._failures.items():
            if blocks:
                stats.increase_counter(FAILED, blocks, (direction,))
        self._counts = dict.fromkeys(self._counts, 0)
        self._failures = dict.fromkeys(self._failures, 0)
        stats.set_gauge(CONNECTED, int(self._client.connected))
        if self._costs is not None:
            # vLLM loads from its own host memory without asking us.
            for name, value in metrics_of(msgspec.structs.replace(self._costs, own_host=True)).items():
                stats.set_gauge(name, value)
        return stats

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _hints(self, context: Any) -> TierParams:
        return self._params.get(context.req_id) or tier_params(context.kv_transfer_params, adapter_of(context))

    def _note(self, key: bytes, context: Any) -> int | None:
        """Note where a key stands in its prompt: the tiers and the router keep blocks as chains."""
        position = getattr(context, "get_offload_key_position", None)
        end: int | None = None if position is None else position(key)
        if end is not None and context.req_id in self._params:
            self._chains.setdefault((context.req_id, group_of(key)), {})[end] = key[:-GROUP_BYTES]
        return end

    def _end(self, move: _TierMove) -> None:
        right = set(move.right)
        wrong = [key for key in move.keys if key not in right]
        if move.load:
            self._lookups.missed(wrong)
        self._counts[SERVED if move.load else STORED] += len(right)
        self._failures["load" if move.load else "store"] += len(wrong)
        self._ready.append(self._seam.result(move.job, move.right, wrong))

    def _announce(self, message: StoredBlocks | RemovedBlocks) -> None:
        if not self._announces:
            return
        keys = [offload_base.make_offload_key(value, message.group) for value in message.hashes]
        there = self._announced.setdefault(message.tier, set())
        removed = isinstance(message, RemovedBlocks)
        (there.difference_update if removed else there.update)(keys)
        self._tell_routers(message.tier, keys, removed=removed)

    def _withdraw(self) -> None:
        """Announce all blocks as removed: a new connection tells anew what is there."""
        for tier, keys in self._announced.items():
            if keys:
                self._tell_routers(tier, list(keys), removed=True)
        self._announced.clear()

    def _tell_routers(self, tier: str, keys: list[bytes], *, removed: bool) -> None:
        medium = offload_base.Medium.CPU if tier == "host" else offload_base.Medium.STORAGE
        event = offload_base.OffloadingEvent(keys=keys, medium=medium, removed=removed)
        if hasattr(event, "ownership"):
            event.ownership = f"penstock-{tier}"
        self._events.append(event)

    def _read_back(self) -> bool:
        """Store a block and load it again where a tier process is there. No request runs yet, so row 0 is free."""
        end = time.monotonic() + START_LIMIT
        while not self._client.connected:
            if time.monotonic() > end:
                log.warning("no tier process yet: all blocks are misses until there is one")
                return True
            time.sleep(0.01)
        row = self._flat[: self.block_size_bytes]
        pattern = hashlib.shake_128(b"penstock read-back").digest(self.block_size_bytes)
        row[:] = pattern
        stored = self._client.store(next(self._numbers), [READ_BACK], [0]) and self._done()
        row[:] = bytes(len(row))
        loaded = stored and self._client.load(next(self._numbers), [READ_BACK], [0]) and self._done()
        right = not loaded or row == pattern
        row[:] = bytes(len(row))
        if not right:
            log.error("the tier process gave back another block than the one stored: it is not used")
        elif not loaded:
            log.warning("the tier process did not %s the block of the read-back", "give back" if stored else "take")
        return right

    def _done(self) -> bool:
        self._client.wait_idle()
        return any(isinstance(message, JobDone) and all(message.done) for message in self._client.poll())


def _stats_endpoint() -> str:
    """Return where our statistics plug-in publishes passes; nothing where vLLM does not time them.

    In one process with the engine core, vLLM's CPU executor has run a pass before vLLM looks at its clock.
    """
    if current_platform.is_cpu() and not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return ""
    return os.environ.get(STATS_ENV, "")
