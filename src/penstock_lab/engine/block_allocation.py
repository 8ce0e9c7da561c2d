"""Block allocation of the simulated engine: blocks that requests take and name, and the KV events about them."""

from collections.abc import Sequence
from typing import Any, Protocol

from penstock.kernel.hashing import block_extras, local_hashes
from penstock.kernel.hashing import chain as chained
from penstock.kernel.machine import Nanos, Snapshot
from penstock.kernel.values import BlockHash, KvEvent, KvRemoved, KvStored
from penstock_lab.engine.engine_request import EngineRequest
from penstock_lab.engine.events import KvChanged
from penstock_lab.engine.settings import SimSettings
from penstock_lab.runs.block_runs import Chain, Stretches


class KvCache(Protocol):
    """What `BlockCache` and `RunCache` have in common; each takes prompts in its own form."""

    blocks: int
    free: int
    private: int

    @staticmethod
    def chain(names: Sequence[int]) -> Sequence[int]:
        """Return the names of a prompt's blocks in the form that this takes."""
        ...

    @property
    def available(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def cached(self) -> int: ...
    def depth(self, chain: Any, limit: int) -> int: ...
    def referenced_depth(self, chain: Any, limit: int) -> int: ...
    def hold(self, chain: Any, start: int, end: int) -> None: ...
    def take(self, count: int) -> Sequence[int] | None: ...
    def name(self, chain: Any, start: int, end: int) -> int: ...
    def release(self, chain: Any, named: int, private: int) -> None: ...
    def drop_idle(self) -> Sequence[int] | None: ...
    def snapshot(self) -> Snapshot: ...
    def restore(self, state: Snapshot) -> None: ...
    def check(self, holders: dict[int, int], private: int) -> None: ...


class BlockAllocation:
    """The block cache as the scheduler uses it; what changes is kept until `take_changes`.

    Args:
        cache: empty.
    """

    def __init__(self, settings: SimSettings, cache: KvCache) -> None:
        self.cache = cache
        self.notify = True
        """Whether there is a listener for what changes."""
        self.changes: list[KvEvent] = []
        self.fresh: list[tuple[EngineRequest, int, int]] | None = None
        """(request, from, to): blocks named since the tiers had them offered; None where there are no tiers."""
        self.decoded = settings.emit_decode_blocks and settings.enable_prefix_caching
        """Whether blocks of generated tokens are named."""
        self._settings = settings

    def take_changes(self, at: Nanos) -> KvChanged:
        """Return what has changed since the last call."""
        events, self.changes = self.changes, []
        return KvChanged(at=at, events=events)

    def take(self, count: int) -> None:
        """Take private blocks, evicting where none is free; there must be enough."""
        evicted = self.cache.take(count)
        if self.notify and evicted:
            self._removed(evicted)

    def name(self, request: EngineRequest, blocks: int) -> None:
        """Name a request's private blocks up to ``blocks``, as far as their hashes are known."""
        chain = request.chain  # empty where nothing is named
        start, end = request.named, len(chain)
        if blocks < end:
            end = blocks
        if end <= start:
            return
        known = self.cache.name(chain, start, end)
        request.named = end
        request.private -= end - start
        start += known
        if start == end:
            return
        if self.fresh is not None:
            self.fresh.append((request, start, end))
        if not self.notify:
            return
        size, submit = self._settings.block_size, request.submit
        self.changes.append(
            KvStored(
                hashes=Stretches(chain.cut(start, end)) if isinstance(chain, Chain) else list(chain[start:end]),
                parent=chain[start - 1] if start else None,
                tokens=self._tokens(request, start * size, end * size) if submit.tokens is not None else [],
                block_size=size,
                extras=block_extras(start, end, size, submit.lora, submit.salt, submit.media),
            )
        )

    def extend_chain(self, request: EngineRequest, blocks: int) -> None:
        """Let a request's chain reach over its generated tokens, where they are to be named."""
        chain = request.chain
        if not self.decoded or request.submit.tokens is None or len(chain) >= blocks or not isinstance(chain, list):
            return
        size, start = self._settings.block_size, len(chain)
        tokens = self._tokens(request, start * size, blocks * size)
        submit = request.submit
        extras = block_extras(start, blocks, size, submit.lora, submit.salt, submit.media)
        local = local_hashes(tokens, size, extras)
        chain.extend(chained(local, BlockHash(chain[-1]) if chain else None))

    def _removed(self, names: Sequence[int]) -> None:
        changes = self.changes
        if changes and isinstance(changes[-1], KvRemoved) and isinstance(changes[-1].hashes, list):
            changes[-1].hashes.extend(names)
        else:
            changes.append(KvRemoved(hashes=names))

    def _tokens(self, request: EngineRequest, start: int, end: int) -> list[int]:
        prompt = request.submit.tokens
        assert prompt is not None
        if end <= request.prompt:
            return list(prompt[start:end])
        made = request.answer.upto(end - request.prompt)
        return [*prompt[start : request.prompt], *made[max(0, start - request.prompt) :]]
