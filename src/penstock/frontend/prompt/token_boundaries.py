"""Token boundaries: places in a text that none of a tokenizer's rules reaches across.

A place is known by the characters before and after it. They are followed through the rules in the tokenizer's order:
added tokens, normalizers, pre-tokenizers, and a vocabulary's merges where nothing has split the text before. What a
rule does at the beginning of a text (a prefix, stripped spaces) does not count: a text from the middle of another is
encoded behind a *guard*, whose tokens are left out. A rule that is not understood leaves no boundary.
"""

import json
import re
import string
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import product
from typing import Any

from tokenizers import Tokenizer, models, normalizers

from penstock.frontend.prompt.split_pattern import SplitPattern, UnknownRule
from penstock.kernel.values import JsonObject

Forms = frozenset[str]
"""What a character may have become."""
Step = Callable[[Forms, Forms], "tuple[Forms, Forms] | bool"]
"""One rule: takes the forms of the characters before and after a place; returns what it makes of them, or whether the
place is a boundary."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What the pre-tokenizer ``ByteLevel`` splits by."""
_PUNCTUATION = r"[!-/:-@\[-`{-~\p{P}]"
_SPLITTERS = {"Whitespace": r"\w+|[^\w\s]+", "WhitespaceSplit": r"\s", "BertPreTokenizer": rf"\s|{_PUNCTUATION}"}
_BY_CHARACTER = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Precompiled", "BertNormalizer", "ByteLevel")
)
"""Normalizers that change each character around a place (`_PLACE`) by itself."""
_APART = ("Isolated", "Removed")
"""What a split may do with its matches so that each is apart from what stands around it."""

_LETTERS = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00de\u00e0-\u00f6\u00f8-\u0148\u014a-\u017e\u0391-\u03a1\u03a3-\u03a9\u03b1-\u03c9"
    "\u0410-\u044f\u3041-\u3093\u30a1-\u30f6\u4e00-\u9fa5"
)
_MARKS = "\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
_AFTER = " \n\t" + string.punctuation + _MARKS
_BEFORE = f"[!-~{_LETTERS}{_MARKS}]"
_PLACE = re.compile(f"(?<={_BEFORE}{_BEFORE})[{re.escape(_AFTER)}](?=[ \n\t!-~{_LETTERS}])")
"""Where a boundary is looked for. These characters are the same in every version of Unicode; none but a space is space,
none joins the one before it, and what follows joins none of them."""
_GUARDS = "a1."
WINDOW = 512
"""Characters that are searched for a boundary before a text is left whole for another stretch."""


class TokenBoundaries:
    """Boundaries of one tokenizer, whose rules are read once.

    Attributes:
        guard: what is put before a text from the middle of another; None: there are no boundaries.
        guard_tokens: tokens that it adds.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.guard: str | None = None
        self.guard_tokens = 0
        try:
            self._steps = _tokenizer_steps(tokenizer)
        except UnknownRule:
            return
        self.between = lru_cache(4096)(self._between)
        behind = {guard: frozenset(c for c in _AFTER if self._between(guard, c)) for guard in _GUARDS}
        guard = max(behind, key=lambda guard: (" " in behind[guard], len(behind[guard])))
        self._after = behind[guard]
        if self._after:
            self.guard = guard
            self.guard_tokens = len(tokenizer.encode(guard, add_special_tokens=False).ids)

    def cuts(self, text: str, start: int, end: int, size: int) -> Iterator[int]:
        """Yield boundaries of text[start:end], each the first one ``size`` characters or more behind the one before."""
        at = start + size
        while at < end:
            for match in _PLACE.finditer(text, at, min(at + WINDOW, end)):
                place = match.start()
                if text[place] in self._after and self.between(text[place - 1], text[place]):
                    yield place
                    at = place
                    break
            at += size

    def _between(self, before: str, after: str) -> bool:
        """Return whether there is a boundary between two characters."""
        forms = frozenset(before), frozenset(after)
        for step in self._steps:
            found = step(*forms)
            if isinstance(found, bool):
                return found
            forms = found
        return False


def _tokenizer_steps(tokenizer: Tokenizer) -> list[Step]:
    """Return all rules of a tokenizer as steps.

    Raises:
        UnknownRule: one of them is not understood.
    """
    model = tokenizer.model
    if getattr(model, "dropout", None) or getattr(model, "alpha", None) or getattr(model, "nbest_size", None):
        raise UnknownRule("it draws at random")
    added = list(tokenizer.get_added_tokens_decoder().values())
    change = tokenizer.normalizer.normalize_str if tokenizer.normalizer is not None else str
    steps = [_added_tokens_step([(token, token.content) for token in added if not token.normalized])]
    steps += [_normalizer(rule) for rule in _component_rules(tokenizer.normalizer, "normalizers")]
    steps.append(_added_tokens_step([(token, change(token.content)) for token in added if token.normalized]))
    for place, rule in enumerate(_component_rules(tokenizer.pre_tokenizer, "pretokenizers")):
        steps += _pre_tokenizer(rule, place == 0)
    if isinstance(model, models.BPE) and not (model.continuing_subword_prefix or model.end_of_word_suffix):
        steps.append(_merges(tokenizer))
    return steps


def _component_rules(component: Any, parts: str) -> Iterator[JsonObject]:
    """Yield a component's rules as a tokenizer.json spells them; ``parts``: the field of a sequence's."""
    if component is None:
        return
    rules = [json.loads(component.__getstate__())]
    while rules:
        rule = rules.pop(0)
        if rule["type"] == "Sequence":
            rules[:0] = rule[parts]
        else:
            yield rule


def _added_tokens_step(tokens: Sequence[tuple[Any, str]]) -> Step:
    """Added tokens, each with what is looked for in a text."""
    contents = [content for _, content in tokens]
    if not all(contents):
        raise UnknownRule("an added token is empty")
    joined = "\0".join(contents)
    lasts = {content[-1] for content in contents}
    words = {content[0] for token, content in tokens if token.single_word}

    def step(before: Forms, after: Forms) -> tuple[Forms, Forms] | bool:
        # A token that strips spaces ends its reach before a place, whose first character is none.
        spaced = any(map(str.isspace, before))
        if spaced or before & lasts or after & words or any(one + two in joined for one, two in product(before, after)):
            return False
        return before, after

    return step


def _normalizer(rule: JsonObject) -> Step:
    kind = rule["type"]
    if kind in _BY_CHARACTER:
        normalizer = normalizers.NFC()
        normalizer.__setstate__(json.dumps(rule).encode())
        return _by_character(normalizer.normalize_str)
    if kind == "Replace":
        return _replaced(rule)
    if kind in ("Prepend", "Strip"):
        return lambda before, after: not any(map(str.isspace, before)) and (before, after)
    raise UnknownRule(kind)


def _by_character(change: Callable[[str], str]) -> Step:
    def step(before: Forms, after: Forms) -> tuple[Forms, Forms] | bool:
        one, two = frozenset(map(change, before)), frozenset(map(change, after))
        return all(len(form) == 1 for form in one | two) and (one, two)

    return step


def _replaced(rule: JsonObject) -> Step:
    literal, content = rule["pattern"].get("String"), rule["content"]
    if literal is not None and len(literal) == len(content) == 1:
        return _by_character(lambda c: content if c == literal else c)
    if literal is None and "$" in content:
        raise UnknownRule(content)
    pattern = _split_pattern(rule["pattern"])

    def step(before: Forms, after: Forms) -> tuple[Forms, Forms] | bool:
        if not _splits(pattern, before, after):
            return False
        ends, begins = any(map(pattern.touches, before)), any(map(pattern.touches, after))
        if not content:
            return not (ends or begins) and (before, after)
        return before | {content[-1]} if ends else before, after | {content[0]} if begins else after

    return step


def _pre_tokenizer(rule: JsonObject, first: bool) -> list[Step]:
    """Return a pre-tokenizer's steps; ``first``: nothing before it may have split the text."""
    kind = rule["type"]
    if kind in _SPLITTERS:
        return [_split_step(SplitPattern(_SPLITTERS[kind]), "Removed" if kind.startswith("White") else "Isolated")]
    if kind == "Split":
        return [_split_step(_split_pattern(rule["pattern"]), rule["behavior"])]
    if kind == "ByteLevel":
        steps = [] if first or not rule["add_prefix_space"] else [_unprefixed(" ")]
        if rule.get("use_regex", True):
            steps.append(_split_step(SplitPattern(_GPT2), "Isolated"))
        return [*steps, _by_character(normalizers.ByteLevel().normalize_str)]
    if kind == "Digits":
        return [_split_step(SplitPattern(r"\p{N}" if rule["individual_digits"] else r"\p{N}+"), "Isolated")]
    if kind == "Punctuation":
        return [_split_step(SplitPattern(_PUNCTUATION), rule["behavior"])]
    if kind == "CharDelimiterSplit":
        return [_split_step(_split_pattern({"String": rule["delimiter"]}), "Removed")]
    if kind == "Metaspace":
        mark = rule["replacement"]
        steps = [_by_character(lambda c: mark if c == " " else c)]
        if not first and rule.get("prepend_scheme") != "never":
            steps.append(_unprefixed(mark))
        return [*steps, _metaspace(mark)] if rule.get("split", True) else steps
    raise UnknownRule(kind)


def _split_pattern(pattern: JsonObject) -> SplitPattern:
    literal = pattern.get("String")
    return SplitPattern(pattern["Regex"] if literal is None else re.escape(literal))


def _split_step(pattern: SplitPattern, behavior: str) -> Step:
    def step(before: Forms, after: Forms) -> tuple[Forms, Forms] | bool:
        if not _splits(pattern, before, after):
            return False
        if behavior not in _APART:
            return not any(map(pattern.touches, before | after)) and (before, after)
        if all(map(pattern.takes, before)) or all(map(pattern.takes, after)):
            return True
        return before, after  # both may stand in what it leaves between its matches

    return step


def _splits(pattern: SplitPattern, before: Forms, after: Forms) -> bool:
    return all(pattern.splits(one, two) for one, two in product(before, after))


def _unprefixed(mark: str) -> Step:
    """A prefix of each piece that does not begin with it: of which piece there is one is not known at a place."""
    return lambda before, after: after == {mark} and (before, after)


def _metaspace(mark: str) -> Step:
    def step(before: Forms, after: Forms) -> tuple[Forms, Forms] | bool:
        if mark in before or mark in after:
            return mark not in before and len(after) == 1
        return before, after

    return step


def _merges(tokenizer: Tokenizer) -> Step:
    """Merges of a text that nothing has split: none crosses a place whose characters no token holds side by side."""
    known = tokenizer.model.token_to_id

    @cache
    def vocabulary() -> str:
        return "\0".join(tokenizer.get_vocab(with_added_tokens=False))

    @lru_cache(256)
    def before_in_tokens(after: str) -> Forms:
        return frozenset(re.findall(f"(?s:.)(?={re.escape(after)})", vocabulary()))

    def step(before: Forms, after: Forms) -> tuple[Forms, Forms] | bool:
        if any(known(form) is None for form in before | after):
            return False  # unknown characters may become one, and bytes of several
        return not any(before & before_in_tokens(form) for form in after)

    return step
