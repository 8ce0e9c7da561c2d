"""`Active`: one request that occupies a target."""

from collections.abc import Sequence

import msgspec

from penstock.kernel.machine import Nanos
from penstock.kernel.values import RequestId, Target


class Active(msgspec.Struct):
    """One request that occupies a target."""

    target: Target
    prefill_tokens: int
    blocks: Sequence[int]
    unhashed_blocks: int
    touched: Nanos
    router: str = ""
    """The router that placed it; empty for this one."""
    output_blocks: int = 0
    osl_blocks: int = 0
    """Blocks that its output is expected to fill, where its caller gave a length."""


class ActiveState(msgspec.Struct):
    """State of `ActiveSequences`; ``requests`` by the router that placed each and its id."""

    expired: int
    sweeping: bool
    requests: dict[tuple[str, RequestId], Active]
