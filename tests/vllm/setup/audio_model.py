"""Makes a tiny model that hears: Qwen2-Audio with random weights, 25 tokens a second, and a few sounds as files.

Its tokenizer is that of `checkpoint.py`.

usage: VENV/bin/python audio_model.py FOLDER      with the Python of vLLM's environment
"""

import os
import shutil
import sys
from pathlib import Path

import checkpoint

SOUND, MARKS = "<|AUDIO|>", ("<|audio_bos|>", "<|audio_eos|>")
NAME = "Qwen2AudioForConditionalGeneration"
RATE, SECONDS = 16_000, 4
SOUNDS = {"low.wav": 220.0, "high.wav": 880.0, "low.flac": 220.0}
"""File name -> Hz of the tone in it."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main(folder: Path) -> None:
    """Write all under another name first, so that a folder that is there is whole."""
    import torch
    from safetensors.torch import save_file
    from transformers import (
        AutoTokenizer,
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    part = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    part.mkdir(parents=True)
    checkpoint.tokenizer(part)
    tokenizer = AutoTokenizer.from_pretrained(part)
    tokenizer.add_special_tokens({"additional_special_tokens": [*checkpoint.SPECIAL[3:], SOUND, *MARKS]})
    tokenizer.chat_template = TEMPLATE
    ears = WhisperFeatureExtractor(feature_size=128, sampling_rate=RATE)
    Qwen2AudioProcessor(ears, tokenizer, chat_template=TEMPLATE).save_pretrained(part)
    torch.manual_seed(0)
    text = {"model_type": "qwen2", "vocab_size": len(tokenizer), "hidden_size": 256, "intermediate_size": 512}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    text |= {"max_position_embeddings": checkpoint.MAX_LEN, "tie_word_embeddings": False}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    audio = {"model_type": "qwen2_audio_encoder", "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2}
    audio |= {"encoder_ffn_dim": 128, "num_mel_bins": 128}
    sound = tokenizer.convert_tokens_to_ids(SOUND)
    config = Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=sound, architectures=[NAME])
    config.save_pretrained(part)
    weights = Qwen2AudioForConditionalGeneration(config).float().state_dict()
    save_file({_published(name): value.contiguous() for name, value in weights.items()}, part / "model.safetensors")
    _sounds(part / "sounds")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def _published(name: str) -> str:
    """Return a weight's name as checkpoints of the family have it: vLLM reads no newer one."""
    name = name.removeprefix("model.")
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    return name.replace("language_model.", "language_model.model.", 1)


def _sounds(folder: Path) -> None:
    import numpy
    import soundfile

    folder.mkdir()
    for name, pitch in SOUNDS.items():
        wave = 0.4 * numpy.sin(2 * numpy.pi * pitch * numpy.arange(RATE * SECONDS) / RATE)
        soundfile.write(folder / name, wave, RATE, subtype="PCM_16")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
