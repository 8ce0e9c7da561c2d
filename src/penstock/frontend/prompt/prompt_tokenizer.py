"""Prompt tokenizer: the model's own tokenizer, with a cache of the parts of earlier prompts.

Tokenizers cut a text at special tokens before anything else, so the parts between are tokenised each by itself. The
cache uses that: a conversation's next turn repeats all parts but the last, and those are looked up instead of encoded.
A long part is cut again, where the tokenizer's rules let no token reach across (`TokenBoundaries`), so that one that is
known but for its end is encoded from there. `PromptTokenizer` also checks at load on probes that cutting changes
nothing, and does not use the cache where it does.
"""

import itertools
import json
import os
import re
import sys
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock import extension
from penstock.frontend.prompt.chat_template import ChatTemplate, TemplateFailed
from penstock.frontend.prompt.token_boundaries import TokenBoundaries
from penstock.kernel.bounded_table import BoundedTable
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject

# One prompt is one job for one of our threads; the library's own threads would only take CPU from streams.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer

_FILLERS = ("", " ", "\n", "  \n ", "a", " a", "hello world", "x y\tz  ", "é漢😀", "1234", "don't", "\u00a0", "▁", "</")
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")
ENTRY_OVERHEAD = 200
"""Bytes of bookkeeping per cached part, beside its text and tokens."""


SEGMENT = 4096
"""Characters after which a long part is cut: what is encoded again where a prompt ends otherwise than a known one."""


@dataclass(frozen=True, slots=True)
class PrefixCutter:
    """Finds where a text may be cut.

    Attributes:
        words: matches every added token.
        allowed: those to cut before.
        boundaries: where else.
        segment: characters after which that is done.
    """

    words: re.Pattern[str]
    allowed: frozenset[str]
    boundaries: TokenBoundaries
    segment: int = SEGMENT

    def parts(self, text: str) -> list[tuple[str, int]]:
        """Cut a text; return the parts to encode and, of each, how many tokens at its beginning are of its guard."""
        parts: list[tuple[str, int]] = []
        last = 0
        if self.allowed:
            for match in self.words.finditer(text):
                start = match.start()
                if start > last and match.group() in self.allowed:
                    self._add(text, last, start, parts)
                    last = start
        self._add(text, last, len(text), parts)
        return parts

    def _add(self, text: str, start: int, end: int, parts: list[tuple[str, int]]) -> None:
        guard, guard_tokens = "", 0
        if end - start > self.segment and self.boundaries.guard is not None:
            for place in self.boundaries.cuts(text, start, end, self.segment):
                parts.append((guard + text[start:place], guard_tokens))
                start, guard, guard_tokens = place, self.boundaries.guard, self.boundaries.guard_tokens
        parts.append((guard + text[start:end], guard_tokens))


CACHE_ENTRIES = 65_536
"""Most parts of prompts whose tokens are kept: many short ones must not outgrow cache_bytes by their overhead."""


class TooMuchToEncode(Exception):
    """A text has more to be encoded than may be encoded where the event loop waits for it."""


class PromptTokenizer:
    """Tokenise prompts of one model; may be called from several threads.

    Args:
        tokenizer: of the model.
        template: its chat template, or None where it has none.
        cache_bytes: memory for tokenised parts; 0 keeps none.
        cache_entries: most parts kept; 0 keeps none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        *,
        cache_bytes: int = 0,
        cache_entries: int = CACHE_ENTRIES,
        check: bool = True,
    ) -> None:
        self.template = template
        self.hits = 0
        """Parts that were looked up."""
        self.misses = 0
        """Parts that had to be encoded."""
        self.tokens_cached = 0
        self.tokens_encoded = 0
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._lock = threading.Lock()
        self._part_bytes_max = cache_bytes // 4
        """Bytes of the largest part that is kept: one huge text must not evict every conversation."""
        self._parts: BoundedTable[str, array[int]] = BoundedTable(
            cache_entries, bytes_max=cache_bytes, bytes_of=_bytes_of
        )
        self._before, self._after = self._surroundings()
        self._cut: PrefixCutter | None = _cutter(tokenizer) if cache_bytes > 0 and cache_entries > 0 else None
        self.why_no_cache: str | None = None
        if self._cut is None:
            self.why_no_cache = "it is switched off, or the tokenizer has no special token and no rule to cut at"
        elif check:
            wrong = self._disproof()
            if wrong is not None:
                self._cut = None
                self.why_no_cache = f"cutting changes the tokens of {wrong!r}"

    @property
    def caches(self) -> bool:
        """Whether parts of prompts are kept."""
        return self._cut is not None

    @property
    def cache_entries(self) -> int:
        return len(self._parts)

    @property
    def cache_bytes(self) -> int:
        return self._parts.bytes

    def encode(self, text: str, *, special: bool, fresh_max: int | None = None) -> "array[int]":
        """Return the token ids of a prompt.

        Args:
            special: add the tokenizer's tokens around a text, such as BOS: true for plain prompts, false for chats,
                whose template writes them.
            fresh_max: most characters that may be encoded now, beside what is looked up; None is no limit.
        Raises:
            TooMuchToEncode: there are more; nothing was encoded.
        """
        if self._cut is None:
            if fresh_max is not None and len(text) > fresh_max:
                raise TooMuchToEncode
            tokens = array("I", self._encode([text], special)[0])
            with self._lock:
                self.misses += 1
                self.tokens_encoded += len(tokens)
            return tokens
        return self._joined(text, special, fresh_max)

    def whole(self, text: str, *, special: bool) -> "array[int]":
        """Return the same without the cache: the oracle of `encode`."""
        return array("I", self._encode([text], special)[0])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of output tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def literal(self, tokens: Sequence[int]) -> str:
        """Return the text of any tokens, special ones included."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token as the vocabulary spells it; empty where it has none of that number."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def _joined(self, text: str, special: bool, fresh_max: int | None) -> "array[int]":
        assert self._cut is not None
        parts = self._cut.parts(text)
        cached: list[array[int] | None] = []
        with self._lock:
            for part, _ in parts:
                cached.append(self._parts.use(part))
        missing = [part for (part, _), tokens in zip(parts, cached) if tokens is None]
        if fresh_max is not None and sum(map(len, missing)) > fresh_max:
            raise TooMuchToEncode
        fresh = {part: array("I", ids) for part, ids in zip(missing, self._encode(missing, False))} if missing else {}
        out = array("I", self._before if special else ())
        encoded = 0
        for (part, guard_tokens), known in zip(parts, cached):
            if known is None:
                known = fresh[part]
                encoded += len(known) - guard_tokens
            out.extend(known[guard_tokens:] if guard_tokens else known)
        if special:
            out.extend(self._after)
        with self._lock:
            self.hits += len(parts) - len(missing)
            self.misses += len(missing)
            self.tokens_encoded += encoded
            self.tokens_cached += len(out) - encoded
            for part, tokens in fresh.items():
                if part not in self._parts and _bytes_of(part, tokens) <= self._part_bytes_max:
                    self._parts.put(part, tokens)
        return out

    def _encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        # The batch call lets other threads run meanwhile, and the fast one leaves offsets out.
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)]

    def _surroundings(self) -> tuple[list[int], list[int]]:
        """Find the tokens that the tokenizer puts before and after a text that is no chat."""
        bare, dressed = self._encode(["a"], False)[0], self._encode(["a"], True)[0]
        for start in range(len(dressed) - len(bare) + 1):
            if dressed[start : start + len(bare)] == bare:
                return dressed[:start], dressed[start + len(bare) :]
        return [], []

    def _disproof(self) -> str | None:
        """Return a probe on which cutting changes the tokens, or None."""
        assert self._cut is not None
        cuts = sorted(self._cut.allowed)[:6]
        probes = [f"{a}{cut}{b}" for cut in cuts for a in _FILLERS for b in _FILLERS]
        probes += [f"{a}{x}{b}{y}{a}" for x in cuts[:3] for y in cuts for a, b in itertools.pairwise(_FILLERS)]
        probes += list(_FILLERS)
        for text in self._rendered_probes():
            probes.append(text)
        often = replace(self._cut, segment=1)
        for special in (False, True):
            for text in probes:
                if self.whole(text, special=special) != self._joined_uncached(often.parts(text), special):
                    return text[:80]
        return None

    def _joined_uncached(self, parts: Sequence[tuple[str, int]], special: bool) -> "array[int]":
        out = array("I", self._before if special else ())
        for ids, (_, guard_tokens) in zip(self._encode([part for part, _ in parts], False), parts):
            out.extend(ids[guard_tokens:])
        if special:
            out.extend(self._after)
        return out

    def _rendered_probes(self) -> list[str]:
        if self.template is None:
            return []
        chat = [
            {"role": "user", "content": "Hello, wörld!\n\nTwo lines 漢字 😀 "},
            {"role": "assistant", "content": "  fine: 1, 2\n"},
            {"role": "user", "content": "and <|im_end|> </s> [INST] more"},
        ]
        try:
            return [self.template.render(chat)]
        except TemplateFailed:
            return []


def load_tokenizer(where: str, *, cache_bytes: int = 0, template: str | None = None) -> PromptTokenizer:
    """Load a model's tokenizer.

    Args:
        where: a folder with tokenizer.json and tokenizer_config.json, the path of a tokenizer.json, or
            ``builtin:sim`` for the simulated model's own.
        template: chat template in place of the folder's.
    Raises:
        ConfigError: it is missing or can't be read.
    """
    path = builtin_folder(where) if where.startswith("builtin:") else Path(where).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for any fault of a file
        raise ConfigError(
            f"the tokenizer {file} can't be loaded: {error}",
            hint="name a folder with tokenizer.json, or leave tokenizer unset to route by hashed text",
        ) from error
    config = _read_config(file.parent)
    source = _template_source(file.parent, config) if template is None else template
    names = {name: _token_text(config[name]) for name in _NAMES if config.get(name) is not None}
    try:
        rendered = None if source is None else ChatTemplate(source, names)
    except TemplateFailed as error:
        raise ConfigError(f"{file.parent}: {error}") from error
    return PromptTokenizer(tokenizer, rendered, cache_bytes=cache_bytes)


def builtin_folder(where: str) -> Path:
    """Return the folder of a tokenizer that comes with an extension.

    Raises:
        ConfigError: there is none of that name.
    """
    if not extension.offers("tokenizer", where):
        raise ConfigError(f"there is no built-in tokenizer {where!r}", hint=extension.known("tokenizer"))
    return Path(extension.entry("tokenizer", where))


def _cuts(token: Any, added: Sequence[Any]) -> bool:
    """Return whether a text may be cut before one of the added tokens: it takes nothing from its neighbours, nor they
    from it."""
    if token.lstrip or token.rstrip or token.single_word or token.normalized:
        return False
    first = token.content[0]
    taken = first.isspace() and any(t.rstrip for t in added)
    return not (taken or ((first.isalnum() or first == "_") and any(t.single_word for t in added)))


def _bytes_of(part: str, tokens: "array[int]") -> int:
    return sys.getsizeof(part) + 4 * len(tokens) + ENTRY_OVERHEAD


def _cutter(tokenizer: Tokenizer) -> "PrefixCutter | None":
    """Return a cutter that finds added tokens in a text as the tokenizer does: leftmost, then longest."""
    added = [t for t in tokenizer.get_added_tokens_decoder().values() if t.content and not t.normalized]
    allowed = frozenset(t.content for t in added if _cuts(t, added))
    boundaries = TokenBoundaries(tokenizer)
    if not allowed and boundaries.guard is None:
        return None
    words = sorted((t.content for t in added), key=len, reverse=True)
    return PrefixCutter(re.compile("|".join(map(re.escape, words))), allowed, boundaries)


def _read_config(folder: Path) -> JsonObject:
    file = folder / "tokenizer_config.json"
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from error
    return config if isinstance(config, dict) else {}


def _template_source(folder: Path, config: JsonObject) -> str | None:
    """Find the chat template: a file of its own wins, then the config's, whose list form has one named default."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} can't be read: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
