"""Makes a tiny model that sees: Idefics3 with random weights, 64 tokens an image and three marks around them.

Its tokenizer is that of `checkpoint.py`. Of vLLM's models that see, it is one whose import needs no torchvision.

usage: VENV/bin/python vision.py FOLDER      with the Python of vLLM's environment
"""

import os
import shutil
import sys
from pathlib import Path

import checkpoint

SIDE, PATCH = 112, 14
"""Pixels: an image is brought to SIDE x SIDE, and has a token for each PATCH x PATCH."""
IMAGE = "<image>"
MARKS = ("<fake_token_around_image>", IMAGE, "<global-img>", "<end_of_utterance>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main(folder: Path) -> None:
    """Write the checkpoint under another name first, so that a folder that is there is whole."""
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessor,
        Idefics3Processor,
        LlamaConfig,
    )

    part = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    part.mkdir(parents=True)
    checkpoint.tokenizer(part)
    tokenizer = AutoTokenizer.from_pretrained(part)
    tokenizer.add_special_tokens({"additional_special_tokens": [*checkpoint.SPECIAL[3:], *MARKS]})
    tokenizer.chat_template = TEMPLATE
    pixels = {"longest_edge": SIDE}
    eyes = Idefics3ImageProcessor(size=pixels, max_image_size=pixels, do_image_splitting=False)
    processor = Idefics3Processor(eyes, tokenizer, image_seq_len=(SIDE // PATCH) ** 2, chat_template=TEMPLATE)
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=checkpoint.MAX_LEN,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        scale_factor=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    Idefics3ForConditionalGeneration(config).to(torch.float32).save_pretrained(part, safe_serialization=True)
    processor.save_pretrained(part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
