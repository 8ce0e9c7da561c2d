"""One vLLM that `penstock serve --engine vllm --adapters FOLDER` starts; it holds two of three LoRA adapters.

Its model has an alias, defaults, a system prompt and a chat template of its own, and shares a name with an adapter.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, served
from tests.vllm.server import BLOCK, BLOCKS, CPU_ENV, CPU_FLAGS, MODEL, RANK, SPAWNED, START_LIMIT

NAMES = ("poet", "clerk", "pilot")
HELD = 2
ALIAS, SHARED = "gpt-4.1", "verse"
SYSTEM = "You answer in one sentence, as a captain does. " * 12
TEMPLATE = """{% for message in messages %}{{ message.role }} says {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant says {% endif %}"""
OUTPUT = 5
"""Output tokens of requests that do not say how many they want."""


@pytest.fixture(scope="package")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    config = json.loads((checkpoint / "config.json").read_text())
    for seed, name in enumerate(NAMES):
        write_adapter(folder / name, config["hidden_size"], config["num_hidden_layers"], seed)
    return folder


@pytest.fixture(scope="package")
def cluster(venv: Path, checkpoint: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pool = f"models.{MODEL}.pools.main"
    arguments = ["serve", str(checkpoint), "--engine", "vllm", "--served-name", MODEL, "--adapters", str(adapters)]
    arguments += ["--frontend.port", str(free_port()), f"--command={venv / 'bin' / 'vllm'}"]
    arguments += [f"--args={','.join(CPU_FLAGS)}", "--supervise.start_timeout", str(START_LIMIT)]
    for knob, value in (
        ("block_size", BLOCK),
        ("kv_blocks", BLOCKS),
        ("max_model_len", 2048),
        ("max_cpu_loras", HELD),
    ):
        arguments += ["--set", f"{pool}.{knob}={value}"]
    folder = tmp_path_factory.mktemp("serve")
    (folder / "plain.jinja").write_text(TEMPLATE)
    (folder / "system.txt").write_text(SYSTEM)
    for knob, value in (
        ("aliases", f"[{ALIAS}]"),
        ("defaults", f"{{max_tokens: {OUTPUT}}}"),
        ("system_prompt", f"file:{folder / 'system.txt'}"),
        ("chat_template", folder / "plain.jinja"),
        ("adapters", f"{{poet: {adapters / 'poet'}}}"),
    ):
        arguments += ["--set", f"models.{MODEL}.{knob}={value}"]
    arguments += ["--set", f"names={{{SHARED}: {{models: {{{MODEL}: 1, poet: 1}}}}}}"]
    env = {**CPU_ENV, **SPAWNED, "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    with served(folder, *arguments, env=env, start_limit=START_LIMIT) as cluster:
        yield cluster


def write_adapter(folder: Path, hidden: int, layers: int, seed: int) -> None:
    """Write an adapter of random weights, so strong that its words differ from the model's, in PEFT's files."""
    rng = np.random.default_rng(seed)
    targets = ["q_proj", "v_proj"]
    header: dict[str, dict[str, object]] = {}
    data = b""
    for layer in range(layers):
        for target in targets:
            for part, shape in (("A", (RANK, hidden)), ("B", (hidden, RANK))):
                raw = (rng.standard_normal(shape) * 0.2).astype("<f4").tobytes()
                name = f"base_model.model.model.layers.{layer}.self_attn.{target}.lora_{part}.weight"
                header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
                data += raw
    head = json.dumps(header).encode()
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "lora_dropout": 0.0}
    config |= {"bias": "none", "target_modules": targets, "base_model_name_or_path": MODEL}
    (folder / "adapter_config.json").write_text(json.dumps(config))
