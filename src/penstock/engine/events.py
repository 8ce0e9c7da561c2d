"""What does the simulated engine hear, and what does it tell? Its events and effects.

Times are kernel nanoseconds and exact: a milestone names when it happened, which may be before the event that made
the engine look.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.kernel.machine import Effect, Event, Nanos
from penstock.kernel.values import KvEvent, RequestId, StepStats

EndReason = Literal["stop", "length", "abort"]


class Submit(Event, frozen=True, kw_only=True):
    """A request for this engine.

    Give ``tokens``, or ``isl`` and ``blocks`` (chained hashes of the prompt's full blocks, as many as are known): then
    no token need be materialised. ``output`` are tokens to answer with instead of made-up ones; the request ends with
    them. ``variant`` tells several answers to one prompt apart. ``max_tokens`` bounds the output; without
    ``ignore_eos`` it may end by itself, not before ``min_tokens``. ``priority``: lower goes first under priority
    scheduling.

    ``hold``: another engine goes on with this request. It ends with its first token, whatever ``max_tokens`` says, and
    keeps the blocks of its prompt until `Release`. ``remote``: prompt tokens whose KV another engine holds; the driver
    is asked to bring it by `Pull`.
    """

    id: RequestId
    max_tokens: int
    isl: int = 0
    tokens: Sequence[int] | None = None
    blocks: Sequence[int] | None = None
    min_tokens: int = 0
    ignore_eos: bool = True
    priority: int = 0
    salt: str | None = None
    lora: str | None = None
    output: Sequence[int] | None = None
    variant: int = 0
    hold: bool = False
    remote: int = 0


class Abort(Event, frozen=True, kw_only=True):
    """Nobody waits for this request any more; unknown ids are ignored."""

    id: RequestId


class Release(Event, frozen=True, kw_only=True):
    """Nobody needs the blocks any more that this request holds for another engine; unknown ids are ignored."""

    id: RequestId


class Pulled(Event, frozen=True, kw_only=True):
    """The KV that `Pull` asked for is here, or, where not ``ok``, will never be: the engine then computes the prompt.

    Unknown ids are ignored.
    """

    id: RequestId
    ok: bool = True


class ClearCache(Event, frozen=True, kw_only=True):
    """Forget every cached block that no running request holds."""


class Started(Effect, frozen=True, kw_only=True):
    """A request's first pass began. ``cached``: prompt tokens found in the cache."""

    id: RequestId
    at: Nanos
    cached: int


class FirstToken(Effect, frozen=True, kw_only=True):
    """A request's first token came out."""

    id: RequestId
    at: Nanos


class Finished(Effect, frozen=True, kw_only=True):
    """A request ended with ``tokens`` of output; ``started`` and ``first`` are None where it did not come so far.

    Tokens: ``prompt`` of which ``cached`` were not computed at its first admission. ``pulled`` came
    from another engine. ``held``: blocks that it keeps for another engine until `Release`.
    """

    id: RequestId
    at: Nanos
    reason: EndReason
    tokens: int
    prompt: int
    cached: int
    arrived: Nanos
    started: Nanos | None
    first: Nanos | None
    preemptions: int = 0
    pulled: int = 0
    held: int = 0


class Pull(Effect, frozen=True, kw_only=True):
    """Blocks are reserved: bring the KV of ``tokens`` tokens of this request's prompt, then answer with `Pulled`."""

    id: RequestId
    at: Nanos
    tokens: int


class Rejected(Effect, frozen=True, kw_only=True):
    """A request can never run here; ``why`` says what is too large."""

    id: RequestId
    at: Nanos
    why: str


class KvChanged(Effect, frozen=True, kw_only=True):
    """The cache changed at ``at``, in this order."""

    at: Nanos
    events: list[KvEvent]


class Counters(msgspec.Struct, kw_only=True):
    """What the engine has counted since its start; tokens unless the name says otherwise."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt: int = 0
    prompt_cached: int = 0
    generated: int = 0
    preemptions: int = 0
    passes: int = 0
    requests: int = 0
    rejected: int = 0
    pulled: int = 0
    """Prompt tokens that came from other engines."""
    remote_queries: int = 0
    """Prompt tokens that other engines were said to hold..."""
    remote_hits: int = 0
    """... and those of them that were asked for."""
    pulls_failed: int = 0
    """Requests that were computed here because their KV did not come."""
    hold_expired: int = 0
    """Held requests whose blocks nobody released in time."""
    ended: dict[str, int] = msgspec.field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})


class Window:
    """The sums of a `StepStats` window, while it is open."""

    __slots__ = (
        "decode_kv",
        "decode_kv_sq",
        "decode_seqs",
        "decode_seqs_sq",
        "passes",
        "preemptions",
        "prefill_requests",
        "prefill_tokens",
        "prefill_tokens_sq",
        "queued_decode_kv",
        "queued_prefill_tokens",
        "queued_requests",
        "wall",
    )

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    passes: int
    wall: int
    prefill_tokens: int
    prefill_tokens_sq: int
    prefill_requests: int
    decode_seqs: int
    decode_seqs_sq: int
    decode_kv: int
    decode_kv_sq: int
    queued_requests: int
    queued_prefill_tokens: int
    queued_decode_kv: int
    preemptions: int

    def close(self) -> StepStats:
        """Return the window as a value; ``wall`` turns from nanoseconds into seconds."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        values["wall"] = self.wall / 1e9
        return StepStats(**values)

    def dump(self) -> list[int]:
        """Return the sums as plain data."""
        return [getattr(self, name) for name in self.__slots__]

    def load(self, sums: Sequence[int]) -> None:
        """Become what `dump` wrote."""
        for name, value in zip(self.__slots__, sums, strict=True):
            setattr(self, name, value)
