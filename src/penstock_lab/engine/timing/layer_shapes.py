"""Shapes of layers: attention of all kinds, recurrent layers with a state per sequence, experts; from config fields."""

import msgspec

from penstock_lab.engine.timing.model_fields import Fields

BIASED = ("qwen2", "qwen2_moe", "gpt_oss")
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "qwen3_next")
GATED_OUTPUT = ("qwen3_next",)
"""Kinds whose queries come with a gate of the attention's output, as wide as they are."""
INDEX_SCALES = 128
"""Values of an indexer's key that share one scale of fp32, beside keys in fp8."""
FULL, WINDOWED, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
_PATTERN = {"M": RECURRENT, "*": FULL, "-": "mlp", "E": "moe"}
_OLDER = {"mamba": RECURRENT, "attention": FULL}


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """One attention layer, as `penstock_lab.engine.timing.model_shape.ModelShape` explains it."""

    params: int
    kv_heads: int
    kv_values: int
    pair_flops: int
    read_flops: int
    past_flops: int = 0
    width: int
    """Numbers per token between the projections, written and read."""
    modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")


class Recurrent(msgspec.Struct, frozen=True, kw_only=True):
    """One layer that keeps a state of fixed size per sequence instead of KV per token."""

    params: int
    width: int
    convolution: int
    """Values of the state that are in the model's data type: the last inputs of a convolution."""
    memory: int
    """Values of the state that ``dtype`` is of."""
    dtype: str | None
    """As the config says it; None is the model's."""
    modules: tuple[str, ...]


class TokenIndexer(msgspec.Struct, frozen=True, kw_only=True):
    """What chooses the tokens that a layer with sparse attention reads."""

    params: int
    chosen: int
    """Tokens that each token reads."""
    layers: int
    """Layers with an indexer of their own; the others take the choice of the one before."""
    bytes: float
    """Of the keys in the cache, per token and layer."""
    flops: int
    """Per query token and token that it looks at."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Routed experts of a model's layers."""

    count: int = 0
    per_token: int = 0
    params: int = 0
    """Of one expert."""
    columns: int = 0
    """Of one expert."""
    always: int = 0
    """Parameters that each token passes beside them: shared experts and the router."""
    shared: bool = False
    """Whether there are shared experts among these."""
    wide: int = 0
    """Columns that a token passes, shared experts among them."""
    layers: tuple[int, ...] = ()


def layer_kinds(fields: Fields, kind: str, layers: int) -> list[str]:
    """Return what each layer mixes tokens with: all, a window or a state; of Nemotron-H also ``mlp`` and ``moe``."""
    if kind == "nemotron_h":
        pattern = fields.config.get("hybrid_override_pattern")
        if isinstance(pattern, str):
            if not set(pattern) <= set(_PATTERN) or len(pattern) != layers:
                raise fields.error("hybrid_override_pattern", f"is {pattern!r}, not {layers} of {''.join(_PATTERN)}")
            return [_PATTERN[letter] for letter in pattern]
        words = fields.words("layers_block_type", layers) or fields.words("layer_types", layers)
        if words is None:
            raise fields.error("hybrid_override_pattern", "is absent")
        return [_OLDER.get(word, word) for word in words]
    if kind == "qwen3_next":
        words = fields.words("layer_types", layers)
        every = fields.maybe("full_attention_interval") or 4
        return words or [RECURRENT if (i + 1) % every else FULL for i in range(layers)]
    windowed = _windowed(fields, kind, layers)
    return [WINDOWED if windowed[i] else FULL for i in range(layers)]


def _windowed(fields: Fields, kind: str, layers: int) -> list[bool]:
    """Return which layers see a sliding window."""
    config = fields.config
    if kind == "modernbert":
        every = fields.maybe("global_attn_every_n_layers") or 3
        return [i % every != 0 for i in range(layers)]
    window = fields.maybe("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return [False] * layers
    words = fields.words("layer_types", layers)
    if words is not None:
        return [word == WINDOWED for word in words]
    if kind == "gemma2":
        return [i % 2 == 0 for i in range(layers)]
    if kind == "gemma3_text":
        pattern = fields.maybe("sliding_window_pattern") or 6
        return [(i + 1) % pattern != 0 for i in range(layers)]
    if kind.startswith("qwen"):
        first = min(layers, fields.maybe("max_window_layers") or 0)
        return [bool(config.get("use_sliding_window")) and i >= first for i in range(layers)]
    return [True] * layers


def grouped(fields: Fields, kind: str, hidden: int, heads: int) -> Attention:
    """Return attention whose query heads share KV heads."""
    kv_heads = fields.maybe("num_key_value_heads") or heads
    width = fields.maybe("head_dim") or fields.maybe("attention_head_dim")
    if width is None:
        width, rest = divmod(hidden, heads)
        if rest:
            raise fields.error("head_dim", f"is absent, and hidden_size {hidden} is not a multiple of {heads} heads")
    params = 2 * hidden * width * (heads + kv_heads)
    if kind in BIASED or fields.config.get("attention_bias") is True:
        params += width * (heads + 2 * kv_heads)
    if kind == "gpt_oss":
        params += hidden + heads  # the output's bias and the sinks
    if kind in HEAD_NORMS:
        params += 2 * width
    if kind in GATED_OUTPUT:
        params += hidden * heads * width
    flops = 4 * heads * width
    attention = Attention(
        params=params,
        kv_heads=kv_heads,
        kv_values=2 * kv_heads * width,
        pair_flops=flops,
        read_flops=flops,
        width=4 * width * (heads + kv_heads),
    )
    if kind == "nemotron_h":
        modules = tuple(module.replace("self_attn", "mixer") for module in attention.modules)
        return msgspec.structs.replace(attention, modules=modules)
    return attention


def latent(fields: Fields, hidden: int, heads: int) -> Attention:
    """Return multi-head latent attention: one compressed vector per token in the cache."""
    size, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    plain, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    query = fields.maybe("q_lora_rank")
    key = plain + rope
    params = hidden * (size + rope) + size + size * heads * (plain + value) + heads * value * hidden
    params += hidden * heads * key if query is None else hidden * query + query + query * heads * key
    queries = ("q_proj",) if query is None else ("q_a_proj", "q_b_proj")
    return Attention(
        params=params,
        kv_heads=1,
        kv_values=size + rope,
        pair_flops=2 * heads * (key + value),
        read_flops=2 * heads * (2 * size + rope),
        past_flops=2 * heads * size * (plain + value),
        width=2 * heads * (key + value) + 4 * (size + rope),
        modules=tuple(f"self_attn.{each}" for each in (*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
    )


def indexer(fields: Fields, hidden: int, layers: int) -> TokenIndexer | None:
    """Return the indexer of sparse attention; None where a model has none.

    Sparse attention is no sliding window: any token may be chosen later, so that the cache keeps all of them.
    """
    chosen = fields.maybe("index_topk")
    if chosen is None:
        return None
    heads, width = fields.count("index_n_heads"), fields.count("index_head_dim")
    kinds = fields.words("indexer_types", layers)
    pattern = fields.config.get("index_topk_pattern")
    if kinds is None and isinstance(pattern, str):
        kinds = ["full" if letter == "F" else "shared" for letter in pattern[:layers]]
    if kinds is None:
        every, offset = fields.maybe("index_topk_freq") or 1, fields.maybe("index_skip_topk_offset") or 2
        kinds = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers)]
    return TokenIndexer(
        params=fields.count("q_lora_rank") * heads * width + hidden * (width + heads) + 2 * width,
        chosen=chosen,
        layers=kinds.count("full"),
        bytes=width + 4.0 * width / INDEX_SCALES,
        flops=2 * heads * width,
    )


def gated_delta(fields: Fields, hidden: int) -> Recurrent:
    """Return a layer of linear attention as Qwen3-Next and Qwen3.5 have it."""
    keys, values = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key, value = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    kernel = fields.count("linear_conv_kernel_dim")
    mixed, out = 2 * keys * key + values * value, values * value
    inputs = ("in_proj_qkv", "in_proj_z") if "qwen3_5" in fields.text("model_type") else ("in_proj_qkvz",)
    return Recurrent(
        params=hidden * (mixed + out + 2 * values) + mixed * kernel + 2 * values + value + out * hidden,
        width=4 * mixed + 4 * out,
        convolution=mixed * (kernel - 1),
        memory=values * value * key,
        dtype=fields.config.get("mamba_ssm_dtype"),
        modules=tuple(f"linear_attn.{each}" for each in (*inputs, "out_proj")),
    )


def mamba2(fields: Fields, hidden: int) -> Recurrent:
    """Return a Mamba-2 layer as Nemotron-H has it."""
    heads, width, state = (fields.count(name) for name in ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"))
    groups, kernel = fields.maybe("n_groups") or 8, fields.maybe("conv_kernel") or fields.maybe("mamba_d_conv") or 4
    inner = heads * width
    mixed = inner + 2 * groups * state
    biases = (mixed if fields.config.get("use_conv_bias", True) else 0) + 3 * heads
    return Recurrent(
        params=hidden * (inner + mixed + heads) + mixed * kernel + biases + inner + inner * hidden,
        width=4 * mixed + 4 * inner,
        convolution=mixed * (kernel - 1),
        memory=inner * state,
        dtype=str(fields.config.get("mamba_ssm_cache_dtype") or "float32"),
        modules=("mixer.in_proj", "mixer.out_proj"),
    )


def experts(fields: Fields, kind: str, hidden: int, mixers: list[str]) -> Experts:
    """Return the routed experts of a model's layers; without any where it has none."""
    layers = len(mixers)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((count for name in names if (count := fields.maybe(name)) is not None), 0)
    if kind == "nemotron_h":
        at = tuple(i for i in range(layers) if mixers[i] == "moe")
        return _nemotron_experts(fields, hidden, count, at) if at else Experts()
    if not count:
        return Experts()
    per_token = _per_token(fields, count)
    width = fields.maybe("moe_intermediate_size") or fields.count("intermediate_size")
    shared = fields.maybe("n_shared_experts") or 0
    params, always, wide = 3 * hidden * width, 3 * hidden * width * shared, (per_token + shared) * width
    if extra := fields.maybe("shared_expert_intermediate_size"):
        always, wide = always + 3 * hidden * extra + hidden, wide + extra
    if kind == "gpt_oss":
        params += 2 * width + hidden
    always += hidden * count + (count if kind in ("gpt_oss", "deepseek_v3") else 0)
    return Experts(
        count=count,
        per_token=per_token,
        params=params,
        columns=width,
        always=always,
        shared=bool(shared or extra),
        wide=wide,
        layers=_expert_layers(fields, layers),
    )


def _nemotron_experts(fields: Fields, hidden: int, count: int, at: tuple[int, ...]) -> Experts:
    """Return experts of two matrices, which may work in a space narrower than the model's."""
    width, shared = fields.count("moe_intermediate_size"), fields.count("moe_shared_expert_intermediate_size")
    shared *= fields.maybe("n_shared_experts") or 1
    narrow = fields.maybe("moe_latent_size")
    return Experts(
        count=count,
        per_token=(per_token := _per_token(fields, count)),
        params=2 * (narrow or hidden) * width,
        columns=width,
        always=2 * hidden * shared + hidden * count + count + 2 * hidden * (narrow or 0),
        shared=True,
        wide=per_token * width + shared,
        layers=at,
    )


def _expert_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    words = fields.words("mlp_layer_types", layers)
    if words is not None:
        return tuple(i for i in range(layers) if words[i] == "sparse")
    first = fields.maybe("first_k_dense_replace") or 0
    step = fields.maybe("moe_layer_freq") or fields.maybe("decoder_sparse_step") or 1
    plain = fields.config.get("mlp_only_layers") or ()
    if "decoder_sparse_step" in fields.config:
        return tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in plain)
    return tuple(i for i in range(layers) if i >= first and i % step == 0 and i not in plain)


def _per_token(fields: Fields, count: int) -> int:
    each = fields.maybe("num_experts_per_tok") or fields.count("experts_per_token")
    if each > count:
        raise fields.error("num_experts_per_tok", f"is {each}, above the {count} experts of a layer")
    return each
