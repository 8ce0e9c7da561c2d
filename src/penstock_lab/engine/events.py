"""Events and effects of the simulated engine: requests and KV in, milestones and KV changes out.

Times are kernel nanoseconds and exact: a milestone names when it happened, which may be before the event that made
the engine look.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.kernel.hashing import MediaSpan
from penstock.kernel.machine import Effect, Event, Nanos
from penstock.kernel.values import KvEvent, Prompt, RequestId

EndReason = Literal["stop", "length", "abort"]


class SubmitRequest(Event, frozen=True, kw_only=True):
    """A request for this engine.

    Give ``tokens``, or ``prompt``: then no token need be materialised. ``output`` are tokens to answer with instead of
    made-up ones; the request ends with them. ``variant`` tells several answers to one prompt apart. ``max_tokens``
    bounds the output; without ``ignore_eos`` it may end by itself, not before ``min_tokens``. ``priority``: lower goes
    first under priority scheduling.

    ``media``: images and the like, by their ids and the tokens that stand for them; ``embedded``: ids of those that an
    encode worker has put into the store; ``encode``: this engine is one, and is to do only that.

    ``pin``, ``keep``: hints for tiers below the engine's memory: seconds for which they are to keep its blocks, and
    how much they are worth there (0 is the least).

    ``next_in``: seconds after its end at which the tiers are to bring its blocks up, for its session's next request.

    ``hold``: another engine goes on with this request. It ends with its first token, whatever ``max_tokens`` says, and
    keeps the blocks of its prompt until `ReleaseKv`. ``remote``: prompt tokens whose KV another engine holds; `PullKv`
    asks the driver to bring it.
    """

    id: RequestId
    max_tokens: int
    prompt: Prompt | None = None
    tokens: Sequence[int] | None = None
    min_tokens: int = 0
    ignore_eos: bool = True
    priority: int = 0
    salt: str | None = None
    lora: str | None = None
    media: list[MediaSpan] = []
    embedded: list[str] = []
    encode: bool = False
    output: Sequence[int] | None = None
    variant: int = 0
    hold: bool = False
    remote: int = 0
    pin: float = 0.0
    keep: int = 0
    next_in: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        if self.tokens is not None:
            return len(self.tokens)
        return 0 if self.prompt is None else self.prompt.isl


class AbortRequest(Event, frozen=True, kw_only=True):
    """This request is not needed any more; unknown ids are ignored."""

    id: RequestId


class ReleaseKv(Event, frozen=True, kw_only=True):
    """The blocks that this request holds for another engine are not needed any more; unknown ids are ignored."""

    id: RequestId


class KvPulled(Event, frozen=True, kw_only=True):
    """The KV that `PullKv` asked for is here, or, where not ``ok``, will never be: the engine then computes the prompt.

    Unknown ids are ignored.
    """

    id: RequestId
    ok: bool = True


class ClearCache(Event, frozen=True, kw_only=True):
    """Forget every cached block that no running request holds."""


class EngineStarted(Effect, frozen=True, kw_only=True):
    """A request's first pass began. ``cached``: prompt tokens found in the cache."""

    id: RequestId
    at: Nanos
    cached: int


class EngineFirstToken(Effect, frozen=True, kw_only=True):
    """A request's first token came out."""

    id: RequestId
    at: Nanos


class EngineFinished(Effect, frozen=True, kw_only=True):
    """A request ended with ``tokens`` of output; ``started`` and ``first`` are None where it did not come so far.

    Tokens: ``prompt`` of which ``cached`` were not computed at its first admission. ``sources``: tier -> those of them
    that were loaded from it; the others were in the engine's own cache. ``pulled`` came from another engine.
    ``blocks_retained``: blocks that it keeps for another engine until `ReleaseKv`.
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
    blocks_retained: int = 0
    sources: dict[str, int] = {}


class PullKv(Effect, frozen=True, kw_only=True):
    """Blocks are reserved: bring the KV of ``tokens`` tokens of this request's prompt, then answer with `KvPulled`."""

    id: RequestId
    at: Nanos
    tokens: int


class EngineRejected(Effect, frozen=True, kw_only=True):
    """A request can never run here; ``why`` says what is too large."""

    id: RequestId
    at: Nanos
    why: str


class KvChanged(Effect, frozen=True, kw_only=True):
    """The cache changed at ``at``, in this order."""

    at: Nanos
    events: list[KvEvent]


class EngineCounters(msgspec.Struct, kw_only=True):
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
    """Prompt tokens that requests named as held by other engines..."""
    remote_hits: int = 0
    """... and those of them that were requested."""
    pulls_failed: int = 0
    """Requests that were computed here because their KV did not come."""
    tier_queries: int = 0
    """Prompt tokens that the engine's own cache did not have, and the tiers were asked for..."""
    tier_hits: dict[str, int] = {}
    """... and those that were loaded, by tier."""
    loads_failed: int = 0
    """Requests that were computed because nothing came of what was to be loaded."""
    hold_expired: int = 0
    """Held requests whose blocks were not released in time."""
    ended: dict[str, int] = msgspec.field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
