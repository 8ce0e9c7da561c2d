"""Does the roofline take what bytes over bandwidth and operations over rates take, term by term?"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.errors import ConfigError
from penstock_lab.engine.settings import Calibration, TimingSettings
from penstock_lab.engine.timing.collectives import Link, collectives
from penstock_lab.engine.timing.gpus import GPUS, named
from penstock_lab.engine.timing.known_models import model_named
from penstock_lab.engine.timing.model_shape import shape_of
from penstock_lab.engine.timing.roofline import Roofline, RooflineTiming, experts_touched, work_of
from penstock_lab.engine.timing.timing_model import timing_of
from penstock_lab.engine.timing.weight_types import Dtype
from tests.lab.engine.models import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_8B, LLAMA_70B, MIXTRAL_8X7B, TINY

IDEAL = Calibration(
    bandwidth_efficiency=1.0,
    compute_efficiency=1.0,
    narrow_efficiency=1.0,
    link_efficiency=1.0,
    link_latency_ms=0.0,
    layer_overhead_ms=0.0,
    expert_layer_overhead_ms=0.0,
    expert_efficiency=1.0,
    widening_efficiency=1.0,
    pass_overhead_ms=0.0,
    sequence_overhead_ms=0.0,
)
H100 = named("h100")


def ideal(config: dict, **how: object) -> Roofline:
    return Roofline(shape_of(config), H100, IDEAL, **how)  # type: ignore[arg-type]


def step(roofline: Roofline, kv: int, seqs: int) -> float:
    return roofline.seconds(work_of((), kv, seqs, roofline.shape.reads))


def prompt(roofline: Roofline, past: int, new: int) -> float:
    return roofline.seconds(work_of([(past, new)], 0, 0, roofline.shape.reads))


def test_one_token_of_one_sequence_reads_the_weights() -> None:
    """Llama-3.1-8B in bf16 on an H100: 15.0 GB without the embedding, at 3.35 TB/s."""
    roofline = ideal(LLAMA_8B)
    read = 2 * (8_030_261_248 - 128256 * 4096)
    assert step(roofline, 1, 1) == pytest.approx(read / 3.35e12, rel=1e-3)
    assert step(roofline, 1, 1) == pytest.approx(0.00448, rel=1e-2)


def test_kv_is_read_at_the_memory_s_rate_and_half_as_long_in_fp8() -> None:
    for dtype, width in (("bf16", 2), ("fp8", 1)):
        roofline = ideal(LLAMA_8B, kv_cache_dtype=dtype)
        more = step(roofline, 1_001_000, 64) - step(roofline, 1000, 64)
        assert more == pytest.approx(1_000_000 * 2 * 32 * 8 * 128 * width / 3.35e12)


def test_weights_of_four_bits_are_read_as_such_and_computed_in_bf16() -> None:
    """Attention that a checkpoint leaves in bf16 is read in full; GPUs compute in no type of AWQ."""
    awq = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]}
    narrow, plain = ideal({**LLAMA_8B, "quantization_config": awq}), ideal(LLAMA_8B)
    mlps = 32 * 3 * 4096 * 14336
    assert plain.costs.linear_read - narrow.costs.linear_read == pytest.approx(mlps * (2 - 4.25 / 8) / 3.35e12)
    assert narrow.costs.linear_token == pytest.approx(plain.costs.linear_token)
    assert ideal(LLAMA_8B, weight_dtype="int4").costs.linear_read < narrow.costs.linear_read


def test_sparse_attention_reads_the_keys_of_all_and_the_rest_of_the_chosen() -> None:
    """DeepSeek-V3.2: 132 bytes per token for its indexer, of 2,048 tokens the latent cache as well."""
    config = {**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_topk": 2048}
    roofline = ideal({**config, "index_head_dim": 128, "index_n_heads": 64})
    looked_at = 61 * max(132 / 3.35e12, 2 * 64 * 128 / 1978e12)
    read = 61 * max(576 * 2 / 3.35e12, roofline.shape.read_flops / 989e12)
    assert step(roofline, 1001, 1) - step(roofline, 1, 1) == pytest.approx(1000 * (looked_at + read))
    assert step(roofline, 101_000, 1) - step(roofline, 1000, 1) == pytest.approx(100_000 * looked_at + 1048 * read)
    long, dense = prompt(roofline, 100_000, 512), prompt(ideal(DEEPSEEK_V3), 100_000, 512)
    assert prompt(roofline, 0, 512) < long < dense


def test_a_state_is_read_and_written_whole_for_each_sequence_of_a_step() -> None:
    roofline = ideal(dict(model_named("Qwen3-Next-80B-A3B-Instruct")))
    one, more = (roofline.costs.output * seqs for seqs in (1, 9))
    assert more - one == pytest.approx(8 * 2 * roofline.shape.state_bytes / 3.35e12)
    slope = step(roofline, 20_000, 8) - step(roofline, 10_000, 8)
    assert slope == pytest.approx(10_000 * 12 * 2 * 2 * 256 * 2 / 3.35e12), "twelve layers read KV"


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    roofline = ideal(LLAMA_8B)
    linear = 2 * (8_030_261_248 - 2 * 128256 * 4096) * 8192 / 989e12
    attention = 4 * 32 * 32 * 128 * (8192 * 8193 / 2) / 989e12
    activations = 8192 * roofline.shape.activations * 2 / 3.35e12
    head = 128256 * 4096 * 2 / 3.35e12
    assert prompt(roofline, 0, 8192) == pytest.approx(linear + attention + activations + head, rel=1e-9)


def test_a_cached_prefix_is_attended_to_but_not_computed() -> None:
    roofline = ideal(LLAMA_8B)
    more = prompt(roofline, 30_000, 2048) - prompt(roofline, 0, 2048)
    assert more == pytest.approx(4 * 32 * 32 * 128 * 30_000 * 2048 / 989e12)


def test_a_few_tokens_after_a_long_prefix_read_its_kv() -> None:
    roofline = ideal(LLAMA_8B)
    assert prompt(roofline, 100_000, 1) - prompt(roofline, 0, 1) == pytest.approx(100_000 * 131_072 / 3.35e12)


def test_a_mixed_pass_reads_the_weights_once() -> None:
    roofline = ideal(LLAMA_8B)
    mixed = roofline.seconds(work_of([(0, 16)], 1000, 8, None))
    assert mixed < step(roofline, 1000, 8) + 0.02 * prompt(roofline, 0, 16)


def test_narrower_weights_are_read_faster_unless_they_must_be_widened() -> None:
    wide = step(ideal(LLAMA_70B), 1, 1)
    assert step(ideal(LLAMA_70B, weight_dtype="fp8"), 1, 1) == pytest.approx(wide / 2, rel=0.02)
    calibration = msgspec.structs.replace(IDEAL, widening_efficiency=0.5)
    on = {
        name: step(Roofline(shape_of(LLAMA_70B), named(name), calibration, weight_dtype="fp4"), 1, 1)
        * named(name).bandwidth
        for name in ("h100", "b200")
    }
    assert on["h100"] == pytest.approx(2 * on["b200"], rel=0.06)


def test_tensor_parallel_divides_the_work_and_adds_two_all_reduces_per_layer() -> None:
    one, eight = ideal(LLAMA_70B), ideal(LLAMA_70B, tensor_parallel_size=8)
    tokens = 4096
    sent = 2 * 80 * (2 * 7 / 8) * tokens * 8192 * 2 / 450e9
    assert prompt(eight, 0, tokens) == pytest.approx(prompt(one, 0, tokens) / 8 + sent, rel=1e-9)
    late = Roofline(
        shape_of(LLAMA_70B), H100, msgspec.structs.replace(IDEAL, link_latency_ms=0.01), tensor_parallel_size=8
    )
    assert prompt(late, 0, tokens) - prompt(eight, 0, tokens) == pytest.approx(160 * 10e-6)


def test_kv_heads_are_split_no_further_than_there_are_and_a_latent_cache_not_at_all() -> None:
    def per_token(config: dict, gpus: int) -> float:
        far, _ = ideal(config, tensor_parallel_size=gpus).read_seconds()
        return far

    assert per_token(LLAMA_70B, 16) == pytest.approx(per_token(LLAMA_70B, 8))
    assert per_token(LLAMA_70B, 8) == pytest.approx(per_token(LLAMA_70B, 1) / 8)
    assert per_token(DEEPSEEK_V3, 8) == pytest.approx(per_token(DEEPSEEK_V3, 4))


@given(st.integers(1, 256), st.integers(1, 8), st.integers(0, 10_000))
def test_experts_touched_are_those_that_even_choices_touch(experts: int, per_token: int, tokens: int) -> None:
    per_token = min(per_token, experts)
    touched = experts_touched(experts, per_token, tokens)
    assert 0 <= touched <= experts
    assert experts_touched(experts, per_token, 0) == 0
    assert experts_touched(experts, per_token, 1) == pytest.approx(per_token)
    naive = sum(1 - (1 - per_token / experts) ** tokens for _ in range(experts))
    assert touched == pytest.approx(naive)


def test_a_lone_token_reads_its_own_experts_only() -> None:
    shape = shape_of(MIXTRAL_8X7B)
    read = (shape.params_active - shape.embedding) * 2
    assert step(ideal(MIXTRAL_8X7B), 1, 1) == pytest.approx(read / 3.35e12, rel=1e-3)
    everything = (shape.params - shape.embedding) * 2
    assert step(ideal(MIXTRAL_8X7B), 64, 64) == pytest.approx(everything / 3.35e12, rel=2e-2)


def test_experts_on_gpus_of_their_own_get_their_tokens_by_all_to_all() -> None:
    shape, tokens = shape_of(DEEPSEEK_V3), 4096
    sliced = ideal(DEEPSEEK_V3, tensor_parallel_size=8)
    spread = ideal(DEEPSEEK_V3, tensor_parallel_size=1, expert_parallel_size=8)
    assert sliced.gpus == spread.gpus == 8
    reached = 8 * (1 - (7 / 8) ** 8)  # GPUs that have one of a token's eight experts; a token goes to each once
    exchanged = 2 * 58 * (tokens / 8) * reached * 7168 * 2 * (7 / 8) / 450e9
    assert spread.collectives.token * tokens == pytest.approx(exchanged)
    assert shape.moe_layers == 58
    # Attention is data-parallel then: each GPU has the whole of its own sequences' cache, an eighth of all.
    assert spread.read_seconds()[0] == pytest.approx(sliced.read_seconds()[0] / 8)


@given(st.sampled_from([2, 4, 8, 16]), st.integers(1, 16))
def test_a_token_goes_to_no_gpu_twice(gpus: int, chosen: int) -> None:
    """However many experts it has there: all-to-all sends at most what sending everything to everyone does."""
    shape = shape_of({**DEEPSEEK_V3, "num_experts_per_tok": chosen})
    link = Link(16e9, 0.0)
    some, everyone = (collectives(shape, link, link, 1, gpus, gathered=gathered) for gathered in (False, True))
    assert 0 < some.token <= everyone.token
    assert chosen > 1 or some.token == pytest.approx(everyone.token / gpus)


@given(
    st.sampled_from([LLAMA_70B, GPT_OSS_120B, DEEPSEEK_V3]),
    st.sampled_from(sorted(GPUS)),
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.integers(1, 256),
)
def test_more_work_never_takes_less_time(config: dict, gpu: str, new: int, more: int, seqs: int) -> None:
    roofline = Roofline(shape_of(config), named(gpu), Calibration())
    assert prompt(roofline, 0, new) <= prompt(roofline, 0, new + more)
    assert prompt(roofline, 0, new) <= prompt(roofline, more, new)
    assert step(roofline, 512 * seqs, seqs) < step(roofline, 512 * (seqs + 1), seqs + 1)
    assert step(roofline, 512 * seqs, seqs) <= step(roofline, 512 * seqs + more, seqs)


@given(st.sampled_from([LLAMA_70B, GPT_OSS_120B]), st.sampled_from(["h100", "b200"]), st.integers(2048, 16_384))
def test_more_gpus_compute_a_long_prompt_sooner(config: dict, gpu: str, new: int) -> None:
    times = [
        prompt(Roofline(shape_of(config), named(gpu), Calibration(), tensor_parallel_size=gpus), 0, new)
        for gpus in (1, 2, 4, 8)
    ]
    assert times == sorted(times, reverse=True)


def test_narrower_operands_keep_a_share_of_what_they_double() -> None:
    calibration = msgspec.structs.replace(IDEAL, compute_efficiency=0.6, narrow_efficiency=0.8)

    def token(gpu: str, dtype: Dtype) -> float:
        return Roofline(shape_of(LLAMA_8B), named(gpu), calibration, weight_dtype=dtype).costs.linear_token

    for gpu in ("b200", "rtxpro6000"):
        params = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
        assert token(gpu, "bf16") == pytest.approx(2 * params / (named(gpu).flops("bf16") * 0.6), rel=1e-3)
        assert token(gpu, "bf16") / token(gpu, "fp8") == pytest.approx(2 * 0.8, rel=2e-2)
        assert token(gpu, "bf16") / token(gpu, "fp4") == pytest.approx(4 * 0.64, rel=2e-2)
    assert token("h100", "fp4") == token("h100", "bf16")


def test_collectives_are_counted_by_kind_of_layer() -> None:
    late = Calibration(link_latency_ms=1.0)

    def count(**how: int) -> float:
        found = Roofline(shape_of(DEEPSEEK_V3), H100, late, **how)  # type: ignore[arg-type]
        return round(found.collectives.fixed * 1e3)

    assert count() == 0
    assert count(tensor_parallel_size=8) == count(tensor_parallel_size=8, expert_parallel_size=8) == 2 * 61
    assert count(expert_parallel_size=8) == 2 * 58
    assert count(tensor_parallel_size=2, expert_parallel_size=8) == 61 + 3 + 2 * 58


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), max_size=4),
    st.integers(0, 5000),
    st.integers(0, 20),
)
def test_the_work_of_a_pass_is_what_counting_gives(chunks: list[tuple[int, int]], kv: int, seqs: int) -> None:
    work = work_of(iter(chunks), kv, seqs, 128)
    seen = [past + i for past, new in chunks for i in range(1, new + 1)]
    assert work.tokens == len(seen) + seqs
    assert work.outputs == len(chunks) + seqs
    assert work.pairs == sum(seen)
    assert work.pairs_windowed == sum(min(count, 128) for count in seen)
    assert work.context == sum(past + new for past, new in chunks)
    assert work.context_windowed <= work.context
    assert work.kv_windowed == min(kv, 128 * seqs)


def test_a_run_bends_where_the_windows_are_full() -> None:
    model = RooflineTiming(ideal(TINY))
    run = model.run(5 * 8, 8, 20)  # 5 tokens each; the window of 12 is full after 7 steps
    early, late = run.after(2) - run.after(1), run.after(4) - run.after(3)
    assert early <= late
    slope = model.decode(8 * 6, 8) - model.decode(8 * 5, 8)
    assert model.decode(8 * 13, 8) - model.decode(8 * 12, 8) < slope
    assert run.after(20) == pytest.approx(sum(model.decode(8 * (5 + i), 8) for i in range(20)), abs=3)


def test_speed_up_divides_everything() -> None:
    settings = TimingSettings(kind="roofline", model="given", gpu="h100")
    plain = timing_of(settings, 1000, {"model": GPT_OSS_120B})
    fast = timing_of(msgspec.structs.replace(settings, speed_up=5.0), 1000, {"model": GPT_OSS_120B})
    assert fast.prefill(900) == pytest.approx(plain.prefill(900) / 5)
    assert fast.decode(900, 3) == pytest.approx(plain.decode(900, 3) / 5)


@pytest.mark.parametrize(
    ("config", "tensor", "expert", "says"),
    [
        (LLAMA_8B, 3, 1, "tensor_parallel_size is 3"),
        (LLAMA_8B, 1, 4, "has no experts"),
        (MIXTRAL_8X7B, 1, 3, "expert_parallel_size is 3"),
        (DEEPSEEK_V3, 4, 2 * 3, "expert_parallel_size is 6"),
    ],
)
def test_gpus_that_do_not_divide_the_model_are_refused(config: dict, tensor: int, expert: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ideal(config, tensor_parallel_size=tensor, expert_parallel_size=expert)


def test_a_gpu_that_is_not_known_or_a_model_that_is_not_there_is_named() -> None:
    settings = TimingSettings(kind="roofline", model="given", gpu="h1000")
    with pytest.raises(ConfigError, match="h1000"):
        timing_of(settings, 1000, {"model": LLAMA_8B})
    settings = msgspec.structs.replace(settings, gpu="h100")
    with pytest.raises(ConfigError, match=r"timing\.model"):
        timing_of(settings, 1000, {})
    with pytest.raises(ConfigError, match=r"timing\.model"):
        timing_of(settings, 1000)
