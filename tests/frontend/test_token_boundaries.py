"""Are a long text's tokens, put together from segments, those of the whole, for the rules of public tokenizers?"""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from penstock.frontend.prompt.chat_template import ChatTemplate
from penstock.frontend.prompt.prompt_tokenizer import SEGMENT, PromptTokenizer
from penstock.frontend.prompt.split_pattern import SplitPattern, UnknownRule
from penstock.frontend.prompt.token_boundaries import TokenBoundaries
from tests.depth import deep
from tests.frontend.test_prompt_tokenizer import CHATML
from tests.frontend.tokenizer_kinds import CORPUS, GPT4, KINDS, SPECIALS, byte_level, gpt2, trained

WITHOUT = {"scripts", "unigram, not split"}
"""Kinds whose rules give no boundary."""
WORDS = sorted({word for line in CORPUS for word in line.split()})
JOINTS = [" ", "  ", "\n", "\n\n", " \n", "\t", "\r\n", ", ", ".", "'s", "", "-", "、", "\u3000", "\u00a0", "▁", " ▁"]
MARKS = ["\u0301", "\u0338", "\u3099", "\u200d", "\u0600", "ſ", "ß", "😀", "ﬁ"]
ADDED = ["<mask>", "<pad>", "<|end|>", "<|user|>", "<unk>", "[MASK]", "stop", "nd", "and"]

word = st.sampled_from([*WORDS, *SPECIALS, *ADDED]) | st.sampled_from(MARKS) | st.text(max_size=3)
text = st.lists(st.tuples(word, st.sampled_from(JOINTS)).map("".join), max_size=14).map("".join)

MADE: dict[str, PromptTokenizer] = {}


def often_cut(kind: str) -> PromptTokenizer:
    """Return a tokenizer of a kind that cuts at every boundary."""
    if kind not in MADE:
        tokenizer = MADE[kind] = PromptTokenizer(KINDS[kind](), cache_bytes=20_000)
        assert tokenizer._cut is not None
        tokenizer._cut = replace(tokenizer._cut, segment=1)
    return MADE[kind]


@pytest.mark.parametrize("kind", KINDS)
@given(text, text, st.floats(0, 1), st.booleans())
@settings(max_examples=deep(40))
def test_tokens_of_segments_are_those_of_the_whole(
    kind: str, one: str, other: str, share: float, special: bool
) -> None:
    tokenizer = often_cut(kind)
    for prompt in (one, one[: int(len(one) * share)] + other, one):
        assert tokenizer.encode(prompt, special=special) == tokenizer.whole(prompt, special=special)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_known_of_a_long_text_is_not_encoded_again(kind: str) -> None:
    tokenizer = PromptTokenizer(KINDS[kind](), cache_bytes=1 << 20)
    long = "what a long text, with 12 numbers; is this? " * 2_000
    known = tokenizer.encode(long + "the end", special=True)
    encoded = tokenizer.tokens_encoded
    longer = long + "the end. and 34 more"
    assert tokenizer.encode(longer, special=True) == tokenizer.whole(longer, special=True)
    fresh = tokenizer.tokens_encoded - encoded
    assert fresh >= len(known) if kind in WITHOUT else fresh < len(known) * 2 * SEGMENT / len(long)


def test_a_chat_whose_long_message_ends_otherwise_is_encoded_from_there() -> None:
    template = ChatTemplate(CHATML)
    tokenizer = PromptTokenizer(byte_level(GPT4), template, cache_bytes=1 << 20)
    for end, most in ((" one", 1 << 30), (" two", 4 * SEGMENT), (" two", 0)):
        chat = [{"role": "user", "content": "hello world, this is text " * 1_000 + end}]
        rendered, encoded = template.render(chat), tokenizer.tokens_encoded
        assert tokenizer.encode(rendered, special=False) == tokenizer.whole(rendered, special=False)
        assert tokenizer.tokens_encoded - encoded <= most


def test_merges_that_cross_spaces_leave_no_boundary_there() -> None:
    assert TokenBoundaries(KINDS["llama2"]()).between("e", " ")
    assert not TokenBoundaries(KINDS["llama2 across words"]()).between("d", " ")


def test_rules_that_draw_at_random_leave_no_boundary() -> None:
    tokenizer = gpt2()
    assert TokenBoundaries(tokenizer).guard is not None
    tokenizer.model.dropout = 0.1
    assert TokenBoundaries(tokenizer).guard is None


def test_an_added_token_leaves_no_boundary_within_it_or_behind_it() -> None:
    tokenizer = gpt2()
    tokenizer.add_tokens([AddedToken("a, b"), AddedToken("yes!")])
    boundaries = TokenBoundaries(tokenizer)
    assert not boundaries.between("a", ",") and not boundaries.between("!", " ")
    assert boundaries.between("c", ",") and boundaries.between("?", " ")


def test_a_prefix_of_pieces_counts_where_a_place_may_begin_one() -> None:
    splits = [pre_tokenizers.Split(Regex("don"), "isolated"), pre_tokenizers.Metaspace(split=False)]
    tokenizer = trained(models.WordPiece(unk_token="[UNK]"), splits=pre_tokenizers.Sequence(splits))
    assert not TokenBoundaries(tokenizer).between("n", "'")


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "a*", "(?<=a)b", "(?<!a)b", r"\bword", "end$", "^a", r"(a)\1", "a(?!bc)", "(?!a*)b", "(?i)a", "(?i:é)"),
        *("(?>a)b", "[[:alpha:]]+", r"\p{Thai}", r"\x41", r"\Ga", "a|", "(a", "a)", "[a", "a{x}", "(?x: a)", r"\h+"),
        *("(?<n>a)",),
    ],
)  # fmt: skip
def test_what_is_not_understood_of_a_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(UnknownRule):
        SplitPattern(pattern)


ATOMS = [
    *("a", "e", " ", "'", r"\s", r"\S", r"\p{L}", r"\p{N}", r"\P{L}", r"\p{Lu}", "[a-m]", "[^a-m]", r"[^\s\p{L}\p{N}]"),
    *(
        r"[\r\n]",
        r"\.",
        r"\w",
        r"\W",
        r"\d",
        r"[\p{L}&&[^a-f]]",
        ".",
        "th",
        "(?i:'s|TH)",
        r"(?!\S)",
        r"(?=\s)",
        "(?!a)",
    ),
]
COUNTS = ["", "", "", "?", "*", "+", "{1,3}", "{2}", "{2,}", "?+", "*+", "++", "+?"]
part = st.tuples(st.sampled_from(ATOMS), st.sampled_from(COUNTS)).map(lambda p: p[0] + ("" if "(?" in p[0] else p[1]))
row = st.lists(part, min_size=1, max_size=3).map("".join)
group = st.tuples(st.lists(row, min_size=1, max_size=2).map("|".join), st.sampled_from(COUNTS)).map(
    lambda found: f"(?:{found[0]}){found[1]}"
)
pattern = st.lists(st.lists(row | group, min_size=1, max_size=2).map("".join), min_size=1, max_size=3).map("|".join)


@given(pattern, st.text("aeth ASn.,'12\n\r", min_size=2, max_size=24))
@settings(max_examples=deep(400))
def test_a_boundary_of_a_pattern_splits_no_match_of_any_text(pattern: str, whole: str) -> None:
    try:
        found, split = SplitPattern(pattern), pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception:  # noqa: BLE001  # we do not understand it, or Oniguruma refuses it, with a bare Exception
        assume(False)

    def pieces(part: str) -> list[str]:
        return [piece for piece, _ in split.pre_tokenize_str(part)]

    expected = pieces(whole)
    ends = set(accumulate(map(len, expected)))
    for place in range(1, len(whole)):
        before, after = whole[place - 1], whole[place]
        if found.splits(before, after) and (found.takes(before) or found.takes(after)):
            assert place in ends
            assert pieces(whole[:place]) + pieces(whole[place:]) == expected


def test_a_tokenizer_without_rules_is_left_whole() -> None:
    assert TokenBoundaries(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))).guard is None
