"""KV event codec: decodes the msgpack batches of vLLM and SGLang, and encodes vLLM's present form.

Accepted: every shape that vLLM and SGLang send or have sent (docs/guides/discovery.md lists them).
Sent: vLLM's present one, an array ``[ts, [events], rank]`` of maps tagged by ``type``.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import msgspec

from penstock.kernel.errors import EngineError
from penstock.kernel.hashing import TAG_LORA, TAG_MULTIMODAL, TAG_SALT, extra_bytes, records
from penstock.kernel.values import JsonObject, KvCleared, KvEvent, KvRemoved, KvStored, Tier

MASK = (1 << 64) - 1

MAIN_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Attention that reads all of a prefix; a window's blocks, or states, stand for a part of it."""
STATE_KIND = "mamba"
"""Layers that go on from one state, whose block is the last of a prefix."""

TIER_OF_MEDIUM: dict[str, Tier] = {
    "": "device",
    "GPU": "device",
    "HBM": "device",
    "CPU": "host",
    "STORAGE": "disk",
    "DISK": "disk",
    "FS": "disk",
}
"""Medium, or its first word where an engine has several of a kind (CPU_PINNED, CPU_TIER1) -> tier."""
MEDIUM_OF_TIER: dict[Tier, str] = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}

_STORED, _REMOVED, _CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_REMOVED_FIELDS = ("block_hashes", "medium")


WINDOWS_MAX = 8
"""Different windows of one engine: models have one or two."""


class WireError(EngineError):
    """A KV event message has no known shape; the text says which part and why."""


class WireBatch(NamedTuple):
    """One decoded message. ``ts`` is the engine's wall clock in seconds; ``rank`` is None where it named none."""

    ts: float
    rank: int | None
    events: list[KvEvent]


class KvDecoder:
    """Decode the batches of one publisher, remembering its cache groups: the main one, and those with windows.

    ``dropped`` counts events that are well formed but are not about a prefix held by this worker, by reason:
    ``group`` (like another, or its window is not known), ``remote`` (a shared pool elsewhere), ``medium`` (an unknown
    tier), ``type`` (an event that newer engines send).

    Args:
        cleared: what `AllBlocksCleared` is about: vLLM clears its device's cache and leaves the tiers below it alone.
    """

    def __init__(self, cleared: Tier | None = None) -> None:
        self.dropped: Counter[str] = Counter()
        self._cleared = KvCleared(tier=cleared)
        self._main: int | None = None
        self._windows: dict[int, int] = {}
        """Group -> blocks that its layers read."""

    def restart(self) -> None:
        """Another process publishes: its groups are its own."""
        self._main = None
        self._windows.clear()

    def decode(self, payload: bytes) -> WireBatch:
        """Decode one message.

        Raises:
            WireError: the message is malformed; nothing of it is kept, so that the gap is detected and repaired.
        Cost: see bench/kv_wire.py; budget 1 ms for 64 events of 16 tokens.
        """
        try:
            batch = msgspec.msgpack.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"not msgpack: {error}") from error
        ts, events, rank = _batch_fields(batch)
        out: list[KvEvent] = []
        for event in events:
            decoded = self._event(event)
            if decoded is not None:
                out.append(decoded)
        return WireBatch(ts, rank, out)

    def _event(self, event: Any) -> KvEvent | None:
        if isinstance(event, dict):
            fields: JsonObject = event
            tag = event.get("type")
        elif isinstance(event, list) and event:
            tag = event[0]
            fields = _named_event_fields(tag, event)
        else:
            raise WireError(f"an event is {_what(event)}, neither a map nor a tagged array")
        if tag == _STORED:
            return self._stored(fields)
        if tag == _REMOVED:
            return self._removed(fields)
        if tag == _CLEARED:
            return self._cleared
        if not isinstance(tag, str):
            raise WireError(f"unknown event type {tag!r:.60}")
        self.dropped["type"] += 1
        return None

    def _stored(self, fields: JsonObject) -> KvStored | None:
        get = fields.get
        window = 0 if self._is_main(get("group_idx"), get("kv_cache_spec_kind")) else self._window(fields)
        tier = None if window is None else self._tier(fields)
        if window is None or tier is None:
            return None
        hashes = _block_hashes(get("block_hashes"))
        block_size = get("block_size", 0)
        if not _is_count(block_size):
            raise WireError(f"block_size is {_what(block_size)}, not a count of tokens")
        if window:
            return KvStored(hashes=hashes, block_size=block_size, tier=tier, window=window)
        parent = get("parent_block_hash")
        parent = None if parent is None else _hash(parent)
        tokens = _token_ids(get("token_ids"))
        if tokens and len(tokens) != len(hashes) * block_size:
            raise WireError(f"{len(tokens)} token_ids for {len(hashes)} blocks of {block_size}")
        extras = _extras(fields, len(hashes), first=parent is None)
        return KvStored(hashes=hashes, parent=parent, tokens=tokens, block_size=block_size, extras=extras, tier=tier)

    def _removed(self, fields: JsonObject) -> KvRemoved | None:
        window = 0 if self._is_main(fields.get("group_idx"), None) else self._window(fields)
        tier = None if window is None else self._tier(fields)
        if window is None or tier is None:
            return None
        return KvRemoved(hashes=_block_hashes(fields.get("block_hashes")), tier=tier, window=window)

    def _is_main(self, group: Any, kind: Any) -> bool:
        """Return whether a cache group stands for the prefix; a removal names no kind, so stored events define it."""
        if kind is not None and not isinstance(kind, str):
            raise WireError(f"kv_cache_spec_kind is {_what(kind)}, not a name")
        if group is None:
            return kind is None or kind in MAIN_KINDS
        if not _is_count(group):
            raise WireError(f"group_idx is {_what(group)}, not an index")
        if kind is not None:
            if kind in MAIN_KINDS and self._main is None:
                self._main = group
            # Several full-attention groups hold the same prefixes; one of them is enough, and removing a block from
            # one must not race with its presence in another.
            return kind in MAIN_KINDS and bool(group == self._main)
        return group not in self._windows and bool(group == (0 if self._main is None else self._main))

    def _window(self, fields: JsonObject) -> int | None:
        """Return how many blocks the layers of a group that is not the main one read; None, counted, to leave it out.

        Of several groups with the same window one is enough, as of those with full attention.
        """
        group, size = fields.get("group_idx"), fields.get("block_size")
        tokens = 2 if fields.get("kv_cache_spec_kind") == STATE_KIND else fields.get("kv_cache_spec_sliding_window")
        found = self._windows.get(group) if _is_count(group) else None
        if found is None and _is_count(group) and _is_count(size) and _is_count(tokens) and size and tokens:
            window = max(1, -(-(tokens - 1) // size))  # the token itself is one of those that it reads
            if window not in self._windows.values() and len(self._windows) < WINDOWS_MAX:
                found = self._windows[group] = window
        if found is None:
            self.dropped["group"] += 1
        return found

    def _tier(self, fields: JsonObject) -> Tier | None:
        if fields.get("locality") == "REMOTE":
            self.dropped["remote"] += 1
            return None
        medium = fields.get("medium")
        if medium is None:
            return "device"
        if not isinstance(medium, str):
            raise WireError(f"medium is {_what(medium)}, not a name")
        tier = TIER_OF_MEDIUM.get(medium) or TIER_OF_MEDIUM.get(medium.upper().partition("_")[0])
        if tier is None:
            self.dropped["medium"] += 1
        return tier


def encode_batch(ts: float, events: Sequence[KvEvent], rank: int = 0) -> bytes:
    """Encode events for full attention as vLLM sends them today. ``ts``: wall clock, seconds."""
    assert not any(event.window for event in events if not isinstance(event, KvCleared))
    return _encode([ts, [_map(event) for event in events], rank])


_encode = msgspec.msgpack.Encoder().encode


def _map(event: KvEvent) -> JsonObject:
    if isinstance(event, KvCleared):
        return {"type": _CLEARED}
    medium = MEDIUM_OF_TIER[event.tier]
    if isinstance(event, KvRemoved):
        return {"type": _REMOVED, "block_hashes": event.hashes, "medium": medium, "group_idx": 0}
    lora: str | None = None
    keys: list[list[Any] | None] = [None] * len(event.hashes)
    for index, extra in enumerate(event.extras or ()):
        if extra:
            lora, keys[index] = _lora_and_keys(extra)
    return {
        "type": _STORED,
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": event.tokens,
        "block_size": event.block_size,
        "lora_id": None,
        "medium": medium,
        "lora_name": lora,
        "extra_keys": keys,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _lora_and_keys(extra: bytes) -> tuple[str | None, list[Any]]:
    """Take a block's ``extra`` bytes apart into (LoRA name, untagged keys in vLLM's order)."""
    lora: str | None = None
    salt: list[Any] = []
    others: list[Any] = []
    for tag, value in records(extra):
        if tag == TAG_LORA:
            lora = value.decode()
        elif tag == TAG_SALT:
            salt.append(value.decode())
        elif tag == TAG_MULTIMODAL:
            others.append(_media_key(value))
    return lora, [*([lora] if lora else []), *others, *salt]


def _batch_fields(batch: Any) -> tuple[float, list[Any], int | None]:
    if isinstance(batch, list):
        if len(batch) < 2:
            raise WireError(f"the batch has {len(batch)} fields, not [ts, events, rank]")
        ts, events, rank = batch[0], batch[1], batch[2] if len(batch) > 2 else None
    elif isinstance(batch, dict):
        ts, events = batch.get("ts"), batch.get("events")
        rank = batch.get("data_parallel_rank", batch.get("attn_dp_rank"))
    else:
        raise WireError(f"the batch is {_what(batch)}, neither an array nor a map")
    if not isinstance(ts, (int, float)) or isinstance(ts, bool):
        raise WireError(f"the batch's time is {_what(ts)}, not a number")
    if not isinstance(events, list):
        raise WireError(f"the batch's events are {_what(events)}, not an array")
    if rank is not None and not _is_count(rank):
        raise WireError(f"the batch's rank is {_what(rank)}, not an index")
    return float(ts), events, rank


def _named_event_fields(tag: Any, event: list[Any]) -> JsonObject:
    """Give a positional event's fields their names; old engines send fewer, and trailing fields are known by type."""
    known = _STORED_FIELDS if tag == _STORED else _REMOVED_FIELDS
    fields = dict(zip(known, event[1:], strict=False))
    for value in event[1 + len(known) :]:
        if isinstance(value, str) and "kv_cache_spec_kind" not in fields:
            fields["kv_cache_spec_kind"] = value
        elif _is_count(value) and "group_idx" not in fields:
            fields["group_idx"] = value
        elif _is_count(value):
            fields["kv_cache_spec_sliding_window"] = value
    return fields


def _hash(value: Any) -> int:
    if type(value) is int:
        return value & MASK
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    raise WireError(f"a block hash is {_what(value)}, neither an integer nor bytes")


def _block_hashes(values: Any) -> list[int]:
    if not isinstance(values, list):
        raise WireError(f"block_hashes is {_what(values)}, not an array")
    try:
        return [value & MASK for value in values]
    except TypeError:
        return [_hash(value) for value in values]


def _token_ids(values: Any) -> list[int]:
    tokens: list[int]
    if values is None:
        return []
    if not isinstance(values, list):
        raise WireError(f"token_ids is {_what(values)}, not an array")
    if values and isinstance(values[0], list):
        # Speculative decoding in SGLang keys its cache by token pairs; the first of each pair is the token.
        try:
            tokens = [pair[0] for pair in values]
        except (TypeError, IndexError) as error:
            raise WireError("token_ids mixes pairs with something else") from error
    else:
        tokens = values
    try:
        array("I", tokens)  # checks the types and the range of all at once, in C
    except (TypeError, OverflowError) as error:
        raise WireError(f"token_ids holds something that is not a u32: {error}") from error
    return tokens


def _extras(fields: JsonObject, count: int, *, first: bool) -> list[bytes] | None:
    """Return ``extra`` bytes per block, or None where no block has any. ``first``: the blocks begin a chain."""
    lora = fields.get("lora_name")
    if lora is None:
        number = fields.get("lora_id")
        lora = None if number is None else str(number)
    if lora is not None and not isinstance(lora, str):
        raise WireError(f"lora_name is {_what(lora)}, not a name")
    salt = fields.get("cache_salt") if first else None
    if salt is not None and not isinstance(salt, str):
        raise WireError(f"cache_salt is {_what(salt)}, not text")
    keys = fields.get("extra_keys")
    if keys is None or (isinstance(keys, list) and not any(keys)):
        if not lora and not salt:
            return None
        every = extra_bytes(lora=lora)
        return [extra_bytes(lora=lora, salt=salt), *[every] * (count - 1)] if count else []
    if not isinstance(keys, list) or len(keys) != count:
        raise WireError(f"extra_keys is {_what(keys)}, not one entry for each of {count} blocks")
    return [
        _block_extra_bytes(entry, lora, salt if index == 0 else None, first=first and index == 0)
        for index, entry in enumerate(keys)
    ]


def _block_extra_bytes(entry: Any, lora: str | None, salt: str | None, *, first: bool) -> bytes:
    """Sort one block's untagged keys. Order on the wire: LoRA, multimodal, salt (first block of a chain only)."""
    rest = [] if entry is None else entry
    if not isinstance(rest, list):
        raise WireError(f"an entry of extra_keys is {_what(entry)}, not an array")
    if rest and lora and rest[0] == lora:
        rest = rest[1:]
    if first and salt is None and rest and isinstance(rest[-1], str):
        salt, rest = rest[-1], rest[:-1]
    elif salt is not None and rest and rest[-1] == salt:
        rest = rest[:-1]
    return extra_bytes(lora=lora, salt=salt, multimodal=[_media_key_bytes(key) for key in rest])


def _media_key_bytes(key: Any) -> bytes:
    if isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return key.encode()
    return msgspec.msgpack.encode(key)


def _media_key(digest: bytes) -> Any:
    """Return a multimodal record as engines write it: ``[identifier, offset]`` where it is that, else its bytes."""
    try:
        return list(msgspec.msgpack.decode(digest, type=tuple[str, int]))
    except msgspec.MsgspecError:
        return digest


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _what(value: Any) -> str:
    return "absent" if value is None else f"{type(value).__name__} {value!r:.60}"
