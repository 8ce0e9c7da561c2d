"""Maker of the simulated model's tokenizer: ``python -m tests.lab.sim.tokenizer_maker OUT`` writes its files."""

import json
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

from penstock.kernel.values import JsonObject
from penstock_lab.sim.sim_tokenizer import DATA_DIR, END, WORDS, byte_letters

MERGES = 768
SPECIALS = ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|image|>")
CHAT_TEMPLATE = (
    "<|bos|>"
    "{%- if tools %}<|system|>You may call these tools: {{ tools | tojson }}<|end|>{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role in ('system', 'developer') %}<|system|>"
    "{%- elif message.role == 'assistant' %}<|assistant|>"
    "{%- elif message.role in ('tool', 'function') %}<|tool|>"
    "{%- else %}<|user|>{% endif %}"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- elif message.content %}"
    "{%- for part in message.content %}{% if part.text is defined %}{{ part.text }}{% else %}<|image|>{% endif %}"
    "{%- endfor %}"
    "{%- endif %}"
    "{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "<|end|>"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)


def learn_merges(words: Counter[str], count: int) -> list[tuple[str, str]]:
    """Learn byte-pair merges: the most frequent pair each time, ties by spelling, for one result everywhere."""
    letters = byte_letters()
    spelt = {tuple(letters[byte] for byte in word.encode()): often for word, often in words.items()}
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for pieces, often in spelt.items():
            for pair in pairwise(pieces):
                pairs[pair] += often
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        spelt = {_merged(pieces, best): often for pieces, often in spelt.items()}
    return merges


def tokenizer_files() -> dict[str, str]:
    """Return the tokenizer's files: name -> content."""
    # A word mostly follows a space; its rank stands in for how often it is used.
    learnt: Counter[str] = Counter()
    for rank, word in enumerate(WORDS):
        learnt[" " + word] += 4 + 400 // (rank + 1)
        learnt[word.capitalize()] += 1
    merges = learn_merges(learnt, MERGES)
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    first = len(vocabulary)
    added = [
        {
            "id": first + place,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for place, content in enumerate(SPECIALS)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in merges],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": END,
        "pad_token": END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131_072,
        "chat_template": CHAT_TEMPLATE,
    }
    model = {
        "architectures": ["PenstockSimForCausalLM"],
        "model_type": "penstock_sim",
        "vocab_size": first + len(SPECIALS),
        "max_position_embeddings": 131_072,
        "bos_token_id": first,
        "eos_token_id": first + SPECIALS.index(END),
    }
    return {"tokenizer.json": _text(tokenizer), "tokenizer_config.json": _text(config), "config.json": _text(model)}


def write(folder: Path) -> None:
    """Write the tokenizer's files into a folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files().items():
        (folder / name).write_text(content, encoding="utf-8", newline="\n")


def _merged(pieces: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    at = 0
    while at < len(pieces):
        if pieces[at : at + 2] == pair:
            out.append(pieces[at] + pieces[at + 1])
            at += 2
        else:
            out.append(pieces[at])
            at += 1
    return tuple(out)


def _text(value: JsonObject) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA_DIR)
