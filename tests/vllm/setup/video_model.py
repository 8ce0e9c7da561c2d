"""Makes a tiny model that watches videos, Ovis2.5 with random weights, and a few films as files.

Its tokenizer is that of `checkpoint.py`. Of vLLM's models that take videos, it is one whose processor needs no
torchvision, which has no build here that goes with vLLM's CPU build; all frames are one run of its pad token.

usage: VENV/bin/python video_model.py FOLDER      with the Python of vLLM's environment
"""

import json
import os
import shutil
import sys
from pathlib import Path

import checkpoint

PAD, PAD_ID = "<|image_pad|>", 151_655
"""Token of a frame's pieces: vLLM's Ovis2.5 has its id in its code..."""
MARKS = ("<image>", "<video>", "<ovis_visual_atom>", "<ovis_image_start>", "<ovis_image_end>")
MARKS += ("<ovis_video_start>", "<ovis_video_end>")
MARKS_ID = 151_669
"""... and those of the last four of these."""
VOCABULARY = 151_680
HIDDEN, LAYERS, WIDTH, VISUAL = 64, 2, 64, 128
PATCH, STRIDE = 28, 2
"""A frame is brought to 448 x 448 pixels; a token stands for STRIDE x STRIDE patches: 64 tokens a frame."""
SIDE, FRAMES = 64, 4
FILMS = {"ball.mp4": ("mp4v", 1), "disc.mp4": ("mp4v", 2), "ball.avi": ("MJPG", 1)}
"""File name -> (codec, what moves in it)."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] in ('image', 'video') %}<{{ part['type'] }}>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIGURATION = '''\
"""Configuration of a tiny Ovis2.5, whose class comes with each checkpoint."""

from transformers import PreTrainedConfig, Qwen3Config, Siglip2VisionConfig


class TinyOvisConfig(PreTrainedConfig):
    model_type = "ovis2_5"
    sub_configs = {"llm_config": Qwen3Config, "vit_config": Siglip2VisionConfig}

    def __init__(self, llm_config=None, vit_config=None, visual_vocab_size=128, hidden_size=64, **kwargs):
        self.llm_config = Qwen3Config(**(llm_config or {}))
        self.text_config = self.llm_config
        vision = dict(vit_config or {})
        vision.pop("model_type", None)
        self.vit_config = Siglip2VisionConfig(**vision)
        self.vit_config.model_type = "siglip2_navit"
        self.visual_vocab_size = visual_vocab_size
        self.hidden_size = hidden_size
        super().__init__(**kwargs)
'''


def main(folder: Path) -> None:
    """Write all under another name first, so that a folder that is there is whole."""
    part = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    part.mkdir(parents=True)
    _tokenizer(part)
    _weights(part)
    _films(part / "films")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def _tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    checkpoint.tokenizer(folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    first = max(state["model"]["vocab"].values()) + 1
    like = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    names = {PAD_ID: PAD} | {MARKS_ID + number: name for number, name in enumerate(MARKS)}
    state["model"]["vocab"] |= {
        names.get(number, f"<|unused{number}|>"): number for number in range(first, MARKS_ID + len(MARKS))
    }
    state["added_tokens"] += [{"id": number, "content": name, **like} for number, name in names.items()]
    (folder / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids([PAD, MARKS[0]]) == [PAD_ID, MARKS_ID]


def _weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM, SiglipImageProcessor

    torch.manual_seed(0)
    text = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=checkpoint.MAX_LEN,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )
    weights = {f"llm.{name}": value for name, value in Qwen3ForCausalLM(text).float().state_dict().items()}
    tower = "visual_tokenizer.vit.vision_model"
    patches = f"{tower}.embeddings.patch_embedding"
    shapes = {f"{patches}.weight": (WIDTH, 3, PATCH, PATCH), f"{patches}.bias": (WIDTH,)}
    for layer in range(LAYERS):
        at = f"{tower}.encoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= {f"{at}.self_attn.{name}.weight": (WIDTH, WIDTH), f"{at}.self_attn.{name}.bias": (WIDTH,)}
        shapes |= {f"{at}.mlp.fc1.weight": (128, WIDTH), f"{at}.mlp.fc1.bias": (128,)}
        shapes |= {f"{at}.mlp.fc2.weight": (WIDTH, 128), f"{at}.mlp.fc2.bias": (WIDTH,)}
        for name in ("layer_norm1", "layer_norm2"):
            shapes |= {f"{at}.{name}.weight": (WIDTH,), f"{at}.{name}.bias": (WIDTH,)}
    shapes |= {f"{tower}.post_layernorm.weight": (WIDTH,), f"{tower}.post_layernorm.bias": (WIDTH,)}
    shapes["visual_tokenizer.head.0.weight"] = (VISUAL - 4, WIDTH * STRIDE**2)
    shapes |= {f"visual_tokenizer.head.1.{name}": (VISUAL - 4,) for name in ("weight", "bias")}
    shapes["vte.weight"] = (VISUAL, HIDDEN)
    weights |= {name: 0.2 * torch.randn(shape) for name, shape in shapes.items()}
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    vision = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    vision |= {"num_channels": 3, "patch_size": PATCH, "hidden_stride": STRIDE, "temporal_patch_size": 1}
    vision |= {"image_size": 448, "num_patches": -1, "preserve_original_pe": False, "use_rope": True}
    vision |= {"window_size": 112, "fullatt_block_indexes": None, "hidden_act": "gelu_pytorch_tanh"}
    vision |= {"layer_norm_eps": 1e-6, "attention_dropout": 0.0}
    config = {"architectures": ["Ovis2_5"], "model_type": "ovis2_5", "dtype": "float32", "hidden_size": HIDDEN}
    config |= {"visual_vocab_size": VISUAL, "vit_config": vision, "llm_config": text.to_dict()}
    config["auto_map"] = {"AutoConfig": "configuration_tiny.TinyOvisConfig"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_tiny.py").write_text(CONFIGURATION)
    SiglipImageProcessor().save_pretrained(folder)  # the family's own takes no height and width any more


def _films(folder: Path) -> None:
    """Write films in which something bright moves, each frame another picture."""
    import cv2
    import numpy

    folder.mkdir()
    for name, (codec, kind) in FILMS.items():
        film = cv2.VideoWriter(str(folder / name), cv2.VideoWriter_fourcc(*codec), 2.0, (SIDE, SIDE))
        assert film.isOpened(), f"no codec {codec} for {name}"
        for number in range(FRAMES):
            frame = numpy.zeros((SIDE, SIDE, 3), numpy.uint8)
            cv2.circle(frame, (12 + 12 * number, 32), 8 * kind, (255, 200, 40), -1)
            film.write(frame)
            if name == "ball.mp4":
                cv2.imwrite(str(folder / f"ball-{number}.jpg"), frame)
        film.release()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
