"""Media encoder of the simulated engine: what encoding an image takes, and the engine's own cache of embeddings.

As in vLLM, the encoder runs at the beginning of the pass that computes an image's first tokens, so that all who decode
in that pass wait for it. What the prefix cache covers is not encoded. Embeddings that an encode worker has put into the
store are read from there, which takes what their bytes take.
"""

from collections import OrderedDict

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Snapshot
from penstock_lab.engine.events import SubmitRequest
from penstock_lab.engine.settings import EncoderSettings
from penstock_lab.engine.timing.encoder_timing import encode_time, fetch_time


class MediaEncoder:
    """One engine's encoder. ``pending``: nanoseconds that the next pass takes longer for it."""

    def __init__(self, settings: EncoderSettings) -> None:
        self.settings = settings
        self.pending = 0.0
        self.only = False
        """Whether it does nothing else: the engine of an encode worker, whose passes prefill nothing."""
        self.encoded = self.hits = self.fetched = 0
        """Media that were encoded, found in this engine's cache, and read from the store."""
        self.tokens = 0
        self._embeddings: OrderedDict[str, int] = OrderedDict()

    def admit(self, submit: SubmitRequest, cached: int) -> None:
        """A request begins, of whose prompt ``cached`` tokens need nothing."""
        if submit.encode:
            self.only = True
        for item in submit.media:
            if item.start + item.length <= cached:
                continue
            if item.id in self._embeddings:
                self._embeddings.move_to_end(item.id)
                self.hits += 1
                continue
            if item.id in submit.embedded:
                self.pending += fetch_time(item.length)
                self.fetched += 1
            else:
                self.pending += encode_time(self.settings, item.length)
                self.encoded += 1
            self._embeddings[item.id] = item.length
            self.tokens += item.length
            while self.tokens > self.settings.cache_tokens and len(self._embeddings) > 1:
                _, length = self._embeddings.popitem(last=False)
                self.tokens -= length

    def take(self) -> float:
        """Return what the pass that begins takes longer, in nanoseconds."""
        pending, self.pending = self.pending, 0.0
        return pending

    def snapshot(self) -> Snapshot:
        return {
            "pending": self.pending,
            "only": self.only,
            "counts": [self.encoded, self.hits, self.fetched],
            "held": list(self._embeddings.items()),
        }

    def restore(self, state: Snapshot) -> None:
        self.pending, self.only = state["pending"], state["only"]
        self.encoded, self.hits, self.fetched = state["counts"]
        self._embeddings = OrderedDict((id, length) for id, length in state["held"])
        self.tokens = sum(self._embeddings.values())

    def check(self) -> None:
        """Raise `InvariantError` where the tokens do not add up."""
        if self.tokens != sum(self._embeddings.values()):
            raise InvariantError(f"{self.tokens} embeddings are counted, {sum(self._embeddings.values())} are held")
