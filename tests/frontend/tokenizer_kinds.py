"""Small tokenizers with the rules of public ones, trained here on a few lines."""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "hello world this is a text with 123 numbers, and 4567 more; isn't it?",
    "don't  stop\n\nnever.\tThe   end...  We'll see: they've said I'm (not) here!",
    "wörld é漢字，你好。 привет мир, как дела? こんにちは",
    "def f(x):\n    return x+1  # comment\n\nclass A_b:\n\tpass\r\n",
    "user assistant system HELLO World CamelCase snake_case kebab-case a/b c\\d <tag> [x] {y}",
] * 4
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT4 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = GPT4.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CLIP = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]


def trained(
    model: Any, *, normalizer: Any = None, splits: Any = None, alphabet: bool = False, vocabulary: int = 500
) -> Tokenizer:
    """Train a tokenizer; ``alphabet``: of bytes."""
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splits is not None:
        tokenizer.pre_tokenizer = splits
    options: dict[str, Any] = {"show_progress": False, "vocab_size": vocabulary}
    if isinstance(model, models.Unigram):
        trainer: Any = trainers.UnigramTrainer(special_tokens=["<unk>"], unk_token="<unk>", **options)
    elif isinstance(model, models.WordPiece):
        trainer = trainers.WordPieceTrainer(special_tokens=["[UNK]", "[CLS]", "[MASK]"], **options)
    elif isinstance(model, models.WordLevel):
        trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]"], **options)
    else:
        more: dict[str, Any] = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()} if alphabet else {}
        if model.end_of_word_suffix:
            more["end_of_word_suffix"] = model.end_of_word_suffix
        bytes_apart = [f"<0x{byte:02X}>" for byte in range(256)] if model.byte_fallback else []
        trainer = trainers.BpeTrainer(special_tokens=["<unk>", *bytes_apart], **options, **more)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return tokenizer


def byte_level(*patterns: str, normalizer: Any = None, **model: Any) -> Tokenizer:
    """A byte-level BPE that splits by some patterns, one after the other."""
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return trained(models.BPE(**model), normalizer=normalizer, splits=pre_tokenizers.Sequence(splits), alphabet=True)


def sentence_piece(
    normalizer: Any, splits: Any, *, corpus_words: bool = True, fuse: bool = True, fallback: bool = True
) -> Tokenizer:
    """A BPE over whole texts, whose merges are learnt from words where ``corpus_words``, else across them, too."""
    model = models.BPE(byte_fallback=fallback, fuse_unk=fuse, unk_token="<unk>")
    learnt_by = pre_tokenizers.Metaspace(prepend_scheme="never") if corpus_words else None
    tokenizer = trained(model, splits=learnt_by, vocabulary=700)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splits
    return tokenizer


def with_added(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    """Add tokens to a tokenizer."""
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def gpt2(*, prefix: bool = False) -> Tokenizer:
    return trained(models.BPE(), splits=pre_tokenizers.ByteLevel(add_prefix_space=prefix), alphabet=True)


def _unknown() -> Any:
    return models.BPE(unk_token="<unk>")


_SPACES = normalizers.Replace(" ", "▁")
_PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), _SPACES])
_T5 = normalizers.Sequence([normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")])
_FALCON = [
    pre_tokenizers.Punctuation("contiguous"),
    pre_tokenizers.ByteLevel(add_prefix_space=False),
    pre_tokenizers.Digits(individual_digits=False),
    pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
]
_CLIP = [pre_tokenizers.Split(Regex(CLIP), "removed", invert=True), pre_tokenizers.ByteLevel(False, use_regex=False)]

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": gpt2,
    "roberta": lambda: with_added(gpt2(prefix=True), AddedToken("<mask>", lstrip=True, normalized=False)),
    "llama3": lambda: byte_level(GPT4, ignore_merges=True),
    "qwen2": lambda: byte_level(QWEN, normalizer=normalizers.NFC()),
    "o200k": lambda: byte_level(O200K),
    "cl100k": lambda: byte_level(CL100K),
    "kimi": lambda: byte_level(KIMI),
    "deepseek": lambda: byte_level(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK),
    "bloom": lambda: byte_level(BLOOM),
    "starcoder": lambda: trained(
        models.BPE(),
        splits=pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
        alphabet=True,
    ),
    "falcon": lambda: trained(models.BPE(), splits=pre_tokenizers.Sequence(_FALCON), alphabet=True),
    "clip": lambda: trained(
        models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"),
        normalizer=normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        ),
        splits=pre_tokenizers.Sequence(_CLIP),
        alphabet=True,
    ),
    "llama2": lambda: sentence_piece(_PREPENDED, None),
    "llama2 across words": lambda: sentence_piece(_PREPENDED, None, corpus_words=False),
    "llama2 legacy": lambda: with_added(sentence_piece(_PREPENDED, None), AddedToken("<pad>", normalized=True)),
    "mistral": lambda: sentence_piece(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "gemma": lambda: with_added(
        sentence_piece(_SPACES, pre_tokenizers.Split(" ", "merged_with_previous")),
        AddedToken("\n\n", normalized=False),
        AddedToken("▁▁", normalized=False),
    ),
    "bpe without bytes": lambda: sentence_piece(_PREPENDED, None, fallback=False),
    "t5": lambda: trained(
        models.Unigram(), normalizer=_T5, splits=pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    ),
    "older t5": lambda: trained(
        models.Unigram(),
        splits=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    ),
    "unigram, not split": lambda: trained(models.Unigram(), normalizer=_PREPENDED),
    "xlnet": lambda: trained(
        models.Unigram(),
        normalizer=normalizers.Sequence(
            [
                normalizers.Replace("``", '"'),
                normalizers.Replace("''", '"'),
                normalizers.NFKD(),
                normalizers.StripAccents(),
                normalizers.Replace(Regex(" {2,}"), " "),
            ]
        ),
        splits=pre_tokenizers.Metaspace(),
    ),
    "bert": lambda: trained(
        models.WordPiece(unk_token="[UNK]"),
        normalizer=normalizers.BertNormalizer(),
        splits=pre_tokenizers.BertPreTokenizer(),
    ),
    "bert, cased": lambda: trained(
        models.WordPiece(unk_token="[UNK]"),
        normalizer=normalizers.BertNormalizer(lowercase=False, handle_chinese_chars=False),
        splits=pre_tokenizers.BertPreTokenizer(),
    ),
    "words": lambda: trained(models.WordLevel(unk_token="[UNK]"), splits=pre_tokenizers.Whitespace()),
    "delimiter": lambda: trained(_unknown(), splits=pre_tokenizers.CharDelimiterSplit(",")),
    "phi3": lambda: with_added(
        sentence_piece(_PREPENDED, None),
        AddedToken("<|user|>", rstrip=True, normalized=False),
        AddedToken("<|end|>", rstrip=True, normalized=False),
    ),
    "odd added tokens": lambda: with_added(
        byte_level(GPT4, normalizer=normalizers.NFKC()),
        AddedToken("hello", single_word=True, normalized=True),
        AddedToken("stop", normalized=True),
        AddedToken("nd", lstrip=True, rstrip=True, normalized=True),
        AddedToken("world", single_word=True, normalized=False),
        AddedToken(", a", normalized=False),
        AddedToken(".", normalized=False, rstrip=True),
    ),
    "scripts": lambda: trained(_unknown(), splits=pre_tokenizers.UnicodeScripts()),
    "other behaviors": lambda: trained(
        _unknown(),
        splits=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"[.,]\s*"), "merged_with_previous"),
                pre_tokenizers.Split(Regex(r"\s+"), "merged_with_next"),
                pre_tokenizers.Split(Regex("[aeiou]"), "contiguous"),
            ]
        ),
    ),
}
