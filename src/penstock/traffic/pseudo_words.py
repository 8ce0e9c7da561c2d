"""Made-up prompt text: pronounceable words from a seed, four letters to the token."""

import random
from functools import lru_cache

_ONSETS = ("b", "br", "d", "dr", "f", "g", "gl", "h", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v")
_CORES = ("a", "e", "i", "o", "u", "ai", "ea", "oa")
_ENDS = ("", "n", "r", "s", "t", "l", "nd", "ck")
LETTERS_PER_TOKEN = 4
"""What common tokenizers make of plain text, roughly; a byte-level one makes four times as many tokens of it."""


@lru_cache(maxsize=1024)  # shared pieces (tool prompts, documents) are needed again and again
def words(tokens: int, seed: int) -> str:
    """Return text of about ``tokens`` tokens, the same for the same arguments."""
    rng = random.Random(seed)
    out: list[str] = []
    left = tokens * LETTERS_PER_TOKEN
    while left > 0:
        word = rng.choice(_ONSETS) + rng.choice(_CORES) + rng.choice(_ENDS)
        if rng.getrandbits(1):
            word += rng.choice(_ONSETS) + rng.choice(_CORES)
        out.append(word)
        left -= len(word) + 1
    return " ".join(out)
