"""`ModelShape`: a model's dimensions, as to compute and to read, from the ``config.json`` that it is published with.

A pure parse: the mapping is handed in. Counted are the parameters of the text model, without multi-token-prediction
layers and vision towers, which decoding does not read.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.kernel.errors import ConfigError
from penstock_lab.engine.timing.layer_shapes import (
    FULL,
    RECURRENT,
    WINDOWED,
    Attention,
    Experts,
    Recurrent,
    TokenIndexer,
    experts,
    gated_delta,
    grouped,
    indexer,
    latent,
    layer_kinds,
    mamba2,
)
from penstock_lab.engine.timing.model_fields import EMBEDS, Fields, context_of, text_fields
from penstock_lab.engine.timing.weight_types import BYTES, PLAIN, Block, Dtype, Weights, WeightTypes

GATED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
)
"""Model types whose layers are known here: attention, then a gated MLP of three matrices or experts of such."""

ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")
"""Model types that read a text at once and make no token of it."""

KNOWN = (*GATED, "nemotron_h", *ENCODERS)

SAME = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "internlm2": "llama",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_5_text": "qwen3_next",
    "qwen3_5_moe_text": "qwen3_next",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "glm_moe_dsa": "deepseek_v3",
    "glm4_moe_lite": "deepseek_v3",
    "glm4_moe": "qwen3_moe",
    "minimax_m2": "qwen3_moe",
    "phimoe": "mixtral",
    "ministral3": "mistral",
}
"""Model types with the layers of another."""

_TIED = ("gemma", "gemma2", "gemma3_text")
_FOUR_NORMS = ("gemma2", "gemma3_text")
_NORMS_WITH_BIAS = ("bert", "roberta", "xlm-roberta")
_ANSWERLESS = re.compile(
    r"For(Sequence|Token)Classification$|ForRewardModel$|ForMaskedLM$|ForEmbedding$|ForSequenceEmbedding$"
    r"|^(Bert|Roberta|XLMRoberta|ModernBert|Llama|Mistral|Qwen[23]|Gemma[23]?|Gemma3Text)Model$"
)
"""Architectures that embed, rank or classify a text."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a model, as far as time and memory depend on them. Parameters are counts, not bytes."""

    name: str
    layers: int
    sublayers: int
    """Attention, recurrent layers and MLPs: each ends with an all-reduce under tensor parallelism."""
    hidden: int
    heads: int
    kv_heads: int
    """Heads of the KV cache that tensor parallelism can split; 1 for a latent cache, which each GPU holds whole."""
    kv_values: int
    """Numbers per token and attention layer in the KV cache."""
    pair_flops: int
    """Operations per layer for one query token and one token that it attends to, where K and V are at hand."""
    read_flops: int
    """The same in a decode step. A latent cache is read as it is, for more operations and fewer bytes."""
    past_flops: int
    """Operations per layer for one token in the cache that a prompt's later part attends to: a latent cache is made
    into K and V again for each part; 0 where K and V are what the cache holds."""
    attention_layers: int
    """Layers with attention; other ones keep a state per sequence, or nothing."""
    window: int | None
    """Tokens that ``window_layers`` of these attend to and keep; the others keep all."""
    window_layers: int
    chosen: int | None
    """Tokens that a token reads of all that sparse attention keeps; None where it reads all."""
    index_layers: int
    """Layers whose indexer looks at all tokens to choose them."""
    index_bytes: float
    """Bytes per token and such layer in the cache, of the indexer's keys."""
    index_flops: int
    """Operations per such layer for one query token and one token that it looks at."""
    state_layers: int
    """Layers that keep a state per sequence."""
    state_bytes: float
    """Bytes that a sequence takes beside its tokens, over all layers: states of recurrent and linear attention."""
    linear: tuple[Weights, ...]
    """Parameters of all layers that every token passes: attention, MLPs, shared experts, routers, norms."""
    experts: int
    experts_per_token: int
    expert: int
    """Parameters of one routed expert of one layer."""
    expert_columns: int
    moe_layers: int
    activations: int
    """Numbers that a token makes all layers read and write besides weights and KV cache."""
    columns: int
    """Columns of the widest MLP that a token passes: dense, or its experts together."""
    dense_columns: int
    """Columns of an MLP that is no expert; 0 where there is none."""
    scaled_columns: int
    """Columns of quantised matrices that share a scale: no GPU can have a part of them."""
    vocabulary: int
    """Tokens that one is sampled from; 0 where none is."""
    embedding: int
    head: int
    """Parameters of the output projection; it is read also where it is the embedding."""
    tied: bool
    dtype: Dtype
    expert_dtype: Dtype
    kv_dtype: Dtype
    """Of the KV cache: what the checkpoint has scales for, else the model's."""
    context: int | None
    """Tokens of the longest sequence that the model is made for; None where its config does not say."""
    causal: bool
    """False of encoders: each token attends to all, in one pass, and only the layer at work has K and V."""
    generates: bool
    """Whether it makes tokens; embedders, rerankers and classifiers read prompts only."""

    @property
    def linear_params(self) -> int:
        """Parameters of all layers that every token passes."""
        return sum(each.params for each in self.linear)

    @property
    def linear_dtype(self) -> Dtype:
        """The data type of most of them."""
        return max(self.linear, key=lambda each: each.params).dtype

    @property
    def params(self) -> int:
        """All parameters."""
        experts = self.moe_layers * self.experts * self.expert
        return self.linear_params + experts + self.embedding + (0 if self.tied else self.head)

    @property
    def params_active(self) -> int:
        """Parameters that one token passes, the embedding counted in as its publishers do."""
        experts = self.moe_layers * self.experts_per_token * self.expert
        return self.linear_params + experts + self.embedding + (0 if self.tied else self.head)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all parameters in the data types of the config."""
        plain = self.embedding + (0 if self.tied else self.head)
        experts = self.moe_layers * self.experts * self.expert
        return plain * BYTES[self.dtype] + self.linear_bytes() + experts * BYTES[self.expert_dtype]

    @property
    def reads(self) -> int | None:
        """Tokens that ``near_layers`` read at most: their window, or what sparse attention chooses."""
        return self.window if self.chosen is None else self.chosen

    @property
    def latent(self) -> bool:
        """Whether the cache holds one compressed vector per token and layer in place of K and V."""
        return self.past_flops > 0 or self.chosen is not None

    @property
    def near_layers(self) -> int:
        """Attention layers that read a part of a long sequence."""
        return self.window_layers if self.chosen is None else self.attention_layers

    def weights(self, dtype: Dtype | None = None) -> tuple[Weights, ...]:
        """Return the linear layers' parameters by data type, all of them in one where it is given."""
        return self.linear if dtype is None else (Weights(self.linear_params, dtype),)

    def linear_bytes(self, dtype: Dtype | None = None) -> float:
        """Return the bytes of the linear layers, in the config's data types or in another."""
        return sum(each.params * BYTES[each.dtype] for each in self.weights(dtype))

    def kv_bytes(self, dtype: Dtype | None = None, length: float = 1.0) -> float:
        """Return the bytes that a token of a sequence takes in the KV cache, over all layers.

        Args:
            dtype: of the cache; None takes the checkpoint's.
            length: tokens of the sequence: layers with a window keep no more of it than that.
        """
        near = self.window_layers * min(1.0, self.window / length) if self.window else 0.0
        layers = self.attention_layers - self.window_layers + near if self.causal else 1.0
        return layers * self.kv_values * BYTES[dtype or self.kv_dtype] + self.index_layers * self.index_bytes

    def kv_bytes_with_states(self, dtype: Dtype | None = None, length: float = 1.0) -> float:
        """Return the same with the sequence's states, spread over its tokens."""
        return self.kv_bytes(dtype, length) + self.state_bytes / length


def shape_of(config: Mapping[str, Any], name: str = "config.json") -> ModelShape:
    """Return the dimensions of a model.

    Args:
        config: the fields of a Hugging Face ``config.json``; where it has a language model of its own, that one counts.
        name: what to call the config in errors.
    Raises:
        ConfigError: the model's kind is not known here, or a field is absent or not what it must be.
    """
    fields = text_fields(config, name)
    kind = fields.text("model_type")
    kind = SAME.get(kind, kind)
    if kind not in KNOWN:
        raise ConfigError(
            f"{name}: model_type {kind!r} has layers that are not known here", hint=f"known are {', '.join(KNOWN)}"
        )
    layers, hidden, heads = fields.count("num_hidden_layers"), fields.count("hidden_size"), fields.heads()
    types, mixers = WeightTypes(fields), layer_kinds(fields, kind, layers)
    attention = _attention(fields, kind, hidden, heads)
    routed = experts(fields, kind, hidden, mixers)
    blocks = _blocks_of_model(fields, kind, hidden, mixers, attention, routed, types)
    vocabulary = fields.count("vocab_size")
    generates = _generates(fields, kind)
    linear = types.weights(blocks.all)
    expert_name = "mixer.experts.0.up_proj" if kind == "nemotron_h" else "mlp.experts.0.up_proj"
    expert_types = [types.of(expert_name, layer) for layer in routed.layers]
    return ModelShape(
        name=str(fields.config.get("_name_or_path") or config.get("_name_or_path") or kind),
        layers=layers,
        sublayers=blocks.sublayers,
        hidden=hidden,
        heads=heads,
        kv_heads=attention.kv_heads,
        kv_values=attention.kv_values,
        pair_flops=attention.pair_flops,
        read_flops=attention.read_flops,
        past_flops=attention.past_flops,
        attention_layers=mixers.count(FULL) + mixers.count(WINDOWED),
        window=_window(fields, kind) if WINDOWED in mixers else None,
        window_layers=mixers.count(WINDOWED),
        chosen=None if blocks.index is None else blocks.index.chosen,
        index_layers=0 if blocks.index is None else blocks.index.layers,
        index_bytes=0.0 if blocks.index is None else blocks.index.bytes,
        index_flops=0 if blocks.index is None else blocks.index.flops,
        state_layers=mixers.count(RECURRENT),
        state_bytes=blocks.states,
        linear=linear,
        experts=routed.count if routed.layers else 0,
        experts_per_token=routed.per_token,
        expert=routed.params,
        expert_columns=routed.columns,
        moe_layers=len(routed.layers),
        activations=blocks.activations,
        columns=max(routed.wide, blocks.dense),
        dense_columns=blocks.dense,
        scaled_columns=types.columns,
        vocabulary=vocabulary if generates else 0,
        embedding=vocabulary * hidden + _positions(fields, kind, hidden),
        head=vocabulary * hidden if generates else 0,
        tied=not generates or bool(fields.config.get("tie_word_embeddings", kind in _TIED)),
        dtype=types.plain,
        expert_dtype=max(set(expert_types), key=expert_types.count) if expert_types else linear[0].dtype,
        kv_dtype=types.kv,
        context=_context(fields, kind, generates),
        causal=kind not in ENCODERS,
        generates=generates,
    )


class _Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """All blocks of a model that every token passes, and what depends on them together."""

    all: tuple[Block, ...]
    index: TokenIndexer | None
    states: float
    """Bytes of a sequence's states."""
    dense: int
    """Columns of an MLP that is no expert; 0 where there is none."""
    sublayers: int
    activations: int


def _blocks_of_model(
    fields: Fields, kind: str, hidden: int, mixers: list[str], attention: Attention, routed: Experts, types: WeightTypes
) -> _Blocks:
    layers = range(len(mixers))
    alone = kind == "nemotron_h"  # its layers have one part each, and one norm
    norms = hidden * (1 if alone else 4 if kind in _FOUR_NORMS or kind in _NORMS_WITH_BIAS else 2)
    attending = [i for i in layers if mixers[i] in (FULL, WINDOWED)]
    recurring = [i for i in layers if mixers[i] == RECURRENT]
    dense_at = [i for i in layers if (mixers[i] == "mlp" if alone else i not in routed.layers)]
    index = indexer(fields, hidden, len(mixers)) if kind.startswith("deepseek") else None
    all_blocks = [Block(attention.params + norms, attention.modules, attending), Block(hidden, ("norm",), (0,))]
    if index is not None:
        all_blocks.append(Block(index.params, ("self_attn.indexer.wq_b",), range(index.layers)))
    recurrent = None
    if recurring:
        recurrent = mamba2(fields, hidden) if alone else gated_delta(fields, hidden)
        all_blocks.append(Block(recurrent.params + norms, recurrent.modules, recurring))
    columns = fields.count("intermediate_size") if dense_at else 0
    if dense_at:
        all_blocks.append(_dense_block(kind, hidden, columns, dense_at))
    if routed.layers:
        shared = "mlp.shared_expert" if "qwen" in kind else "mlp.shared_experts"
        modules = tuple(f"{shared}.{each}_proj" for each in ("gate", "up", "down")) if routed.shared else ("mlp.gate",)
        if alone:
            modules = ("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj")
        all_blocks.append(Block(routed.always + (hidden if alone else 0), modules, routed.layers))
    sublayers = len(mixers) * (1 if alone else 2)
    return _Blocks(
        all=tuple(block for block in all_blocks if block.layers),
        index=index,
        states=0.0 if recurrent is None else len(recurring) * _state_bytes(fields, recurrent, types),
        dense=columns,
        sublayers=sublayers,
        # Per attention or MLP a norm with its residual (4), in and out (2); per MLP column gate, up and their product,
        # each written and read.
        activations=6 * hidden * sublayers
        + len(attending) * attention.width
        + (0 if recurrent is None else len(recurring) * recurrent.width)
        + 6 * (len(dense_at) * columns + len(routed.layers) * routed.wide),
    )


def _dense_block(kind: str, hidden: int, columns: int, layers: list[int]) -> Block:
    """Return an MLP of three matrices with a gate, or of two without one."""
    if kind == "nemotron_h":
        return Block(2 * hidden * columns + hidden, ("mixer.up_proj", "mixer.down_proj"), layers)
    if kind in _NORMS_WITH_BIAS:
        return Block(2 * hidden * columns + hidden + columns, ("intermediate.dense", "output.dense"), layers)
    return Block(3 * hidden * columns, ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), layers)


def _state_bytes(fields: Fields, recurrent: Recurrent, types: WeightTypes) -> float:
    """Return the bytes of one layer's state: the convolution's in the model's data type, the memory's in its own."""
    known = {"auto": types.plain, **PLAIN}
    memory = recurrent.dtype or "auto"
    if memory not in known:
        raise fields.error("mamba_ssm_dtype", f"is {recurrent.dtype!r}", f"known are {', '.join(PLAIN)}")
    return recurrent.convolution * BYTES[types.plain] + recurrent.memory * BYTES[known[memory]]


def _attention(fields: Fields, kind: str, hidden: int, heads: int) -> Attention:
    if kind.startswith("deepseek"):
        attention = latent(fields, hidden, heads)
        if "index_topk" not in fields.config:
            return attention
        # Kernels of sparse attention read the latent cache as it is, in prompts as well.
        return msgspec.structs.replace(attention, pair_flops=attention.read_flops, past_flops=0)
    attention = grouped(fields, kind, hidden, heads)
    if kind in ENCODERS:  # each token attends to all, not to those before it
        biases = 4 * hidden if kind in _NORMS_WITH_BIAS else 0
        both = 2 * attention.pair_flops
        return msgspec.structs.replace(attention, params=attention.params + biases, pair_flops=both)
    return attention


def _window(fields: Fields, kind: str) -> int:
    return fields.count("local_attention" if kind == "modernbert" else "sliding_window")


def _positions(fields: Fields, kind: str, hidden: int) -> int:
    """Return the parameters of an encoder's embeddings beside those of its tokens."""
    if kind not in _NORMS_WITH_BIAS:
        return hidden if kind == "modernbert" else 0
    return hidden * (fields.count("max_position_embeddings") + (fields.maybe("type_vocab_size") or 0) + 2)


def _generates(fields: Fields, kind: str) -> bool:
    """Tell whether a model makes tokens: by its kind, its architecture, or sentence-transformers' file beside it."""
    named = fields.config.get("architectures") or ()
    return kind not in ENCODERS and not fields.config.get(EMBEDS) and not any(map(_ANSWERLESS.search, map(str, named)))


def _context(fields: Fields, kind: str, generates: bool) -> int | None:
    length = context_of(fields, kind)
    if length is None or generates:
        return length
    if kind in ("roberta", "xlm-roberta"):
        length -= 2  # its positions begin behind the padding's
    # Of a model that makes tokens, the tokenizer's length is often too short to be believed, as vLLM has it, too.
    return min(length, fields.maybe("model_max_length") or length)
