"""Tokenizer of the simulated model: a small byte-level BPE made by Penstock, and the code that makes it.

``python -m penstock.adapters.engines.sim.sim_tokenizer OUT`` writes the three files of `DATA_DIR` again, byte for byte.
Ids 0..255 are the bytes, then come the merges learnt from `WORDS`, then the special tokens. Any text can be encoded.
"""

import json
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

from penstock.kernel.values import JsonObject

DATA_DIR = Path(__file__).parent / "data"
MERGES = 768
SPECIALS = ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|image|>")
END = "<|end|>"
TURN = "<|assistant|>"
IMAGE = "<|image|>"
IMAGE_TOKENS = 256
"""Tokens that an image takes, whatever its size: as many as Gemma 3's."""

_TEXT = (
    "the a of and to in is it on for with as at by from this that each one all more most some any no not than then "
    "water river stream flow gate valve pipe channel basin reservoir dam wall spill turbine wheel shaft blade rotor "
    "power head pressure level meter gauge pump tank inlet outlet bend slope fall height depth width length volume "
    "when where while until before after above below under over between along across through around near far "
    "opens closes turns rises falls fills drains runs stops starts holds carries feeds leads meets joins parts waits "
    "moves keeps gives takes brings sends comes goes grows slows drops lifts drives steers guides rests settles "
    "morning evening night day hour minute second winter spring summer autumn rain snow ice wind cloud storm sun "
    "first second third last next early late slow fast steady quiet loud heavy light small large deep shallow narrow "
    "wide long short full empty open closed clear cold warm old new high low even equal common simple plain whole "
    "engine machine worker keeper engineer miller village valley mountain bridge road field forest stone iron steel "
    "wood copper cable lamp house room door window table paper letter number list line point step turn path plan "
    "question answer reason cause effect example result measure limit rule case part side end middle start change "
    "because since though unless whether often always never seldom again still already only almost about enough "
    "we you they he she who what which how why there here now today together apart alone once twice many few less "
    "can may must should will would could has have had was were been being does did done made found seen known said "
    "account balance check control count cost share store load queue cache block page token batch request response "
    "model prompt prefix session cluster router planner replica memory network schedule window sample summary report"
)
WORDS = tuple(_TEXT.split())
"""The words that answers are made of; the merges are learnt from them alone."""

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


def byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a byte-level vocabulary: printable ones stand for themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in plain}
    spare = 0x100
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(spare)
            spare += 1
    return [letters[byte] for byte in range(256)]


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
