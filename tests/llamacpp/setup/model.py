"""A tiny llama model with random weights as a GGUF file, with the vocabulary of the simulated engine.

usage: VENV/bin/python model.py TOKENIZER.json OUT.gguf      with the Python of llama.cpp's environment
"""

import json
import sys
from pathlib import Path

WIDTH, HEADS, LAYERS, INNER, CONTEXT = 256, 4, 4, 1024, 2048


def main(tokenizer: Path, out: Path) -> None:
    """Write the file under another name first, so that one that is there is whole."""
    import gguf
    import numpy as np

    told = json.loads(tokenizer.read_text())
    names = {**told["model"]["vocab"], **{each["content"]: each["id"] for each in told["added_tokens"]}}
    special = {each["content"]: each["id"] for each in told["added_tokens"]}
    tokens = sorted(names, key=lambda name: names[name])
    merges = [each if isinstance(each, str) else " ".join(each) for each in told["model"]["merges"]]
    part = out.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if name in special else gguf.TokenType.NORMAL for name in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(special["<|bos|>"])
    writer.add_eos_token_id(special["<|end|>"])
    writer.add_add_bos_token(False)
    draw = np.random.default_rng(5)

    def add(name: str, *shape: int) -> None:
        plain = np.ones(shape) if len(shape) == 1 else draw.normal(0.0, 0.02, shape)
        writer.add_tensor(f"{name}.weight", plain.astype(np.float32))

    add("token_embd", len(tokens), WIDTH)
    add("output_norm", WIDTH)
    add("output", len(tokens), WIDTH)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}", WIDTH, WIDTH)
        add(f"blk.{layer}.attn_norm", WIDTH)
        add(f"blk.{layer}.ffn_norm", WIDTH)
        add(f"blk.{layer}.ffn_gate", INNER, WIDTH)
        add(f"blk.{layer}.ffn_up", INNER, WIDTH)
        add(f"blk.{layer}.ffn_down", WIDTH, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
