"""Which prompts are sent, and which tokenizer reads them? Made-up words, the same for everyone, from a seed."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_STARTS = ["b", "ch", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v", "w", "z"]
_SYLLABLES = [start + vowel for start in _STARTS for vowel in ("a", "e", "i", "o", "u", "ai", "ou")]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def vocabulary(rng: random.Random, count: int = 4000) -> list[str]:
    """Return words of one to four syllables."""
    return ["".join(rng.choices(_SYLLABLES, k=rng.choice((1, 2, 2, 3, 3, 4)))) for _ in range(count)]


def make_model(folder: Path) -> None:
    """Write a folder with all that a gateway wants to know of a model: tokenizer, template, sizes; no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(7)
    words = vocabulary(rng)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((" ".join(rng.choices(words, k=200)) for _ in range(400)), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    files: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 131_072,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": TEMPLATE,
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": max(tokenizer.get_vocab_size(), 8192),
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 2,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "rope_theta": 10_000.0,
            **sizes,
        },
        "generation_config.json": {"eos_token_id": 2, "bos_token_id": 0, "max_length": 131_072},
    }
    for name, found in files.items():
        (folder / name).write_text(json.dumps(found))


def bodies(kind: str, words: int, seed: int, *, stream: bool, tokens: int, gap_ms: int) -> Iterator[bytes]:
    """Yield request bodies without end.

    Args:
        kind: ``new`` prompts share three quarters with one of 32 others and end differently; ``cold`` share nothing;
            ``repeated`` are 32 whole prompts over and over; ``turns`` are conversations that grow by 40 words with each
            turn.
    """
    rng = random.Random(seed)
    known = vocabulary(random.Random(7))
    say = lambda count: " ".join(rng.choices(known, k=count))  # noqa: E731
    more = {"max_tokens": tokens, "temperature": 0.0, "seed": gap_ms, **({"stream": True} if stream else {})}

    def body(messages: list[dict[str, str]]) -> bytes:
        return json.dumps({"model": "tiny", "messages": messages, **more}, separators=(",", ":")).encode()

    if kind == "turns":
        while True:
            chat = [{"role": "system", "content": say(words // 2)}]
            for _ in range(max(2, words // 80)):
                chat.append({"role": "user", "content": say(20)})
                yield body(chat)
                chat.append({"role": "assistant", "content": say(20)})
    while kind == "cold":
        yield body([{"role": "system", "content": say(words * 3 // 4)}, {"role": "user", "content": say(words // 4)}])
    shared = [say(words * 3 // 4) for _ in range(32)]
    if kind == "repeated":
        whole = [body([{"role": "system", "content": s}, {"role": "user", "content": say(words // 4)}]) for s in shared]
        while True:
            yield rng.choice(whole)
    while True:
        yield body([{"role": "system", "content": rng.choice(shared)}, {"role": "user", "content": say(words // 4)}])
