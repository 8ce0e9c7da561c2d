"""`SimulatedOutput`: the made-up words of an answer and where it ends, fixed by prompt and seed."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.kernel.hashing import SEED, token_bytes
from penstock.kernel.values import Prompt
from penstock_lab.engine.events import SubmitRequest
from penstock_lab.engine.settings import SimSettings

Words = Sequence[Sequence[int]]
"""Each entry the token ids of one word; an answer is a row of these."""

PLAIN: Words = tuple((token,) for token in range(256, 1280))
"""Words where no tokenizer is at hand: single tokens above those of the trace prompts."""

_MASK = (1 << 64) - 1


class SimulatedOutput:
    """One answer: ``length`` tokens that end for ``reason``, made as far as they are requested.

    It is a function of the request, the settings' seed and the words alone, so it may be made twice. As with a real
    model at temperature 0 each word follows from all tokens before it, so a prompt that has the beginning of an
    answer behind it is answered with its rest (word by word; a word of several tokens is not taken up in its middle).

    Args:
        turn: token after which the model's turn begins. A turn ends where it would have, however much of it stands in
            the prompt already; a prompt without one is no turn, and its answer has no end but its limit.
    """

    __slots__ = ("_done", "_end", "_forced", "_key", "_made", "_state", "_submit", "_words", "length", "reason", "seed")

    length: int
    reason: Literal["stop", "length"]

    def __init__(
        self,
        submit: SubmitRequest,
        settings: SimSettings,
        words: Words = PLAIN,
        end: int | None = None,
        turn: int | None = None,
    ) -> None:
        self.seed = settings.seed
        self._submit = submit
        self._words = words
        self._end: int | None = None
        self._forced = submit.output
        self._key: int | None = None
        self._made: list[int] = []
        self._state: xxhash.xxh3_64 | None = None
        self._done: int | None = 0
        """Tokens of the turn that stand in the prompt; None where it is no turn."""
        self.length, self.reason = submit.max_tokens, "length"
        if submit.output is not None:
            if len(submit.output) <= submit.max_tokens:
                self.length, self.reason = max(1, len(submit.output)), "stop"
        elif not submit.ignore_eos and settings.reply_tokens:
            if turn is not None:
                self._done = _behind(submit.tokens or (), turn)
            typical = settings.reply_tokens
            done = self._done
            natural = typical // 2 + (self.key >> 7) % (typical + 1) - (done or 0)
            natural = max(1, submit.min_tokens, natural)
            if done is not None and natural <= submit.max_tokens:
                self.length, self.reason = natural, "stop"
                self._end = end

    @property
    def key(self) -> int:
        """64 bits that stand for the prompt up to the model's turn, the seed and the choice among several answers."""
        if self._key is None:
            submit = self._submit
            if submit.tokens is not None:
                raw = token_bytes(submit.tokens[: len(submit.tokens) - self._done] if self._done else submit.tokens)
            else:
                prompt = submit.prompt or Prompt(0)
                raw = b"".join(block.to_bytes(8, "little") for block in prompt.blocks[-1:])
                raw += prompt.isl.to_bytes(8, "little")
            raw += (self.seed & _MASK).to_bytes(8, "little") + (submit.variant & _MASK).to_bytes(8, "little")
            self._key = xxhash.xxh3_64_intdigest(raw, SEED)
        return self._key

    def upto(self, count: int) -> list[int]:
        """Return the first ``count`` tokens, at most ``length``. Cost: about 0.3 us per new word."""
        count = min(count, self.length)
        if self._forced is not None:
            return list(self._forced[:count])
        made, words = self._made, self._words
        if len(made) < count:
            state = self._state
            if state is None:
                state = self._state = self._begun()
            size = len(words)
            while len(made) < count:
                word = words[state.intdigest() % size]
                made.extend(word)
                state.update(token_bytes(word))
        out = made[:count]
        if self._end is not None and count == self.length:
            out[-1] = self._end
        return out

    def _begun(self) -> xxhash.xxh3_64:
        """Return the state of the made-up model before its first token."""
        submit = self._submit
        if submit.tokens is None:
            return xxhash.xxh3_64(self.key.to_bytes(8, "little"), SEED)
        state = xxhash.xxh3_64((self.seed & _MASK).to_bytes(8, "little"), SEED)
        state.update((submit.variant & _MASK).to_bytes(8, "little"))
        state.update(token_bytes(submit.tokens))
        return state


def _behind(tokens: Sequence[int], turn: int) -> int | None:
    """Return how many tokens stand behind the last ``turn``, or None where there is none."""
    try:
        return list(reversed(tokens)).index(turn)
    except ValueError:
        return None


def accepted(key: int, rate: float, drafts: int, steps: int) -> npt.NDArray[np.int64]:
    """Return how many tokens have come out after each of so many decode steps, shape (steps + 1,), from 0.

    Each step gives one token and the drafts accepted before the first that is refused, each with chance ``rate``.
    """
    generator = np.random.Generator(np.random.PCG64(key))
    agreed = generator.random((steps, drafts)) < rate
    tokens = 1 + np.cumprod(agreed, axis=1, dtype=np.int64).sum(axis=1)
    out = np.zeros(steps + 1, dtype=np.int64)
    np.cumsum(tokens, out=out[1:])
    return out
