"""Which blocks do requests take and name, and what is told of it?"""

from collections.abc import Sequence
from typing import Any, Protocol

from penstock.engine.cache import BlockCache
from penstock.engine.events import KvChanged
from penstock.engine.request import Request
from penstock.engine.run_cache import RunCache
from penstock.engine.settings import SimSettings
from penstock.kernel.hashing import chain as chained
from penstock.kernel.hashing import extra_bytes, local_hashes
from penstock.kernel.machine import Nanos
from penstock.kernel.runs import Chain, Stretches
from penstock.kernel.values import BlockHash, KvEvent, KvRemoved, KvStored


class Cache(Protocol):
    """What `BlockCache` and `RunCache` have in common; each takes chains of its own kind."""

    blocks: int
    free: int
    private: int

    @property
    def available(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def cached(self) -> int: ...
    def depth(self, chain: Any, limit: int) -> int: ...
    def held_depth(self, chain: Any, limit: int) -> int: ...
    def hold(self, chain: Any, start: int, end: int) -> None: ...
    def take(self, count: int) -> Sequence[int] | None: ...
    def name(self, chain: Any, start: int, end: int) -> int: ...
    def release(self, chain: Any, named: int, private: int) -> None: ...
    def drop_idle(self) -> Sequence[int] | None: ...
    def snapshot(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...
    def check(self, holders: dict[int, int], private: int) -> None: ...


class Holdings:
    """The block cache as the scheduler uses it; what changes is kept until `told`.

    Args:
        runs: prompts come as `Chain`s.
    """

    def __init__(self, settings: SimSettings, runs: bool = False) -> None:
        self.cache: Cache = RunCache(settings.kv_blocks) if runs else BlockCache(settings.kv_blocks)
        self.tells = True
        """Whether anybody listens to what changes."""
        self.changes: list[KvEvent] = []
        self.decoded = settings.emit_decode_blocks and settings.prefix_caching
        """Whether blocks of generated tokens are named."""
        self._settings = settings

    def told(self, at: Nanos) -> KvChanged:
        """Return what has changed since the last call."""
        events, self.changes = self.changes, []
        return KvChanged(at=at, events=events)

    def take(self, count: int) -> None:
        """Take private blocks, evicting where none is free; there must be enough."""
        evicted = self.cache.take(count)
        if evicted and self.tells:
            self._removed(evicted)

    def name(self, request: Request, blocks: int) -> None:
        """Name a request's private blocks up to ``blocks``, as far as their hashes are known."""
        start, end = request.named, min(blocks, len(request.chain))
        if not self._settings.prefix_caching or end <= start:
            return
        known = self.cache.name(request.chain, start, end)
        request.named = end
        request.private -= end - start
        start += known
        if start == end or not self.tells:
            return
        size, submit, chain = self._settings.block_size, request.submit, request.chain
        self.changes.append(
            KvStored(
                hashes=Stretches(chain.cut(start, end)) if isinstance(chain, Chain) else list(chain[start:end]),
                parent=chain[start - 1] if start else None,
                tokens=self._tokens(request, start * size, end * size) if submit.tokens is not None else [],
                block_size=size,
                extras=_extras(submit.lora, submit.salt, start, end),
            )
        )

    def extend_chain(self, request: Request, blocks: int) -> None:
        """Let a request's chain reach over its generated tokens, where they are to be named."""
        chain = request.chain
        if not self.decoded or request.submit.tokens is None or len(chain) >= blocks or not isinstance(chain, list):
            return
        size, start = self._settings.block_size, len(chain)
        tokens = self._tokens(request, start * size, blocks * size)
        extras = _extras(request.submit.lora, request.submit.salt, start, blocks)
        local = local_hashes(tokens, size, extras)
        chain.extend(chained(local, BlockHash(chain[-1]) if chain else None))

    def _removed(self, names: Sequence[int]) -> None:
        changes = self.changes
        if changes and isinstance(changes[-1], KvRemoved) and isinstance(changes[-1].hashes, list):
            changes[-1].hashes.extend(names)
        else:
            changes.append(KvRemoved(hashes=names))

    def _tokens(self, request: Request, start: int, end: int) -> list[int]:
        prompt = request.submit.tokens
        assert prompt is not None
        if end <= request.prompt:
            return list(prompt[start:end])
        made = request.answer.upto(end - request.prompt)
        return [*prompt[start : request.prompt], *made[max(0, start - request.prompt) :]]


def _extras(lora: str | None, salt: str | None, start: int, end: int) -> list[bytes] | None:
    if not lora and not salt:
        return None
    every = extra_bytes(lora=lora)
    first = extra_bytes(lora=lora, salt=salt)
    return [first if block == 0 else every for block in range(start, end)]
