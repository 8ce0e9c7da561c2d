"""`Active`: one request that occupies a target."""

from collections.abc import Sequence

import msgspec

from penstock.kernel.machine import Nanos
from penstock.kernel.values import Target


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

    @property
    def unhashed_blocks_now(self) -> int:
        """Its own blocks that count as load: the nearer it is to its expected end, the sooner they are free."""
        own = self.unhashed_blocks + self.output_blocks
        if not self.osl_blocks:
            return own
        return -(-own * max(0, self.osl_blocks - self.output_blocks) // self.osl_blocks)
