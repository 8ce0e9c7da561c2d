"""`ModelShape`: a model's dimensions, as to compute and to read, from the ``config.json`` that it is published with.

A pure parse: the mapping is handed in. Counted are the parameters of the text model, without multi-token-prediction
layers and vision towers, which decoding does not read.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.kernel.errors import ConfigError

Dtype = Literal["fp32", "bf16", "fp8", "int8", "fp4", "mxfp4", "int4"]

BYTES: dict[Dtype, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 4.5 / 8,
    "mxfp4": 4.25 / 8,
    "int4": 4.25 / 8,
}
"""Bytes per value with its scales: an 8-bit one per 16 values of NVFP4 and per 32 of MXFP4, 32 bits per 128 of int4."""

GATED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
)
"""Model types whose layers are known here: attention, then a gated MLP of three matrices or experts of such."""

SAME = {
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "glm_moe_dsa": "deepseek_v3",
    "glm4_moe": "qwen3_moe",
    "minimax_m2": "qwen3_moe",
    "phimoe": "mixtral",
    "ministral3": "mistral",
}
"""Model types with the layers of another."""

_TIED = ("gemma", "gemma2", "gemma3_text")
_BIASED = ("qwen2", "qwen2_moe", "gpt_oss")
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")
_FOUR_NORMS = ("gemma2", "gemma3_text")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a decoder, as far as time and memory depend on them. Parameters are counts, not bytes."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Heads of the KV cache that tensor parallelism can split; 1 for a latent cache, which each GPU holds whole."""
    kv_values: int
    """Numbers per token and layer in the KV cache."""
    pair_flops: int
    """Operations per layer for one query token and one token that it attends to, where K and V are at hand."""
    read_flops: int
    """The same in a decode step. A latent cache is read as it is, for more operations and fewer bytes."""
    past_flops: int
    """Operations per layer for one token in the cache that a prompt's later part attends to: a latent cache is made
    into K and V again for each part; 0 where K and V are what the cache holds."""
    window: int | None
    """Tokens that ``window_layers`` of the layers attend to; the others attend to all."""
    window_layers: int
    linear: int
    """Parameters of all layers that every token passes: attention, MLPs, shared experts, routers, norms."""
    experts: int
    experts_per_token: int
    expert: int
    """Parameters of one routed expert of one layer."""
    moe_layers: int
    activations: int
    """Numbers that a token makes all layers read and write besides weights and KV cache."""
    columns: int
    """Columns of the widest MLP that a token passes: dense, or its experts together."""
    embedding: int
    head: int
    """Parameters of the output projection; it is read also where it is the embedding."""
    tied: bool
    dtype: Dtype
    linear_dtype: Dtype
    expert_dtype: Dtype

    @property
    def params(self) -> int:
        """All parameters."""
        experts = self.moe_layers * self.experts * self.expert
        return self.linear + experts + self.embedding + (0 if self.tied else self.head)

    @property
    def params_active(self) -> int:
        """Parameters that one token passes, the embedding counted in as its publishers do."""
        experts = self.moe_layers * self.experts_per_token * self.expert
        return self.linear + experts + self.embedding + (0 if self.tied else self.head)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all parameters in the data types of the config."""
        plain = self.embedding + (0 if self.tied else self.head)
        experts = self.moe_layers * self.experts * self.expert
        return plain * BYTES[self.dtype] + self.linear * BYTES[self.linear_dtype] + experts * BYTES[self.expert_dtype]

    def kv_bytes(self, dtype: Dtype) -> float:
        """Return the bytes that a token takes in the KV cache, over all layers."""
        return self.layers * self.kv_values * BYTES[dtype]


def shape_of(config: Mapping[str, Any], name: str = "config.json") -> ModelShape:
    """Return the dimensions of a model.

    Args:
        config: the fields of a Hugging Face ``config.json``; where it has a ``text_config``, that one counts.
        name: what to call the config in errors.
    Raises:
        ConfigError: the model's kind is not known here, or a field is absent or not what it must be.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {**{key: config[key] for key in ("torch_dtype", "quantization_config") if key in config}, **inner}
    fields = _Fields(config, name)
    kind = fields.text("model_type")
    kind = SAME.get(kind, kind)
    if kind not in GATED:
        raise ConfigError(
            f"{name}: model_type {kind!r} has layers that are not known here", hint=f"known are {', '.join(GATED)}"
        )
    layers, hidden, heads = fields.count("num_hidden_layers"), fields.count("hidden_size"), fields.heads()
    attention = _latent(fields, hidden, heads) if kind.startswith("deepseek") else _grouped(fields, kind, hidden, heads)
    experts, moe_layers = _experts(fields, layers)
    expert = shared = wide = 0
    per_token = _per_token(fields, experts)
    if experts:
        width = fields.maybe("moe_intermediate_size") or fields.count("intermediate_size")
        expert = 3 * hidden * width
        always = fields.maybe("n_shared_experts") or 0
        shared, wide = always * expert, (per_token + always) * width
        if extra := fields.maybe("shared_expert_intermediate_size"):
            shared, wide = shared + 3 * hidden * extra + hidden, wide + extra
        if kind == "gpt_oss":
            expert += 2 * width + hidden
        shared += hidden * experts + (experts if kind in ("gpt_oss", "deepseek_v3") else 0)
    dense = fields.count("intermediate_size") * (layers - moe_layers) if moe_layers < layers else 0
    norms = (4 if kind in _FOUR_NORMS else 2) * hidden
    vocabulary = fields.count("vocab_size") * hidden
    window, window_layers = _window(fields, kind, layers)
    linear_dtype, expert_dtype = _dtypes(fields)
    return ModelShape(
        name=str(config.get("_name_or_path") or kind),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=attention.kv_heads,
        kv_values=attention.kv_values,
        pair_flops=attention.pair_flops,
        read_flops=attention.read_flops,
        past_flops=attention.past_flops,
        window=window,
        window_layers=window_layers,
        linear=layers * (attention.params + norms) + 3 * hidden * dense + moe_layers * shared + hidden,
        experts=experts,
        experts_per_token=per_token,
        expert=expert,
        moe_layers=moe_layers,
        # Per layer two norms with their residuals (8), in and out of attention and MLP (4); per MLP column gate, up and
        # their product, each written and read.
        activations=layers * (12 * hidden + attention.width) + 6 * (dense + moe_layers * wide),
        columns=max(wide, fields.count("intermediate_size") if moe_layers < layers else 0),
        embedding=vocabulary,
        head=vocabulary,
        tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        dtype=fields.dtype(),
        linear_dtype=linear_dtype,
        expert_dtype=expert_dtype,
    )


class _Attention(msgspec.Struct, frozen=True):
    params: int
    kv_heads: int
    kv_values: int
    pair_flops: int
    read_flops: int
    past_flops: int
    width: int
    """Numbers per token between the projections, written and read."""


def _grouped(fields: "_Fields", kind: str, hidden: int, heads: int) -> _Attention:
    """Attention whose query heads share KV heads."""
    kv_heads = fields.maybe("num_key_value_heads") or heads
    width = fields.maybe("head_dim")
    if width is None:
        width, rest = divmod(hidden, heads)
        if rest:
            raise fields.error("head_dim", f"is absent, and hidden_size {hidden} is no multiple of {heads} heads")
    params = 2 * hidden * width * (heads + kv_heads)
    if kind in _BIASED or fields.config.get("attention_bias") is True:
        params += width * (heads + 2 * kv_heads)
    if kind == "gpt_oss":
        params += hidden + heads  # the output's bias and the sinks
    if kind in _HEAD_NORMS:
        params += 2 * width
    flops = 4 * heads * width
    return _Attention(params, kv_heads, 2 * kv_heads * width, flops, flops, 0, 4 * width * (heads + kv_heads))


def _latent(fields: "_Fields", hidden: int, heads: int) -> _Attention:
    """Multi-head latent attention: one compressed vector per token in the cache."""
    latent, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    plain, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    query = fields.maybe("q_lora_rank")
    key = plain + rope
    params = hidden * (latent + rope) + latent + latent * heads * (plain + value) + heads * value * hidden
    params += hidden * heads * key if query is None else hidden * query + query + query * heads * key
    moved = 2 * heads * (key + value) + 4 * (latent + rope)
    pair, read, past = key + value, 2 * latent + rope, latent * (plain + value)
    return _Attention(params, 1, latent + rope, 2 * heads * pair, 2 * heads * read, 2 * heads * past, moved)


def _experts(fields: "_Fields", layers: int) -> tuple[int, int]:
    """Return the routed experts of a layer and how many layers have them."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((count for name in names if (count := fields.maybe(name)) is not None), 0)
    if not experts:
        return 0, 0
    first = fields.maybe("first_k_dense_replace") or 0
    step = fields.maybe("moe_layer_freq") or fields.maybe("decoder_sparse_step") or 1
    plain = fields.config.get("mlp_only_layers") or ()
    if "decoder_sparse_step" in fields.config:
        return experts, sum((i + 1) % step == 0 and i not in plain for i in range(layers))
    return experts, sum(i >= first and i % step == 0 for i in range(layers))


def _per_token(fields: "_Fields", experts: int) -> int:
    if not experts:
        return 0
    count = fields.maybe("num_experts_per_tok") or fields.count("experts_per_token")
    if count > experts:
        raise fields.error("num_experts_per_tok", f"is {count}, above the {experts} experts of a layer")
    return count


def _window(fields: "_Fields", kind: str, layers: int) -> tuple[int | None, int]:
    """Return the sliding window and how many layers have it."""
    config = fields.config
    if (chosen := fields.maybe("index_topk")) is not None:
        return chosen, layers  # sparse attention: an indexer chooses what each token reads
    window = fields.maybe("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return None, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list | tuple):
        count = sum(entry == "sliding_attention" for entry in kinds)
    elif kind == "gemma2":
        count = (layers + 1) // 2
    elif kind == "gemma3_text":
        pattern = fields.maybe("sliding_window_pattern") or 6
        count = layers - layers // pattern
    elif kind.startswith("qwen"):
        if not config.get("use_sliding_window"):
            return None, 0
        count = layers - min(layers, fields.maybe("max_window_layers") or 0)
    else:
        count = layers
    return (window, count) if count else (None, 0)


def _dtypes(fields: "_Fields") -> tuple[Dtype, Dtype]:
    """Return the data types of the linear layers and of the routed experts."""
    plain = fields.dtype()
    given = fields.config.get("quantization_config")
    if given is None:
        return plain, plain
    if not isinstance(given, Mapping):
        raise fields.error("quantization_config", f"is {given!r}, not a mapping")
    method = str(given.get("quant_method", "")).lower()
    if method == "mxfp4":
        return plain, "mxfp4"  # as published, only experts are in it
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8", "fp8"
    if method in ("awq", "gptq"):
        bits = given.get("bits", 4)
        if bits in (4, 8):
            dtype: Dtype = "int4" if bits == 4 else "int8"
            return dtype, dtype
    if method == "modelopt":
        algorithm = str(given.get("quant_algo", "")).upper()
        if algorithm in ("FP8", "NVFP4"):
            dtype = "fp8" if algorithm == "FP8" else "fp4"
            return dtype, dtype
    if method == "compressed-tensors":
        return _compressed(fields, given)
    raise fields.error(
        "quantization_config",
        f"has the method {method!r}, which is not known here",
        "take the entry out and set timing.weight_dtype",
    )


def _compressed(fields: "_Fields", given: Mapping[str, Any]) -> tuple[Dtype, Dtype]:
    groups = given.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    key = (weights.get("type"), weights.get("num_bits")) if isinstance(weights, Mapping) else None
    known: dict[Any, Dtype] = {("float", 8): "fp8", ("int", 8): "int8", ("float", 4): "fp4", ("int", 4): "int4"}
    if key not in known:
        raise fields.error("quantization_config", "has no config_groups whose weights say type and num_bits 4 or 8")
    return known[key], known[key]


class _Fields:
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

    def dtype(self) -> Dtype:
        value = self.config.get("torch_dtype", self.config.get("dtype", "bfloat16"))
        known: dict[Any, Dtype] = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}
        if value not in known:
            raise self.error("torch_dtype", f"is {value!r}", f"known are {', '.join(known)}")
        return known[value]
