"""Placeholder tokens of images in prompts, learnt from the engines' own KV events.

An event's blocks say which images they touch and where each begins (`penstock.kernel.hashing.media_key`), not where it
ends. The tokens from there on are the image's placeholder, repeated, in some families between a few marks; so for a
later request with the same image it is known what an engine makes of it, without a table of model families. A mark
after an image is known by standing before it as well. If no engine holds an image, nothing beyond it can be cached.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from penstock.kernel.bounded_table import BoundedTable
from penstock.kernel.hashing import TAG_MULTIMODAL, records
from penstock.kernel.values import KvStored

KEPT = 65_536
"""Images that are remembered of a model, the latest ones."""
PARTS_KEPT = 1024
"""Images of which more may come: their events follow each other closely."""

PLACEHOLDERS_MAX = 8
"""Tokens that may stand for media in one model: image, video and sound have one each, and some room."""
REPEATS, MARKS = 4, 12
"""Equal tokens in a row by which a placeholder is known, and the most marks before it: a frame's time and its beginning
are seven in Gemma 4 (`00:00 ` and a mark) and Qwen3-VL (`<0.5 seconds>` and a mark), whose digits are tokens each."""

Runs = tuple[tuple[int, int], ...]
"""Tokens in order: (token, how often)."""


class Image(NamedTuple):
    """What an engine puts in an image's place: ``length`` tokens, all of them ``token`` but for marks around them.

    ``runs``: (token, how often) in order, where it is not as simple: the frames of a video have marks between them.
    """

    token: int
    length: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    runs: Runs = ()

    @property
    def tokens(self) -> list[int]:
        """All tokens of the placeholder."""
        if self.runs:
            return _tokens_of(self.runs)
        return [*self.before, *[self.token] * (self.length - len(self.before) - len(self.after)), *self.after]

    @property
    def vocabulary(self) -> set[int]:
        """The same, each once."""
        return {self.token, *self.before, *self.after, *(token for token, _ in self.runs)}


class ImagePlaceholders:
    """The images, videos and sounds of one model's prompts."""

    def __init__(self) -> None:
        self.placeholders: set[int] = set()
        """Tokens that were learnt to stand for media: one, or one for each kind."""
        self._images: BoundedTable[str, Image] = BoundedTable(KEPT)
        self._parts: BoundedTable[str, Runs] = BoundedTable(PARTS_KEPT)
        """What came of an image, and what stood behind it in its last block."""

    def find(self, id: str) -> Image | None:
        """Return what is known of an image."""
        return self._images.get(id)

    @property
    def usual(self) -> int:
        """Tokens of the image that was learnt last; 0 where none was."""
        newest = self._images.newest
        return 0 if newest is None else newest.length

    def learn(self, event: KvStored, block_size: int) -> None:
        """Take in an event that still has its tokens.

        An image may go on in a later event: what came of it so far is kept, with what stood behind it.
        """
        starts: dict[str, int] = {}
        ends: dict[str, int] = {}
        for id, start, block in _image_starts(event, block_size):
            starts[id], ends[id] = start, (block + 1) * block_size
        for id, start in starts.items():
            first = max(0, start)
            end = min((other for other in starts.values() if other > first), default=len(event.tokens))
            part = event.tokens[first : min(end, ends[id], len(event.tokens))]
            earlier = _tokens_of(self._parts.get(id) or ())
            if start < 0 and len(earlier) < first - start:
                # Its beginning did not come: where it is one token throughout, it is that token from there on.
                earlier = [part[0]] * (first - start) if len(set(part[:REPEATS])) == 1 else []
            if start < 0 and not earlier:
                continue
            whole = [*earlier[: first - start], *part] if start < 0 else list(part)
            if start >= 0 and len(whole) <= len(earlier):
                continue  # heard before
            self._parts.put(id, _run_lengths(whole))
            image = _image_of(whole)
            if image is not None:
                self._put(id, image)

    def _put(self, id: str, image: Image) -> None:
        known = self._images.use(id)
        if known is None or image.length > known.length:
            self._images.put(id, image)
            if len(self.placeholders) < PLACEHOLDERS_MAX:
                self.placeholders.add(image.token)


def _image_of(whole: list[int]) -> Image | None:
    """Return what of some tokens, which begin with an image, is the image; None where that can't be told yet."""
    run = next(
        (at for at in range(MARKS + 1) if len(set(whole[at : at + REPEATS])) == 1 and at + REPEATS <= len(whole)), None
    )
    if run is None:
        return None
    token = whole[run]
    last = max(at for at in range(run, len(whole)) if whole[at] == token)
    behind = whole[last + 1 :]
    once = next((at for at in range(run, last + 1) if whole[at] != token), None)
    marks = 0
    if once is None:
        while marks < len(behind) and behind[marks] in whole[:run]:
            marks += 1
    else:  # what stands behind its last frame stood behind the first one, too
        while marks < len(behind) and whole[once + marks] == behind[marks] and whole[once + marks] != token:
            marks += 1
    whole = whole[: last + 1 + marks]
    image = Image(token, len(whole), tuple(whole[:run]), tuple(whole[last + 1 :]))
    return image if once is None else image._replace(runs=_run_lengths(whole))


def _run_lengths(tokens: Sequence[int]) -> Runs:
    """Return tokens as (token, how often) in order."""
    return tuple((token, len(list(same))) for token, same in groupby(tokens))


def _tokens_of(runs: Runs) -> list[int]:
    return [token for token, count in runs for _ in range(count)]


def _image_starts(event: KvStored, block_size: int) -> Iterator[tuple[str, int, int]]:
    """Yield each image that a block touches, where it begins, counted from the event's first token, and the block."""
    for block, extra in enumerate(event.extras or ()):
        for tag, value in records(extra):
            if tag == TAG_MULTIMODAL:
                try:
                    id, offset = msgspec.msgpack.decode(value, type=tuple[str, int])
                except msgspec.MsgspecError:
                    continue  # an engine that does not say where it begins
                yield id, block * block_size + offset, block
