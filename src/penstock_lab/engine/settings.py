"""Settings of the simulated engine: each knob once, with unit, range, default and what it trades."""

from typing import Annotated, Literal

from penstock.kernel.errors import ConfigError, InvariantError
from penstock.kernel.settings import Knob, Settings
from penstock_lab.engine.timing.weight_types import Dtype

DEFAULT_BLOCKS = 16_384
"""Blocks of an engine whose GPU is not named."""
TimingKind = Literal["polynomial", "table", "roofline", "operators", "aiconfigurator"]
Scheduling = Literal["fcfs", "priority"]
Preemption = Literal["lifo", "fifo"]
Pulling = Literal["full_prompt", "missing"]


class Calibration(Settings, frozen=True, kw_only=True):
    """What a data sheet does not say of passes; `bench/roofline` fits these to measurements.

    The defaults are what `bench/roofline/run.py` fitted, through the engine, to points measured on GPUs with HBM.
    """

    bandwidth_efficiency: Annotated[
        float,
        Knob("Share of the memory bandwidth that kernels reach; higher is faster decoding.", unit="ratio", gt=0, le=1),
    ] = 0.906
    compute_efficiency: Annotated[
        float,
        Knob("Share of the arithmetic rate that kernels reach; higher is faster prefill.", unit="ratio", gt=0, le=1),
    ] = 0.652
    narrow_efficiency: Annotated[
        float,
        Knob(
            "Share of that which each doubling of the rate by narrower operands keeps: once for fp8, twice for fp4.",
            unit="ratio",
            gt=0,
            le=1,
        ),
    ] = 0.82
    expert_efficiency: Annotated[
        float,
        Knob(
            "Share of that rate for routed experts, whose matrices are many and small; higher is faster prefill.",
            unit="ratio",
            gt=0,
            le=1,
        ),
    ] = 0.396
    gddr_efficiency: Annotated[
        float,
        Knob(
            "Share of the memory bandwidth that kernels reach where the memory is GDDR: profiles show 0.79 on an RTX "
            "PRO 6000 and 0.94 on an RTX 4090.",
            unit="ratio",
            gt=0,
            le=1,
        ),
    ] = 0.86
    widening_efficiency: Annotated[
        float,
        Knob(
            "Share of that bandwidth for weights in a data type that the GPU does not compute in, such as fp4 on H100.",
            unit="ratio",
            gt=0,
            le=1,
        ),
    ] = 0.738
    link_efficiency: Annotated[
        float, Knob("Share of the link's rate that collectives reach.", unit="ratio", gt=0, le=1)
    ] = 0.452
    link_latency_ms: Annotated[
        float, Knob("What a collective costs before its first byte; there are two per layer.", unit="ms", ge=0)
    ] = 0.0092
    layer_overhead_ms: Annotated[
        float, Knob("What launches and small kernels add per layer; CUDA graphs lower it.", unit="ms", ge=0)
    ] = 0.0387
    expert_layer_overhead_ms: Annotated[
        float,
        Knob("What routing tokens to experts and back adds per layer that has them.", unit="ms", ge=0),
    ] = 0.016
    pass_overhead_ms: Annotated[
        float, Knob("What the host adds per pass: scheduling, sampling, input preparation.", unit="ms", ge=0)
    ] = 0.69
    sequence_overhead_ms: Annotated[float, Knob("What the host adds per sequence of a pass.", unit="ms", ge=0)] = 0.0031


class TimingSettings(Settings, frozen=True, kw_only=True):
    """How long a forward pass takes."""

    kind: Annotated[
        TimingKind,
        Knob(
            "polynomial: the fit of Dynamo's mocker to a large GPU, or prefill and decode as set; table: an NPZ file; "
            "roofline: from a model's config.json and a GPU's data sheet; operators: from a profile of its layers; "
            "aiconfigurator: what that package predicts, where it is installed."
        ),
    ] = "polynomial"
    speed_up: Annotated[
        float, Knob("Every duration is divided by this; higher runs the same schedule in less time.", gt=0)
    ] = 1.0
    model: Annotated[
        str | None,
        Knob(
            "Roofline and operators kinds: the model's config.json as Hugging Face has it, or its folder; "
            "aiconfigurator kind: that folder, or a model's name that it knows."
        ),
    ] = None
    gpu: Annotated[
        str | None,
        Knob(
            "Roofline and aiconfigurator kinds, operators over several GPUs, and what kv_blocks: auto goes by: a100, "
            "h100, h200, b200, b300, gb200, gb300, l40s, rtx4090, rtxpro6000, or (not for aiconfigurator) a YAML file "
            "that describes another."
        ),
    ] = None
    profile: Annotated[
        str | None,
        Knob(
            "Operators kind: folder with dense.csv, per_sequence.csv, attention.csv, for experts moe.csv, and for "
            "sequences of uneven lengths skew.csv. Table kind: folder of penstock profile or of Dynamo's profiler, or "
            "NPZ file with prefill_isl, prefill_ttft_ms, decode_active_kv_tokens, decode_context_length, decode_itl."
        ),
    ] = None
    tensor_parallel_size: Annotated[
        int, Knob("GPUs that share each layer; more is faster until collectives weigh as much.", unit="count", ge=1)
    ] = 1
    expert_parallel_size: Annotated[
        int,
        Knob(
            "Roofline and operators kinds: GPUs that whole experts are spread over; above tensor_parallel_size "
            "attention is data-parallel.",
            unit="count",
            ge=1,
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Knob(
            "Roofline kind: stages of the layers, for a model that no one node holds. One pass is under way at a time; "
            "real engines have one per stage, so their throughput is higher.",
            unit="count",
            ge=1,
        ),
    ] = 1
    link: Annotated[
        str | None,
        Knob(
            "What collectives between an engine's GPUs reach: a rate and a latency such as 16GB/s,20us, or a file with "
            "what all_reduce_perf of nccl-tests prints; unset takes the GPU's."
        ),
    ] = None
    weight_dtype: Annotated[
        Dtype | None, Knob("Roofline kind: data type of the layers' weights; unset takes the config's.")
    ] = None
    kv_cache_dtype: Annotated[
        Dtype | None, Knob("Roofline kind: data type of the KV cache; unset takes the checkpoint's.")
    ] = None
    calibration: Annotated[
        Calibration,
        Knob(
            "Roofline kind, and collectives of the operators kind: what kernels, links and the host reach, by name; a "
            "name that is not given keeps its default."
        ),
    ] = Calibration()
    prefill: Annotated[
        tuple[float, float, float],
        Knob(
            "Polynomial kind: prefill milliseconds of a pass per squared new token, per new token, and for having any.",
            ge=0,
        ),
    ] = (4.209989e-07, 1.518344e-02, 16.50142)
    decode: Annotated[
        tuple[float, float, float],
        Knob(
            "Polynomial kind: decode milliseconds of a step per squared share of the KV cache that is read, per share, "
            "and over an empty cache; a step takes at least 1."
        ),
    ] = (-25.74, 54.01, 5.74)

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return max(self.tensor_parallel_size, self.expert_parallel_size) * self.pipeline_parallel_size


class TransferSettings(Settings, frozen=True, kw_only=True):
    """How KV goes from one engine to another."""

    bandwidth: Annotated[
        float,
        Knob(
            "Rate of an engine's link, each way; hand-offs at one time share it, so more shortens those.",
            unit="bytes/s",
            gt=0,
        ),
    ] = 64e9
    latency: Annotated[float, Knob("What a hand-off takes before its first byte.", unit="s", ge=0)] = 0.0
    kv_bytes_per_token: Annotated[
        int,
        Knob(
            "KV of one token, all layers together; more makes hand-offs longer. The default is Llama-3.1-8B in bf16.",
            unit="bytes",
            gt=0,
        ),
    ] = 131_072
    pull: Annotated[
        Pulling,
        Knob("What is brought of a prompt: full_prompt all of it; missing only what the own prefix cache lacks."),
    ] = "full_prompt"
    hold_timeout: Annotated[
        float,
        Knob(
            "Time after which blocks held for another engine are let go; less frees stranded ones sooner, but makes a "
            "late engine compute the prompt itself.",
            unit="s",
            gt=0,
        ),
    ] = 480.0


class TierLinks(Settings, frozen=True, kw_only=True):
    """How fast simulated KV goes between an engine's memory and the tiers below it; each way has its own queue."""

    host_bandwidth: Annotated[
        float,
        Knob(
            "Between one GPU and host memory, each way. The default is what PCIe 5.0 x16 reaches of its 64 GB/s; GPUs "
            "of one engine have a link each.",
            unit="bytes/s",
            gt=0,
        ),
    ] = 55e9
    disk_read: Annotated[
        float, Knob("From disk to host. The default is one NVMe drive of PCIe 4.0.", unit="bytes/s", gt=0)
    ] = 7e9
    disk_write: Annotated[
        float,
        Knob(
            "From host to disk. The default is such a drive's sustained rate; less lets blocks miss the disk, since a "
            "full queue skips them.",
            unit="bytes/s",
            gt=0,
        ),
    ] = 5e9
    object_bandwidth: Annotated[
        float,
        Knob(
            "Between host and object store, each way. The default is 16 connections of 90 MB/s, which is what one "
            "connection to S3 gives.",
            unit="bytes/s",
            gt=0,
        ),
    ] = 1.4e9
    peer_bandwidth: Annotated[
        float,
        Knob(
            "From another worker's host memory. The default is what a network of 100 Gb/s leaves of its 12.5 GB/s.",
            unit="bytes/s",
            gt=0,
        ),
    ] = 11e9


class EncoderSettings(Settings, frozen=True, kw_only=True):
    """How fast a simulated engine encodes images, and reads what others have encoded."""

    tokens_per_second: Annotated[
        float,
        Knob(
            "Tokens that come out of the encoder per second; more shortens passes with images. The default is a vision "
            "encoder of 675 M parameters on an H100, by arithmetic.",
            unit="1/s",
            gt=0,
        ),
    ] = 70_000.0
    overhead: Annotated[
        float, Knob("What each image takes besides: its preparation, and the launch of its kernels.", unit="s", ge=0)
    ] = 0.005
    cache_tokens: Annotated[
        int,
        Knob("Embeddings that an engine keeps for itself, as vLLM's encoder cache does.", unit="tokens", ge=0),
    ] = 16_384


class SimSettings(Settings, frozen=True, kw_only=True):
    """A simulated engine: scheduler, cache and speed."""

    block_size: Annotated[
        int, Knob("Tokens per KV block; smaller shares more of a prefix and costs more events.", unit="tokens", gt=0)
    ] = 64
    kv_blocks: Annotated[
        int | Literal["auto"],
        Knob(
            "Blocks of the KV cache; more keeps more prefixes and preempts less. auto: what the GPU that timing names "
            "has room for, and 16,384 where it names none.",
            unit="blocks",
            gt=0,
        ),
    ] = "auto"
    load_time: Annotated[float, Knob("Seconds that loading its weights takes at a start.", unit="s", ge=0, le=3600)] = (
        0.0
    )
    sibling_load_time: Annotated[
        float | None,
        Knob(
            "Seconds that loading its weights takes where the pool has share_weights and another replica of it serves; "
            "unset is load_time.",
            unit="s",
            ge=0,
            le=3600,
        ),
    ] = None
    wake_time: Annotated[
        float,
        Knob(
            "Seconds that it takes to fall asleep, and as many to wake: its weights are copied.",
            unit="s",
            ge=0,
            le=3600,
        ),
    ] = 0.0
    max_num_seqs: Annotated[
        int, Knob("Most requests running at once; more raises throughput and ITL.", unit="requests", gt=0)
    ] = 256
    max_num_batched_tokens: Annotated[
        int, Knob("Most tokens of one pass; more favours TTFT over ITL. Not below max_num_seqs.", unit="tokens", gt=0)
    ] = 8192
    max_model_len: Annotated[
        int, Knob("Longest prompt and output together; longer requests are refused.", unit="tokens", gt=1)
    ] = 131_072
    watermark: Annotated[
        float,
        Knob("Share of the blocks kept free when a request is admitted; more preempts less.", unit="ratio", ge=0, lt=1),
    ] = 0.0
    preemption_mode: Annotated[
        Preemption, Knob("Request that gives up its blocks when they run short: lifo the youngest, fifo the oldest.")
    ] = "lifo"
    scheduling_policy: Annotated[
        Scheduling,
        Knob("Order of waiting: fcfs by arrival; priority lower numbers first, and they are preempted last."),
    ] = "fcfs"
    enable_prefix_caching: Annotated[
        bool, Knob("Keep full blocks of finished requests for others with that prefix.")
    ] = True
    enable_chunked_prefill: Annotated[
        bool, Knob("Split prompts over passes, so that decoding goes on; without it a prompt is one pass.")
    ] = True
    async_scheduling: Annotated[
        bool,
        Knob(
            "Plan a pass when the one before it starts, as vLLM does by default: the GPU never waits for the host, but "
            "who arrives, and what is freed, counts a pass later."
        ),
    ] = False
    emit_decode_blocks: Annotated[
        bool,
        Knob("Cache and announce blocks of generated tokens too; the next turn of a chat hits them, at some cost."),
    ] = True
    num_speculative_tokens: Annotated[
        int, Knob("Draft tokens per decode step; 0 switches speculation off.", unit="tokens", ge=0, le=16)
    ] = 0
    accept_rate: Annotated[
        float, Knob("Chance that a draft token is accepted after the ones before it.", unit="ratio", ge=0, le=1)
    ] = 0.7
    request_overhead: Annotated[
        float,
        Knob(
            "Time from a request's arrival until the scheduler sees it: HTTP, template, tokens, the way between "
            "processes. Simulations and plans count it; a simulated engine that serves has its own.",
            unit="s",
            ge=0,
        ),
    ] = 0.0
    adapter_load: Annotated[
        float, Knob("Time to load a LoRA adapter into memory; requests with it wait for that.", unit="s", ge=0)
    ] = 0.5
    reply_tokens: Annotated[
        int,
        Knob("Typical length of an answer that may end by itself; 0 always runs to max_tokens.", unit="tokens", ge=0),
    ] = 128
    stream_interval: Annotated[
        int,
        Knob("Tokens per streamed chunk after the first; more costs less CPU, arrives in lumps.", unit="tokens", gt=0),
    ] = 1
    seed: Annotated[int, Knob("Seed of generated text and of accepted drafts.", ge=0)] = 0
    timing: TimingSettings = TimingSettings()
    transfer: TransferSettings = TransferSettings()
    tier_links: TierLinks = TierLinks()
    encoder: EncoderSettings = EncoderSettings()

    @property
    def blocks(self) -> int:
        """Blocks of the KV cache, once `penstock_lab.engine.kv_capacity.with_blocks` has worked out what fits a GPU.

        Raises:
            InvariantError: it has not.
        """
        if self.kv_blocks == "auto":
            if self.timing.gpu is None:
                return DEFAULT_BLOCKS
            raise InvariantError("kv_blocks is auto still: with_blocks says what it is")
        return self.kv_blocks

    @property
    def capacity(self) -> int:
        """Tokens that the KV cache holds; as `blocks`."""
        return self.blocks * self.block_size

    @property
    def watermark_blocks(self) -> int:
        """Blocks kept free at admission; as `blocks`."""
        return int(self.blocks * self.watermark)


def checked(settings: SimSettings) -> SimSettings:
    """Return the settings, or raise where two knobs contradict each other.

    Raises:
        ConfigError: the token budget can't hold one step of max_num_seqs requests, or the watermark leaves no block.
    """
    width = 1 + settings.num_speculative_tokens
    tokens, seqs = settings.max_num_batched_tokens, settings.max_num_seqs
    if tokens < seqs * width:
        raise ConfigError(
            f"max_num_batched_tokens is {tokens}, below max_num_seqs {seqs} * {width} tokens per decode step",
            hint=f"raise max_num_batched_tokens or lower max_num_seqs to {max(1, tokens // width)}",
        )
    _check_files(settings.timing)
    return settings


def _check_files(timing: TimingSettings) -> None:
    """Raise `ConfigError` where the kind of timing needs a file that is not named."""
    needs = {
        "table": ({"profile": timing.profile}, "set timing.profile to a profile folder or an NPZ file"),
        "roofline": ({"model": timing.model, "gpu": timing.gpu}, "set timing.model to a config.json and timing.gpu"),
        "aiconfigurator": (
            {"model": timing.model, "gpu": timing.gpu},
            "set timing.model to a model that aiconfigurator knows, and timing.gpu",
        ),
        "operators": (
            {"model": timing.model, "profile": timing.profile},
            "set timing.model to a config.json and timing.profile to a folder of CSV files",
        ),
    }
    named, hint = needs.get(timing.kind, ({}, ""))
    for name, value in named.items():
        if value is None:
            what = "GPU" if name == "gpu" else "folder" if (timing.kind, name) == ("operators", "profile") else "file"
            raise ConfigError(f"timing.kind is {timing.kind}, but timing.{name} names no {what}", hint=hint)
    if timing.pipeline_parallel_size > 1 and timing.kind != "roofline":
        raise ConfigError(
            f"timing.pipeline_parallel_size is {timing.pipeline_parallel_size}, and timing.kind {timing.kind} knows no "
            "pipelines",
            hint="leave it at 1, or set timing.kind to roofline",
        )
    several = timing.gpus
    if timing.kind == "operators" and several > 1 and timing.gpu is None and timing.link is None:
        knob = "tensor_parallel_size" if timing.tensor_parallel_size > 1 else "expert_parallel_size"
        raise ConfigError(
            f"timing.{knob} is {several}, but timing.gpu names no GPU",
            hint="profiles have no collectives in them; those come from the GPU's link, or from timing.link",
        )


def checked_monotone(timing: TimingSettings) -> TimingSettings:
    """Return the settings, or raise where a fuller cache would decode faster.

    Raises:
        ConfigError: the decode polynomial falls somewhere between an empty and a full cache, or begins below 0.
    """
    quadratic, linear, base = timing.decode
    slopes = (linear, linear + 2.0 * quadratic)
    if base < 0:
        raise ConfigError(f"decoding over an empty cache takes {base:g} ms", hint="timing.decode ends in 0 or more")
    if min(slopes) < 0:
        raise ConfigError(
            f"the decode polynomial falls as the cache fills (slopes {slopes[0]:g} and {slopes[1]:g})",
            hint="the second number of timing.decode must be at least twice the size of a negative first one",
        )
    return timing
