"""`Candidate` and `RequestDemand`: what a cost function may know of a target and of a request."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.kernel.values import Prompt, Target
from penstock.router.kv_index.indexer import HeldBlocks


class Speed(msgspec.Struct, frozen=True):
    """How fast a worker is: seconds = intercept + slope * tokens to prefill; seconds per KV block and decode step."""

    prefill_intercept: float
    prefill_slope: float
    decode_slope: float


class CandidateLoad(Protocol):
    """What a cost function may know of a target's load, as `TargetLoad` has it."""

    @property
    def prefill_tokens(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    def blocks_with(self, blocks: Sequence[int], unhashed_blocks: int) -> int:
        """Count the blocks in use after adding a request, shared ones once."""
        ...


class Candidate(msgspec.Struct, frozen=True):
    """A target and all that a cost function may know of it."""

    target: Target
    overlap: HeldBlocks
    load: CandidateLoad
    speed: Speed
    distance: float = 1.0
    """How many times as much a transfer to it costs as one to the nearest."""
    adapter: float = 0.0
    """Seconds until it would hold the request's LoRA adapter."""


class RequestDemand(msgspec.Struct, frozen=True):
    """What a cost function may know of the request.

    ``unhashed_blocks``: blocks of the prompt without a hash (a partial tail); ``osl``: expected output
    tokens; ``least_prefill``: fewest queued prefill tokens over all candidates; ``handed``: another worker holds the
    prompt's KV; ``ms_per_block``: what bringing a block of it takes.
    """

    prompt: Prompt
    unhashed_blocks: int
    block_size: int
    osl: float
    least_prefill: int
    overlap_credit: float
    handed: bool = False
    ms_per_block: float = 0.0
