"""What each request of an engine asked of the tiers, and what they answered."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

GROUP_BYTES = 4
"""At the end of vLLM's offload keys: the attention group, big-endian; before it stands the block's hash."""


ROUNDS = 4
"""Questions for the blocks of a window: each goes on behind a block that is missing."""


def group_of(key: bytes) -> int:
    """Return the attention group of a key of vLLM's."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def by_group(keys: Sequence[bytes]) -> Iterator[tuple[int, list[int]]]:
    """Yield each attention group of some keys, with their places."""
    places: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(group_of(key), []).append(place)
    yield from places.items()


class DueQuestion(NamedTuple):
    """Keys of one attention group that a request has asked for and nobody has sent yet, in order.

    Args:
        position: tokens of the prompt up to the end of the first key's block; None where vLLM does not say.
        window: vLLM looks for the last blocks first, as a sliding window or a state needs them: one that is missing
            does not rule out those before it.
        round: how often it went on behind a block that is missing.
    """

    request: str
    keys: list[bytes]
    position: int | None
    window: bool = False
    round: int = 0


class TierLookups:
    """Look-ups by request: a key's first look-up is a question to the tier process, the next ones have its answer.

    An answer holds for as long as its request lives. So a request sees one truth, and a load that failed is asked for
    once.
    """

    def __init__(self) -> None:
        self._verdicts: dict[str, dict[bytes, bool | None]] = {}
        """None: asked, not answered."""
        self._due: dict[tuple[str, int], DueQuestion] = {}
        self._sent: dict[int, DueQuestion] = {}

    def lookup(self, request: str, key: bytes, position: int | None = None) -> bool | None:
        """Return whether the tiers have a block; None: not known yet."""
        verdicts = self._verdicts.setdefault(request, {})
        if key in verdicts:
            return verdicts[key]
        verdicts[key] = None
        place = request, group_of(key)
        due = self._due.setdefault(place, DueQuestion(request, [], position))
        if due.keys and position is not None and due.position is not None and position < due.position:
            due = self._due[place] = due._replace(window=True)
        due.keys.append(key)
        return None

    def due(self) -> list[DueQuestion]:
        """Return what has to be asked now."""
        due, self._due = self._due, {}
        return list(due.values())

    def sent(self, number: int, question: DueQuestion) -> None:
        """A question is on its way."""
        self._sent[number] = question

    def answered(self, number: int, blocks: int) -> None:
        """So many leading blocks of a question can be loaded."""
        question = self._sent.pop(number, None)
        if question is not None:
            self.settle(question, blocks)

    def settle(self, question: DueQuestion, blocks: int) -> None:
        """Note the answer of a question, also of one that could not be sent."""
        verdicts = self._verdicts.get(question.request)
        if verdicts is None:
            return
        left = len(question.keys) - blocks - 1
        goes_on = question.window and left > 0 and question.round < ROUNDS
        end = blocks + 1 if goes_on else len(question.keys)
        for place, key in enumerate(question.keys[:end]):
            if verdicts.get(key, False) is None:
                verdicts[key] = place < blocks
        if goes_on:
            rest = question._replace(keys=[], position=None, round=question.round + 1)
            where = question.request, group_of(question.keys[0])
            self._due.setdefault(where, rest).keys.extend(question.keys[end:])

    def missed(self, keys: Iterable[bytes]) -> None:
        """These could not be loaded: they are misses for every request that lives."""
        lost = set(keys)
        for verdicts in self._verdicts.values():
            for key in lost & verdicts.keys():
                verdicts[key] = False

    def end(self, request: str) -> list[bytes]:
        """Forget a request; return the keys that it asked for."""
        for place in [place for place in self._due if place[0] == request]:
            del self._due[place]
        return list(self._verdicts.pop(request, ()))

    @property
    def open(self) -> bool:
        """Whether an answer is missing."""
        return bool(self._due or self._sent)


class ChainRun(NamedTuple):
    """Blocks of a job that follow each other. ``parent``: hash of the block before the first one, where it is known."""

    places: list[int]
    parent: bytes | None


def chain_runs(
    keys: Sequence[bytes], ends: Sequence[int | None], chain: dict[int, bytes], stride: int
) -> list[ChainRun]:
    """Cut a job where its blocks do not follow each other.

    Args:
        ends: tokens of the prompt up to the end of each block, shape (n,); None where it is not known.
        chain: end -> hash, of all blocks of the request that are known.
        stride: tokens of a block.
    """
    runs: list[ChainRun] = []
    last: int | None = None
    for place in range(len(keys)):
        end = ends[place]
        if runs and end is not None and last is not None and end == last + stride:
            runs[-1].places.append(place)
        else:
            runs.append(ChainRun([place], None if end is None else chain.get(end - stride)))
        last = end
    return runs
