"""What model has two groups of attention layers? A tiny Gemma 3 with random weights: half of its layers see a window.

usage: VENV/bin/python windowed.py FOLDER      with the Python of vLLM's environment
"""

import os
import shutil
import sys
from pathlib import Path

from checkpoint import HIDDEN, MAX_LEN, VOCABULARY, tokenizer

WINDOW, LAYERS = 128, 4


def main(folder: Path) -> None:
    """Write the checkpoint under another name first, so that a folder that is there is whole."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    part = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    part.mkdir(parents=True)
    tokenizer(part)
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_LEN,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    Gemma3ForCausalLM(config).to(torch.float32).save_pretrained(part, safe_serialization=True)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
