"""`PromptForm`: the form in which prompts come to a router, with the indexes and the load that take it."""

from collections.abc import Callable
from typing import NamedTuple

from penstock import extension
from penstock.kernel.machine import Nanos
from penstock.kernel.values import Prompt
from penstock.router.kv_index.approximate_index import ApproximateIndex
from penstock.router.kv_index.exact_index import ExactIndex
from penstock.router.kv_index.indexer import EventIndexer, HistoryIndexer
from penstock.router.workers.active_sequences import TargetLoad

APPROXIMATE_BLOCKS_MAX = 1 << 20
"""Most blocks that the routing history keeps; it is pruned to 80 %."""


class PromptForm(NamedTuple):
    """One form of prompts.

    Args:
        exact: makes the index of KV events, from the block size in tokens.
        history: makes an index of placements, from the time after which one is forgotten.
        load: class of a target's load; its ``chain`` gives a prompt's blocks this form.
    """

    name: str
    exact: Callable[[int], EventIndexer]
    history: Callable[[Nanos], HistoryIndexer]
    load: type[TargetLoad]

    def prompt(self, prompt: Prompt) -> Prompt:
        """Return a prompt in this form, as after it was written and read."""
        return Prompt(prompt.isl, self.load.chain(prompt.blocks), prompt.estimated)


BLOCKS = PromptForm(
    name="blocks",
    exact=ExactIndex,
    history=lambda ttl: ApproximateIndex(ttl=ttl, blocks_max=APPROXIMATE_BLOCKS_MAX),
    load=TargetLoad,
)
"""Every block by its chained hash, as live requests and engines name it."""


def form_of(name: str) -> PromptForm:
    """Return a form by its name, as a journal has it.

    Raises:
        ConfigError: no extension has one of that name.
    """
    if name == BLOCKS.name:
        return BLOCKS
    form: PromptForm = extension.entry("prompt form", name)
    return form
