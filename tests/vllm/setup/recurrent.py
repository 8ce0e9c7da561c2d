"""What model goes on from a state? A tiny Qwen3-Next with random weights: half of its layers are gated delta nets.

usage: VENV/bin/python recurrent.py FOLDER      with the Python of vLLM's environment

vLLM's CPU build takes them in bfloat16 only, so a server of it needs ``--dtype bfloat16``. A state of one head of 64
fits into the page of 32 tokens; one of 128 makes vLLM take blocks of 96.
"""

import os
import shutil
import sys
from pathlib import Path

from checkpoint import HIDDEN, MAX_LEN, VOCABULARY, tokenizer

LAYERS, HEAD = 4, 64
DECAY = -5.0
"""Logarithm: states forget so slowly that a text differs where one is lost. As drawn, most texts do not."""


def main(folder: Path) -> None:
    """Write the checkpoint under another name first, so that a folder that is there is whole."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    part = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    part.mkdir(parents=True)
    tokenizer(part)
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_LEN,
        layer_types=["linear_attention", "full_attention"] * (LAYERS // 2),
        linear_key_head_dim=HEAD,
        linear_value_head_dim=HEAD,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        mlp_only_layers=[0, 2, 3],  # vLLM asks for one layer of experts
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    model = Qwen3NextForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith("A_log"):
                weights.fill_(DECAY)
    model.save_pretrained(part, safe_serialization=True)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
