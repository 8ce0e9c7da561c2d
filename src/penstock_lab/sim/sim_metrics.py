"""Metrics of the simulated engine at /metrics: Prometheus text under vLLM's names."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from penstock.kernel.machine import SECOND, Nanos
from penstock.kernel.tiers.load_worth import metrics_of
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import EngineFinished
from penstock_lab.engine.settings import SimSettings

FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
FIRST_TOKEN = (*FIRST, 160.0, 640.0, 2560.0)
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
REQUEST = (*WHOLE, 1920.0, 7680.0)
MOVED = tuple(float(2 << power) for power in range(10, 34, 2))
MOVING = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
FEW = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


class SimHistogram:
    """Counts per bucket; ``bounds`` are upper ends."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class SimMetrics:
    """Measurements per request. Times are the engine's, so free of the server's own delay."""

    def __init__(self, max_model_len: int) -> None:
        tokens = list(one_two_five(max_model_len))
        self.histograms: dict[str, tuple[str, SimHistogram]] = {
            "time_to_first_token_seconds": ("Time to first token in seconds.", SimHistogram(FIRST_TOKEN)),
            "inter_token_latency_seconds": ("Time between two tokens in seconds.", SimHistogram(BETWEEN)),
            "request_time_per_output_token_seconds": ("A request's time per output token.", SimHistogram(BETWEEN)),
            "e2e_request_latency_seconds": ("From arrival to the last token, in seconds.", SimHistogram(REQUEST)),
            "request_queue_time_seconds": ("Time in line, in seconds.", SimHistogram(REQUEST)),
            "request_inference_time_seconds": ("From the first pass to the last token.", SimHistogram(REQUEST)),
            "request_prefill_time_seconds": ("From the first pass to the first token.", SimHistogram(REQUEST)),
            "request_decode_time_seconds": ("From the first to the last token.", SimHistogram(REQUEST)),
            "request_prompt_tokens": ("Prompt tokens of a request.", SimHistogram(tokens)),
            "request_generation_tokens": ("Output tokens of a request.", SimHistogram(tokens)),
            "request_prefill_kv_computed_tokens": ("Prompt tokens that were not cached.", SimHistogram(tokens)),
            "request_num_preemptions": ("How often a request was preempted.", SimHistogram(FEW)),
            "nixl_xfer_time_seconds": ("How long KV was on its way from another engine.", SimHistogram(MOVING)),
            "nixl_bytes_transferred": ("Bytes of KV that came in one hand-off.", SimHistogram(MOVED)),
        }
        self.transfers_failed = 0
        self.notifications_failed = 0

    def transferred(self, size: int, duration: float) -> None:
        """Count KV that came: bytes, and the seconds of the transfer."""
        self._observe("nixl_xfer_time_seconds", duration)
        self._observe("nixl_bytes_transferred", size)

    def transfer_failed(self) -> None:
        """Count KV that did not come."""
        self.transfers_failed += 1

    def notification_failed(self) -> None:
        """Count a holder that could not be notified of a release; as in vLLM, also a failed transfer."""
        self.notifications_failed += 1
        self.transfers_failed += 1

    def first_token(self, after: Nanos) -> None:
        """Count a first token."""
        self._observe("time_to_first_token_seconds", after / SECOND)

    def finished(self, done: EngineFinished) -> None:
        """Count a request that ended."""
        self._observe("request_prompt_tokens", done.prompt)
        self._observe("request_generation_tokens", done.tokens)
        self._observe("request_num_preemptions", done.preemptions)
        if done.started is not None:
            self._observe("request_queue_time_seconds", (done.started - done.arrived) / SECOND)
            self._observe("request_prefill_kv_computed_tokens", done.prompt - done.cached - done.pulled)
        if done.reason == "abort" or done.first is None or done.started is None:
            return
        self._observe("e2e_request_latency_seconds", (done.at - done.arrived) / SECOND)
        self._observe("request_inference_time_seconds", (done.at - done.started) / SECOND)
        self._observe("request_prefill_time_seconds", (done.first - done.started) / SECOND)
        self._observe("request_decode_time_seconds", (done.at - done.first) / SECOND)
        if done.tokens > 1:
            gap = (done.at - done.first) / SECOND / (done.tokens - 1)
            self._observe("request_time_per_output_token_seconds", gap)
            self._observe("inter_token_latency_seconds", gap, done.tokens - 1)

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name][1].observe(value, times)


def render(metrics: SimMetrics, engine: Engine, settings: SimSettings, model: str, now: Nanos) -> str:
    """Return the text of ``/metrics``."""
    counters = engine.counters(now)
    labels = f'engine="0",model_name="{model}"'
    lines: list[str] = []

    def put(name: str, kind: str, help: str, values: dict[str, float]) -> None:
        full = f"vllm:{name}"
        lines.append(f"# HELP {full} {help}\n# TYPE {full} {kind}")
        for extra, value in values.items():
            lines.append(f"{full}{{{labels}{',' + extra if extra else ''}}} {float(value)}")

    running, waiting = engine.running, engine.waiting
    loaded = sum(counters.tier_hits.values())
    outside = counters.pulled + loaded
    computed = counters.prompt - counters.prompt_cached - outside
    put("num_requests_running", "gauge", "Requests that run.", {"": running})
    put("num_requests_waiting", "gauge", "Requests in line.", {"": waiting + engine.pulling})
    put(
        "num_requests_waiting_by_reason",
        "gauge",
        "Requests in line, by reason; deferred are those whose KV is on its way.",
        {'reason="capacity"': waiting, 'reason="deferred"': engine.pulling},
    )
    put("kv_cache_usage_perc", "gauge", "Share of KV blocks in use; 1 is all.", {"": engine.kv_usage})
    put("prefix_cache_queries_total", "counter", "Prompt tokens looked up.", {"": counters.prefix_queries})
    put("prefix_cache_hits_total", "counter", "Prompt tokens found cached.", {"": counters.prefix_hits})
    asked, hits = counters.remote_queries + counters.tier_queries, counters.remote_hits + loaded
    put("external_prefix_cache_queries_total", "counter", "Tokens looked up elsewhere.", {"": asked})
    put("external_prefix_cache_hits_total", "counter", "Tokens found elsewhere.", {"": hits})
    put("num_preemptions_total", "counter", "Preemptions.", {"": counters.preemptions})
    put("prompt_tokens_total", "counter", "Prompt tokens.", {"": counters.prompt})
    put(
        "prompt_tokens_by_source_total",
        "counter",
        "Prompt tokens, by where their KV came from.",
        {
            'source="local_compute"': computed,
            'source="local_cache_hit"': counters.prompt_cached,
            'source="external_kv_transfer"': outside,
        },
    )
    spared = counters.prompt_cached + outside
    put("prompt_tokens_cached_total", "counter", "Prompt tokens not computed here.", {"": spared})
    failed, expired = metrics.transfers_failed, counters.hold_expired
    put(
        "nixl_num_failed_transfers_total",
        "counter",
        "KV transfers that failed, or releases that did not reach the holder.",
        {"": failed},
    )
    lost = metrics.notifications_failed
    put("nixl_num_failed_notifications_total", "counter", "Releases that did not reach the holder.", {"": lost})
    put("nixl_num_kv_expired_reqs_total", "counter", "Retained requests whose KV no worker fetched.", {"": expired})
    put("generation_tokens_total", "counter", "Output tokens.", {"": counters.generated})
    put(
        "request_success_total",
        "counter",
        "Requests that ended, by reason.",
        {f'finished_reason="{reason}"': count for reason, count in counters.ended.items()},
    )
    tokens = float(computed + counters.generated)
    lines.append(
        "# HELP vllm:iteration_tokens_total Tokens of a pass, without buckets.\n"
        "# TYPE vllm:iteration_tokens_total histogram\n"
        f'vllm:iteration_tokens_total_bucket{{{labels},le="+Inf"}} {float(counters.passes)}\n'
        f"vllm:iteration_tokens_total_count{{{labels}}} {float(counters.passes)}\n"
        f"vllm:iteration_tokens_total_sum{{{labels}}} {tokens}"
    )
    for name, (help, histogram) in metrics.histograms.items():
        full = f"vllm:{name}"
        lines.append(f"# HELP {full} {help}\n# TYPE {full} histogram")
        reached = 0
        for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            reached += count
            lines.append(f'{full}_bucket{{{labels},le="{bound}"}} {float(reached)}')
        lines.append(f"{full}_count{{{labels}}} {float(reached)}\n{full}_sum{{{labels}}} {histogram.total}")
    config = (
        f'block_size="{settings.block_size}",cache_dtype="auto",enable_prefix_caching="{settings.enable_prefix_caching}",'
        f'kv_cache_size_tokens="{settings.capacity}",num_gpu_blocks="{settings.blocks}",'
        f'max_num_seqs="{settings.max_num_seqs}",max_num_batched_tokens="{settings.max_num_batched_tokens}"'
    )
    put("cache_config_info", "gauge", "Settings of the cache.", {config: 1})
    if engine.tiers is not None:
        sizes = engine.tiers.blocks()
        for name, kind, help, values in (
            ("tokens_loaded_total", "counter", "Prompt tokens loaded from a tier.", counters.tier_hits),
            ("blocks", "gauge", "Blocks that a tier has.", {tier: used for tier, (used, _) in sizes.items()}),
            ("blocks_max", "gauge", "Blocks that a tier can have.", {tier: room for tier, (_, room) in sizes.items()}),
        ):
            lines.append(f"# HELP penstock_sim_tier_{name} {help}\n# TYPE penstock_sim_tier_{name} {kind}")
            lines += [f'penstock_sim_tier_{name}{{{labels},tier="{tier}"}} {float(n)}' for tier, n in values.items()]
        for metric, value in metrics_of(engine.tiers.costs(now)).items():
            lines.append(f"# TYPE {metric} gauge\n{metric}{{{labels}}} {value}")
    encoded, reused, fetched = engine.media_counts
    lines.append(
        "# HELP penstock_sim_media_total Images and the like that were encoded, reused, or fetched from the store.\n"
        "# TYPE penstock_sim_media_total counter\n"
        f'penstock_sim_media_total{{{labels},outcome="encoded"}} {float(encoded)}\n'
        f'penstock_sim_media_total{{{labels},outcome="reused"}} {float(reused)}\n'
        f'penstock_sim_media_total{{{labels},outcome="fetched"}} {float(fetched)}'
    )
    timing = engine.timing
    lines.append(
        "# HELP penstock_sim_timing_lookups_total Look-ups of the timing table, and those outside of what it covers.\n"
        "# TYPE penstock_sim_timing_lookups_total counter\n"
        f'penstock_sim_timing_lookups_total{{{labels},inside="true"}} {float(timing.lookups - timing.extrapolated)}\n'
        f'penstock_sim_timing_lookups_total{{{labels},inside="false"}} {float(timing.extrapolated)}'
    )
    return "\n".join(lines) + "\n"


def one_two_five(most: int) -> Iterable[float]:
    """Yield 1, 2, 5, 10, 20, 50... up to ``most``."""
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > most:
                return
            yield float(digit * scale)
        scale *= 10
