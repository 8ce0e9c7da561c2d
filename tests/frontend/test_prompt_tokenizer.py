"""Does the tokenizer cache change nothing but the time, and can a template reach nothing but its arguments?"""

import asyncio
import json
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.frontend.prompt.chat_template import MARK, ChatTemplate, TemplateFailed, plain_text
from penstock.frontend.prompt.prompt_hashing import BlockHashing, PromptHasher
from penstock.frontend.prompt.prompt_tokenizer import PromptTokenizer, load_tokenizer
from penstock.frontend.prompt.request_body import parse
from penstock.kernel.errors import ClientError, ConfigError, OverloadedError
from penstock.kernel.hashing import block_hashes
from penstock.kernel.values import Prompt
from tests.depth import deep

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% for p in m.content %}{{ p.text if p.type == 'text' else '<img>' }}{% endfor %}"
    "{% endfor %}"
)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|im"]
CORPUS = [
    "hello world this is a text with 123 numbers",
    "don't  stop\n\nnever",
    "wörld é漢字",
    "user assistant system",
] * 4


def bpe(*, special: list[str] | None = None, metaspace: bool = False, bos: bool = False, **added: Any) -> Tokenizer:
    """Train a small tokenizer of one of the two common families."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=metaspace, unk_token="<unk>" if metaspace else None))
    names = SPECIALS if special is None else special
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=added.pop("scheme", "first"))
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    else:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=added.pop("prefix", False))
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False, **added) for name in names])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[(n, tokenizer.token_to_id(n)) for n in ("<s>", "</s>")]
        )
    return tokenizer


FAMILIES = {
    "byte-level": lambda: bpe(),
    "byte-level with bos": lambda: bpe(bos=True),
    "prefix space": lambda: bpe(prefix=True),
    "sentencepiece first": lambda: bpe(metaspace=True),
    "sentencepiece always": lambda: bpe(metaspace=True, scheme="always", bos=True),
    "greedy specials": lambda: bpe(lstrip=True),
    "rstrip": lambda: bpe(rstrip=True),
    "no specials": lambda: bpe(special=[]),
}
CACHED = {name: PromptTokenizer(make(), cache_bytes=20_000, cache_entries=40) for name, make in FAMILIES.items()}

pieces = st.lists(
    st.sampled_from([*SPECIALS, " ", "\n", "  ", "hello", "wor", "ld", "<", "|", "im_start", ">", "12", "é", "漢", "▁"])
    | st.text(max_size=6),
    max_size=24,
)


@pytest.mark.parametrize("family", FAMILIES)
@given(pieces, st.booleans())
@settings(max_examples=deep(150))
def test_tokens_by_parts_equal_tokens_of_the_whole(family: str, parts: list[str], special: bool) -> None:
    tokenizer = CACHED[family]
    text = "".join(parts)
    for _ in range(2):
        assert tokenizer.encode(text, special=special) == tokenizer.whole(text, special=special)


def test_cache_is_off_where_cutting_changes_tokens() -> None:
    assert CACHED["byte-level"].caches and CACHED["byte-level with bos"].caches
    by_no_rule = bpe(special=[])
    by_no_rule.pre_tokenizer = pre_tokenizers.UnicodeScripts()
    found = PromptTokenizer(by_no_rule, cache_bytes=20_000)
    assert not found.caches and found.why_no_cache


def test_next_turn_encodes_only_what_is_new() -> None:
    tokenizer = PromptTokenizer(bpe(), ChatTemplate(CHATML), cache_bytes=1 << 20)
    assert tokenizer.template is not None
    chat = [{"role": "system", "content": "long " * 500}, {"role": "user", "content": "one"}]
    first = tokenizer.encode(tokenizer.template.render(chat), special=False)
    encoded = tokenizer.tokens_encoded
    assert encoded == len(first)
    chat += [{"role": "assistant", "content": "answer"}, {"role": "user", "content": "two"}]
    second = tokenizer.encode(tokenizer.template.render(chat), special=False)
    # All of the first turn but its open end, the assistant's empty beginning, is found.
    shared = len(first) - 12
    assert second[:shared] == first[:shared]
    assert tokenizer.tokens_encoded - encoded < 40
    assert tokenizer.hits >= 4 and tokenizer.tokens_cached > 400


def test_cache_is_bounded_in_bytes_and_entries() -> None:
    tokenizer = PromptTokenizer(bpe(), cache_bytes=40_000, cache_entries=1000)
    for number in range(300):
        tokenizer.encode(f"<|im_start|>part {number} " + "x" * 100 + "<|im_end|>", special=False)
        assert tokenizer.cache_bytes <= 40_000
    assert 0 < tokenizer.cache_entries < 300
    tokenizer.encode("<|im_start|>" + "huge " * 5_000, special=False)
    assert tokenizer.cache_entries > 1  # one huge text did not push the others out
    few = PromptTokenizer(bpe(), cache_bytes=1 << 20, cache_entries=3)
    for number in range(9):
        few.encode(f"<s>{number}", special=False)
    assert few.cache_entries == 3


async def test_threads_share_the_cache_safely() -> None:
    tokenizer = PromptTokenizer(bpe(), cache_bytes=30_000)
    texts = [f"<|im_start|>user\n{n % 7} hello<|im_end|>\n<|im_start|>x{n % 13}" for n in range(60)]
    wanted = [tokenizer.whole(text, special=False) for text in texts]
    for _ in range(3):
        found = await asyncio.gather(*(asyncio.to_thread(tokenizer.encode, t, special=False) for t in texts))
        assert found == wanted


def test_model_folder_is_loaded_with_its_template(tmp_path: Path) -> None:
    bpe().save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": CHATML, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = load_tokenizer(str(tmp_path), cache_bytes=1 << 20)
    assert found.template is not None and found.caches
    listed = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(listed))
    found = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert found.template is not None and found.template.render([]) == "D"
    (tmp_path / "chat_template.jinja").write_text("J{{ bos_token }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = load_tokenizer(str(tmp_path))
    assert found.template is not None and found.template.render([]) == "J<s>"
    (tmp_path / "chat_template.jinja").write_text("{% broken")
    with pytest.raises(ConfigError):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError):
        load_tokenizer("builtin:nothing")


# --- templates ------------------------------------------------------------------------------------------------------

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context.environment.from_string('x') }}",
    "{{ raise_exception.__globals__['os'] }}",
    "{{ strftime_now.__globals__ }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ (1).__class__.__bases__ }}",
    "{% set x = messages.append(1) %}",
    "{% set x = messages[0].update({'role': 'system'}) %}",
    "{{ '%s'.__mod__.__self__.__class__.__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{% for i in range(10000000) %}x{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ joiner.__init__.__globals__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_sandbox_holds(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    try:
        found = ChatTemplate(source).render(messages)
    except TemplateFailed:
        pass
    else:
        # What jinja answers with nothing, it has refused to look up.
        assert all(word not in found for word in ("class", "uid=", "root:", "module", "built-in")), found
    assert messages == [{"role": "user", "content": "hi"}]


def test_clients_text_is_never_a_template() -> None:
    template = ChatTemplate(CHATML)
    text = template.render([{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}])
    assert "{{ 7 * 7 }}{% raw %}" in text and "49" not in text


def test_runaway_template_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.prompt.chat_template.RENDERED_MAX", 10_000)
    with pytest.raises(TemplateFailed):
        ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}").render(
            []
        )


def test_usual_helpers() -> None:
    source = (
        "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}{{ {'b': '<é>'} | tojson }}"
        "{% for x in [1, 2] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}"
    )
    assert ChatTemplate(source).render([]).endswith('{"b": "<é>"}1')
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([])
    kwargs = ChatTemplate("{{ enable_thinking }}").render([], kwargs={"enable_thinking": False})
    assert kwargs == "False"


def test_parts_tool_calls_and_open_ends() -> None:
    template = ChatTemplate(CHATML)
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    text = template.render([{"role": "user", "content": parts}])
    other = template.render([{"role": "user", "content": [parts[0], {"type": "image_url", "image_url": {"url": "y"}}]}])
    assert "a\n" in text and text.count(MARK) == 2 and text != other
    assert ChatTemplate(PARTS).render([{"role": "user", "content": parts}], mark=True) == f"a{MARK}"
    calls = [{"function": {"name": "f", "arguments": '{"x": 1}'}}]
    shown = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.x }}")
    assert shown.render([{"role": "assistant", "content": None, "tool_calls": calls}]) == "1"
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so far"}]
    cut = template.render(chat, add_generation_prompt=False, continue_final_message=True)
    assert cut.endswith("so far")
    listing = ChatTemplate("{% for m in messages %}{% for p in m['content'] %}{{ p.type }}{% endfor %}{% endfor %}")
    heard = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    seen = {"type": "video_url", "video_url": {"url": "x"}}
    assert listing.render([{"role": "user", "content": [*parts, heard, seen]}]) == "textimageaudiovideo"


def test_plain_text_is_the_same_for_the_same_chat_only() -> None:
    one = plain_text([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert one.startswith(plain_text([{"role": "user", "content": "a"}]))
    assert one != plain_text([{"role": "user", "content": "ab"}, {"role": "assistant", "content": ""}])


# --- prompts --------------------------------------------------------------------------------------------------------


def chat_body(content: str, **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **more}).encode()


async def test_blocks_are_those_of_the_rendered_tokens() -> None:
    tokenizer = PromptTokenizer(bpe(), ChatTemplate(CHATML), cache_bytes=1 << 20)
    stages: list[str] = []
    prompts = PromptHasher(1, 4, lambda name, took: stages.append(name))
    hashing = BlockHashing(block_size=16, text_block_bytes=64, adapter="lora", salt="s")
    for content in ("short", "long " * 2_000):
        found = await prompts.prepare(parse("chat_completions", chat_body(content)), tokenizer, hashing)
        text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        tokens = tokenizer.whole(text, special=False)
        assert found.isl == len(tokens) and not found.estimated
        assert found.blocks == block_hashes(tokens, 16, lora="lora", salt="s")
    assert set(stages) == {"template", "tokenize"}
    prompts.close()


async def test_without_tokenizer_text_blocks_stand_in() -> None:
    prompts = PromptHasher(1, 4, lambda name, took: None)
    hashing = BlockHashing(block_size=16, text_block_bytes=64)
    one = await prompts.prepare(parse("chat_completions", chat_body("word " * 100)), None, hashing)
    two = await prompts.prepare(parse("chat_completions", chat_body("word " * 100 + "more " * 50)), None, hashing)
    assert one.estimated and one.isl > 100
    assert two.blocks[: len(one.blocks)] == one.blocks and len(two.blocks) > len(one.blocks)
    prompts.close()


async def test_template_that_refuses_costs_only_quality() -> None:
    tokenizer = PromptTokenizer(bpe(), ChatTemplate("{{ raise_exception('no') }}"))
    prompts = PromptHasher(1, 4, lambda name, took: None)
    found = await prompts.prepare(parse("chat_completions", chat_body("x" * 100)), tokenizer, BlockHashing(16, 64))
    assert found.isl > 0 and prompts.template_failures == 1
    prompts.close()


async def test_token_data_and_bad_token_ids() -> None:
    prompts = PromptHasher(1, 4, lambda name, took: None)
    parsed = parse("chat_completions", chat_body("x"))
    found = await prompts.prepare(parsed, None, BlockHashing(2, 64), token_data=[1, 2, 3, 4])
    assert found.blocks == block_hashes(array("I", [1, 2, 3, 4]), 2) and found.isl == 4
    with pytest.raises(ClientError):
        await prompts.prepare(parsed, None, BlockHashing(2, 64), token_data=[2**32])
    prompts.close()


async def test_full_pool_refuses() -> None:
    prompts = PromptHasher(1, 1, lambda name, took: None)
    tokenizer = PromptTokenizer(bpe(), ChatTemplate(CHATML))
    parsed = parse("chat_completions", chat_body("long " * 20_000))
    tasks = [asyncio.create_task(prompts.prepare(parsed, tokenizer, BlockHashing(16, 64))) for _ in range(4)]
    found = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [error for error in found if isinstance(error, OverloadedError)]
    assert len(refused) == 2 and refused[0].status == 503 and prompts.pending == 0
    prompts.close()


async def test_a_long_prompt_that_is_known_but_for_its_end_needs_no_thread() -> None:
    tokenizer = load_tokenizer("builtin:sim", cache_bytes=1 << 20)
    hasher, threads = PromptHasher(1, 4, lambda name, took: None), list[bool]()
    encode = tokenizer._encode

    def watched(texts: Any, special: bool) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        return encode(texts, special)

    tokenizer._encode = watched  # type: ignore[method-assign]

    async def prepared(*contents: str) -> Prompt:
        roles = ("system", "user", "assistant", "user")
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
        parsed = parse("chat_completions", json.dumps({"model": "m", "messages": messages}).encode())
        return await hasher.prepare(parsed, tokenizer, BlockHashing(16, 64))

    long = "what a long text this is " * 400
    first = await prepared(long, "hello")
    assert threads == [True], "its tokens are made in a thread"
    again = await prepared(long, "hello")
    assert threads == [True] and again == first, "nothing is left to tokenise"
    longer = await prepared(long, "hello", "good day", "and now")
    assert threads == [True, False] and longer.isl > first.isl
    hasher.close()
