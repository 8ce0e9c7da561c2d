"""Placeholder tokens of images in prompts, learnt from the engines' own KV events.

An event's blocks say which images they touch and where each begins (`penstock.kernel.hashing.media_key`), not where it
ends. The tokens from there on are the image's placeholder, repeated, in some families between a few marks; so for a
later request with the same image it is known what an engine makes of it, without a table of model families. A mark
after an image is known by standing before it as well. If no engine holds an image, nothing beyond it can be cached.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from penstock.kernel.hashing import TAG_MULTIMODAL, records
from penstock.kernel.values import KvStored

KEPT = 65_536
"""Images that are remembered of a model, the latest ones."""


REPEATS, MARKS = 4, 4
"""Equal tokens in a row by which a placeholder is known, and the most marks before it."""


class Image(NamedTuple):
    """What an engine puts in an image's place: ``length`` tokens, all of them ``token`` but for marks around them."""

    token: int
    length: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """All tokens of the placeholder."""
        return [*self.before, *[self.token] * (self.length - len(self.before) - len(self.after)), *self.after]


class ImagePlaceholders:
    """The images of one model's prompts."""

    def __init__(self) -> None:
        self.placeholder: int | None = None
        """Token that stands for images, as it was learnt last."""
        self._images: OrderedDict[str, Image] = OrderedDict()

    def find(self, id: str) -> Image | None:
        """Return what is known of an image."""
        return self._images.get(id)

    @property
    def usual(self) -> int:
        """Tokens of the image that was learnt last; 0 where none was."""
        return next(reversed(self._images.values())).length if self._images else 0

    def learn(self, event: KvStored, block_size: int) -> None:
        """Take in an event that still has its tokens.

        An image may go on in a later event, so the longest part of it that ever came counts.
        """
        starts = dict(_starts(event, block_size))
        for id, start in starts.items():
            first = max(0, start)
            end = min((other for other in starts.values() if other > first), default=len(event.tokens))
            run, known = first, self._images.get(id)
            before = () if known is None else known.before
            if start >= 0:
                run = _repeats(event.tokens, first, end)
                before = tuple(event.tokens[first:run])
            if run >= end:
                continue
            token, marks = event.tokens[run], 0
            while run < end and event.tokens[run] == token:
                run += 1
            while run + marks < end and event.tokens[run + marks] in before:
                marks += 1
            after = tuple(event.tokens[run : run + marks])
            self._put(id, Image(token, run + marks - start, before, after))

    def _put(self, id: str, image: Image) -> None:
        known = self._images.get(id)
        if known is None or (known.token == image.token and image.length > known.length):
            self._images[id] = image
            self.placeholder = image.token
        self._images.move_to_end(id)
        if len(self._images) > KEPT:
            self._images.popitem(last=False)


def _repeats(tokens: Sequence[int], first: int, end: int) -> int:
    """Return where a token begins to repeat, ``first`` where none does within a few marks."""
    for at in range(first, min(first + MARKS + 1, end - REPEATS + 1)):
        if all(tokens[other] == tokens[at] for other in range(at, at + REPEATS)):
            return at
    return first


def _starts(event: KvStored, block_size: int) -> Iterator[tuple[str, int]]:
    """Yield each image that an event's blocks touch, and where it begins, counted from the event's first token."""
    for block, extra in enumerate(event.extras or ()):
        for tag, value in records(extra):
            if tag == TAG_MULTIMODAL:
                try:
                    id, offset = msgspec.msgpack.decode(value, type=tuple[str, int])
                except msgspec.MsgspecError:
                    continue  # an engine that does not say where it begins
                yield id, block * block_size + offset
