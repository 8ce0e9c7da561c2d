"""`Fields`: a model's ``config.json``, read field by field with errors that name them; and its text part."""

import math
from collections.abc import Mapping
from typing import Any

from penstock.kernel.errors import ConfigError

_NESTED = ("text_config", "llm_config", "language_config")
"""Where multimodal configs have their language model: InternVL says ``llm_config``."""
EMBEDS = "sentence_transformers"
"""Field that the reader of a model's folder sets where sentence-transformers' ``modules.json`` lies in it."""
_OUTER = (
    "torch_dtype",
    "dtype",
    "quantization_config",
    "tie_word_embeddings",
    "model_max_length",
    "architectures",
    EMBEDS,
)
"""Fields of the whole that hold for its language model, too."""

_LLAMA: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_QWEN3_5: Mapping[str, Any] = {
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen3_5_text": {
        **_QWEN3_5,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "qwen3_5_moe_text": {
        **_QWEN3_5,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
}
"""What a nested config leaves out: Hugging Face writes there only what differs from its class (transformers 5.19)."""


class Fields:
    """Typed reading with errors that name the field."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self._name = name

    def error(self, field: str, what: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{self._name}: {field} {what}", hint=hint)

    def text(self, field: str) -> str:
        value = self.config.get(field)
        if not isinstance(value, str):
            raise self.error(field, "is absent" if value is None else f"is {value!r}, not a text")
        return value

    def maybe(self, field: str) -> int | None:
        value = self.config.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise self.error(field, f"is {value!r}, not a whole number of 0 or more")
        if value != int(value):
            raise self.error(field, f"is {value!r}, not a whole number")
        return int(value)

    def count(self, field: str) -> int:
        value = self.maybe(field)
        if not value:
            raise self.error(field, "is absent" if value is None else "is 0; it must be 1 or more")
        return value

    def heads(self) -> int:
        heads = self.count("num_attention_heads")
        shared = self.maybe("num_key_value_heads")
        if shared is not None and (not shared or heads % shared):
            raise self.error("num_key_value_heads", f"is {shared}, which does not divide {heads} attention heads")
        return heads

    def words(self, field: str, count: int) -> list[str] | None:
        """Return a list of one word per layer; None where it is absent.

        Raises:
            ConfigError: it is no list, or has another number of entries.
        """
        value = self.config.get(field)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) < count:
            raise self.error(field, f"is {value!r}, not a list of {count} layers")
        return [str(each) for each in value[:count]]


def text_fields(config: Mapping[str, Any], name: str) -> Fields:
    """Return the fields of a config's language model, with what its class leaves out and what the whole says of it."""
    inner = next((config[key] for key in _NESTED if isinstance(config.get(key), Mapping)), None)
    if inner is None:
        thinker = config.get("thinker_config")  # of Qwen's omni models
        return text_fields(thinker, name) if isinstance(thinker, Mapping) else Fields(config, name)
    outer = {key: config[key] for key in _OUTER if key in config}
    kind = inner.get("model_type")
    return Fields({**outer, **CLASS_DEFAULTS.get(str(kind), {}), **inner}, name)


_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "seq_len")
_SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "default", "mrope", "proportional")
"""Kinds of rope whose factor is in the length already, or has no meaning for it, as vLLM 0.32 takes them."""


def context_of(fields: Fields, kind: str) -> int | None:
    """Return the tokens of a sequence that a model is made for; None where its config does not say."""
    known = [length for key in _LENGTHS if (length := fields.maybe(key))]
    if not known:
        return None
    scaling = fields.config.get("rope_scaling") or fields.config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise fields.error("rope_scaling", f"is {scaling!r}, not a mapping")
    factor = 1.0
    if not kind.startswith("gemma3"):  # its length has the factor in it
        ropes = scaling.values() if all(isinstance(each, Mapping) for each in scaling.values()) else [scaling]
        for rope in ropes:
            if rope.get("rope_type", rope.get("type", "default")) not in _SCALED_ALREADY:
                factor = float(rope.get("factor") or 1.0)
    return int(min(known) * factor)
