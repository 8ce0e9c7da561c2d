"""What model do the tests serve? A tiny Llama with random weights, a tokenizer and chat template, and a LoRA adapter.

usage: VENV/bin/python checkpoint.py FOLDER      with the Python of vLLM's environment

Weights are drawn widely and kept in full precision, so that the best token stands well clear of the second best: the
text at temperature 0 then does not depend on what else runs in the batch.
"""

import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

VOCABULARY = 2048
MAX_LEN = 2048
HIDDEN, LAYERS = 256, 2
ADAPTER = "poet"
"""Name of the adapter, and of its folder below the checkpoint's."""
RANK = 8
SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% if not (loop.last and message['role'] == 'assistant' and not add_generation_prompt) %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYLLABLES = (
    "ba",
    "ke",
    "li",
    "mo",
    "nu",
    "pra",
    "ste",
    "tri",
    "vo",
    "glu",
    "han",
    "dor",
    "fick",
    "reas",
    "tail",
    "ond",
)
SMALL = ("the", "a", "of", "and", "to", "in", "is", "it", "that", "for", "as", "on", "with", "by", "this", "from", "at")
SENTENCES = 6_000


def main(folder: Path) -> None:
    """Write the checkpoint under another name first, so that a folder that is there is whole."""
    part = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    part.mkdir(parents=True)
    tokenizer(part)
    _weights(part)
    _adapter(part / ADAPTER)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def text() -> Iterator[str]:
    """Yield made-up sentences to learn a vocabulary from: no file of this machine is needed."""
    rng = random.Random(3)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(1_500)]
    for _ in range(SENTENCES):
        sentence = " ".join(rng.choice(words if rng.random() < 0.6 else SMALL) for _ in range(rng.randint(4, 16)))
        yield f"{sentence.capitalize()}{rng.choice('.,;?!')} {rng.randint(0, 999)}\n"


def tokenizer(folder: Path) -> None:
    """Write a tokenizer of `VOCABULARY` tokens, learnt from made-up text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.decoder = decoders.ByteLevel()
    learnt.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learnt.train_from_iterator(text(), trainer)
    if learnt.get_vocab_size() > VOCABULARY:
        raise SystemExit(f"the tokenizer has {learnt.get_vocab_size()} tokens, more than the model")
    PreTrainedTokenizerFast(
        tokenizer_object=learnt,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        additional_special_tokens=SPECIAL[3:],
        chat_template=TEMPLATE,
        model_max_length=MAX_LEN,
    ).save_pretrained(folder)


def _weights(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_LEN,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder, safe_serialization=True)


def _adapter(folder: Path) -> None:
    """Write an adapter so strong that its words differ from the model's."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj"]
    weights = {}
    for layer in range(LAYERS):
        for target in targets:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN) * 0.2
            weights[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK) * 0.2
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "lora_dropout": 0.0}
    config |= {"bias": "none", "target_modules": targets, "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
