"""Metric names of a frontend with their labels and buckets: only the list; `FrontendMetrics` feeds it.

``dynamo_frontend_*`` and ``dynamo_component_*`` are what Dynamo's planners and dashboards query; ``penstock_*`` is
what those lack. Seconds and tokens.
"""

from penstock.adapters.telemetry.prometheus_text import MetricRegistry

TTFT = (0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480)
ITL = (
    *(0, 0.0018, 0.0033, 0.0059, 0.011, 0.02, 0.035, 0.064, 0.12, 0.21, 0.38, 0.69, 1.2, 2.3, 4.1, 7.4, 13, 24, 44),
    80,
)
ROUTER_ITL = (0, 0.0019, 0.0035, 0.0067, 0.013, 0.024, 0.045, 0.084, 0.16, 0.3, 0.56, 1.1, 2)
DURATION = (0, 2, 4, 8, 16, 32, 64, 130, 260, 510)
INPUT = (0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)
OUTPUT = (0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000)
STAGE = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5)
TOKENIZE = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1)
TEMPLATE = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05)
LOOP = (0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
SHARE = (*(i * 0.05 for i in range(20)), 1)
LOST = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class MetricNamesOf:
    """All metrics of a frontend process, made once."""

    def __init__(self) -> None:
        self.registry = MetricRegistry()
        self._frontend()
        self._router()
        self._penstock()

    def _frontend(self) -> None:
        new, name = self.registry, "dynamo_frontend_"
        kind = ("endpoint", "model", "request_type")
        self.requests_started = new.counter(name + "requests_started_total", "Requests that will be routed.", *kind)
        self.requests = new.counter(
            name + "requests_total",
            "Requests that are over.",
            *("endpoint", "error_type", "model", "request_type", "status"),
        )
        self.active = new.gauge(name + "active_requests", "Requests from the HTTP handler's start to its end.", "model")
        self.inflight = new.gauge(name + "inflight_requests", "The same, under the older name.", "model")
        self.queued = new.gauge(name + "queued_requests", "Requests that have no first token yet.", "model")
        self.disconnected = new.gauge(name + "disconnected_clients", "Clients that hung up before their answer's end.")
        self.rejections = new.counter(
            name + "model_rejection_total", "Requests refused for want of capacity.", "endpoint", "model"
        )
        self.cancellations = new.counter(name + "model_cancellation_total", "Requests whose client hung up.", *kind)
        self.ttft = new.histogram(
            name + "time_to_first_token_seconds", "First output token less arrival.", TTFT, "model"
        )
        self.itl = new.histogram(name + "inter_token_latency_seconds", "Gap before each output token.", ITL, "model")
        self.input = new.histogram(name + "input_sequence_tokens", "Prompt tokens.", INPUT, "model")
        self.output = new.histogram(name + "output_sequence_tokens", "Output tokens.", OUTPUT, "model")
        self.cached = new.histogram(
            name + "cached_tokens", "Prompt tokens that the engine took from its cache.", INPUT, "model"
        )
        self.duration = new.histogram(name + "request_duration_seconds", "Arrival to end.", DURATION, "model")
        self.output_tokens = new.counter(name + "output_tokens_total", "Output tokens of ended requests.", "model")
        self.stages = new.histogram(name + "stage_duration_seconds", "Time in a stage of a request.", STAGE, "stage")
        self.template = new.histogram(name + "template_seconds", "Applying the chat template.", TEMPLATE)
        self.tokenize = new.histogram(name + "tokenize_seconds", "Tokenising a prompt.", TOKENIZE)
        cache = name + "tokenizer_cache_"
        self.cache_hits = new.counter(cache + "hits_total", "Parts of prompts found in the tokenizer cache.")
        self.cache_misses = new.counter(cache + "misses_total", "Parts of prompts that had to be tokenised.")
        self.cache_tokens = new.counter(cache + "cached_tokens_total", "Prompt tokens from the cache.", "model")
        self.cache_fresh = new.counter(cache + "uncached_tokens_total", "Prompt tokens that were encoded.", "model")
        self.loop_delay = new.histogram(
            name + "event_loop_delay_seconds", "By how much a short sleep came back late.", LOOP
        )
        self.loop_stalls = new.counter(name + "event_loop_stall_total", "Sleeps that came back more than 5 ms late.")
        model = name + "model_"
        self.ready = new.gauge(model + "ready", "1 where a worker can take requests.", "model")
        self.total_blocks = new.gauge(model + "total_kv_blocks", "KV blocks of a worker.", "model")
        self.max_seqs = new.gauge(model + "max_num_seqs", "Sequences that a worker runs at once.", "model")
        self.max_batched = new.gauge(model + "max_num_batched_tokens", "Tokens of one forward pass.", "model")
        self.context_length = new.gauge(model + "context_length", "Longest prompt and output together.", "model")
        self.block_size = new.gauge(model + "kv_cache_block_size", "Tokens per KV block.", "model")
        self.migration = new.gauge(model + "migration_limit", "How often one answer may go on elsewhere.", "model")
        self.migrations = new.counter(
            model + "migration_total", "Requests tried or taken up on another worker.", "migration_type", "model"
        )
        self.migration_time = new.histogram(
            model + "migration_duration_seconds", "From a lost engine to the next one's first token.", TTFT, "model"
        )
        worker, labels = name + "worker_", ("dp_rank", "worker_id", "worker_type")
        self.worker_blocks = new.gauge(
            worker + "active_decode_blocks", "KV blocks in use by running requests, as the router counts.", *labels
        )
        self.worker_prefill = new.gauge(
            worker + "active_prefill_tokens", "Prompt tokens still to prefill, as the router counts.", *labels
        )
        self.last_ttft = new.gauge(
            worker + "last_time_to_first_token_seconds", "TTFT of the last streamed request.", *labels
        )
        self.last_itl = new.gauge(
            worker + "last_inter_token_latency_seconds", "Mean ITL of the last streamed request.", *labels
        )
        self.last_input = new.gauge(
            worker + "last_input_sequence_tokens", "Prompt tokens of the last request.", *labels
        )
        self.pending = new.gauge(
            name + "router_queue_pending_requests",
            "Requests waiting for a worker.",
            *("model", "policy_class", "worker_type"),
        )

    def _router(self) -> None:
        new, name = self.registry, "dynamo_component_router_"
        base = ("dynamo_component", "dynamo_namespace")
        me = (*base, "router_id", "worker_id")
        phase = (*base, "model", "phase", "router_id", "worker_id")
        self.router_started = new.counter(name + "requests_started_total", "Requests placed.", *me)
        self.router_requests = new.counter(name + "requests_total", "Requests that reached their end.", *me)
        self.router_ttft = new.histogram(name + "time_to_first_token_seconds", "TTFT seen at the router.", TTFT, *me)
        self.router_itl = new.histogram(name + "inter_token_latency_seconds", "Mean ITL of a request.", ROUTER_ITL, *me)
        self.router_input = new.histogram(name + "input_sequence_tokens", "Prompt tokens.", INPUT, *phase)
        self.router_output = new.histogram(name + "output_sequence_tokens", "Output tokens.", OUTPUT, *me)
        self.hit_rate = new.histogram(
            name + "kv_hit_rate", "Share of the prompt that was expected in the chosen worker's cache.", SHARE, *me
        )
        self.blocks_lost = new.histogram(
            name + "overlap_blocks_lost",
            "Blocks that the candidate with most overlap held beyond the chosen one.",
            LOST,
            *(*me, "worker_type"),
        )
        self.not_best = new.counter(
            name + "non_max_overlap_selections_total",
            "Placements on a worker with less overlap than another candidate had.",
            *(*me, "worker_type"),
        )
        self.selected_prefix = new.counter(
            name + "kv_selected_cached_prefix_tokens_total", "Prompt tokens expected in the chosen cache.", *phase
        )
        self.best_prefix = new.counter(
            name + "kv_best_eligible_cached_prefix_tokens_total", "The most that any candidate held.", *phase
        )
        self.reused = new.counter(
            name + "kv_worker_reused_tokens_total", "Prompt tokens that engines took from their caches.", *phase
        )
        self.mismatch = new.gauge(
            name + "kv_event_source_mismatch_workers",
            "Workers without KV events while routing weighs caches.",
            *(*base, "model", "target_component", "target_endpoint", "target_namespace", "worker_id", "worker_type"),
        )
        self.registered = new.gauge(
            name + "worker_registered",
            "1 per worker that the router knows.",
            *("dp_rank", *base, "router_worker_id", "worker_id", "worker_type"),
        )
        self.kv_applied = new.counter(
            "dynamo_component_kv_cache_events_applied",
            "KV events applied to the index, by type and result.",
            *(*base, "event_type", "status", "worker_id"),
        )
        self.uptime = new.gauge("dynamo_component_uptime_seconds", "Since this process's start.", "worker_id")

    def _penstock(self) -> None:
        new, name = self.registry, "penstock_"
        self.outcomes = new.counter(
            name + "requests_total", "Requests by how they ended and whose fault it was.", "fault", "model", "outcome"
        )
        self.refusals = new.counter(
            name + "overload_refusals_total", "Requests that a limit of router.overload refused.", "limit", "model"
        )
        self.decisions = new.counter(name + "decisions_total", "Placements by mode.", "mode", "model")
        self.retries = new.counter(name + "retries_total", "Attempts after the first.", "model")
        self.handoffs = new.counter(
            name + "handoffs_total", "Prefills on workers of their own, by what became of them.", "model", "outcome"
        )
        self.releases = new.counter(
            name + "handoff_releases_total", "Legs that were sent only so that a worker lets go of KV.", "result"
        )
        self.queue_length = new.gauge(name + "queue_length", "Requests waiting for a worker.", "model")
        self.queue_wait = new.histogram(
            name + "queue_wait_seconds", "Time that a request waited for a worker.", TTFT, "model"
        )
        self.breaker_open = new.gauge(
            name + "worker_breaker_open", "1 where failures keep a worker out.", "model", "worker"
        )
        self.worker_ready = new.gauge(name + "worker_ready", "1 where a worker can take requests.", "model", "worker")
        self.worker_failures = new.counter(
            name + "worker_failures_total", "Attempts that failed by the worker's fault.", "model", "worker"
        )
        self.index_state = new.gauge(
            name + "worker_index_state", "How well a worker's cache is known.", "model", "state", "worker"
        )
        self.blind = new.gauge(
            name + "kv_without_event_source", "Workers whose cache is guessed while mode is kv.", "model"
        )
        passes, which = name + "engine_", ("model", "source", "worker")
        self.pass_time = new.gauge(passes + "pass_seconds", "Mean of a forward pass in the last window.", *which)
        self.pass_seqs = new.gauge(passes + "decode_seqs", "Sequences that a pass decodes, on average.", *which)
        self.pass_kv = new.gauge(
            passes + "decode_kv_tokens", "KV tokens that a pass reads to decode, on average.", *which
        )
        self.pass_waiting = new.gauge(passes + "queued_requests", "Requests waiting in the engine, on average.", *which)
        self.canaries = new.counter(name + "canaries_total", "One-token requests to idle workers.", "result", "worker")
        self.kv_gaps = new.counter(name + "kv_event_gaps_total", "Gaps seen in KV events.", "model", "worker")
        self.kv_lost = new.counter(name + "kv_events_lost_total", "Gaps that replay did not fill.", "model", "worker")
        self.context_types = new.counter(
            name + "requests_by_context_type_total", "Requests by their context_type.", "model", "context_type"
        )
        self.ignored_hints = new.counter(
            name + "ignored_hints_total", "Hints of requests that do nothing here.", "model", "hint"
        )
        self.cache_size = new.gauge(name + "tokenizer_cache_bytes", "Memory of the tokenizer cache.", "model")
        self.tokenize_pending = new.gauge(name + "tokenize_pending", "Prompts with or waiting for a thread.")
        self.template_failures = new.counter(
            name + "template_failures_total", "Chats that the local template refused; routed by plain text."
        )
        self.loop_longest = new.gauge(
            name + "loop_block_longest_seconds",
            "Longest that this process held its event loop since the start; budget 0.005.",
        )
        self.loop_recent = new.gauge(
            name + "loop_block_recent_seconds", "Longest block since the last row of metrics.csv."
        )
        self.tasks = new.gauge(name + "tasks", "Tasks of this process's event loop.")
        self.unauthorized = new.counter(name + "unauthorized_total", "Requests without a valid key.")
        self.rate_limited = new.counter(name + "rate_limited_total", "Requests above their key's rate.")
        self.records_lost = new.counter(
            name + "records_lost_total", "Lines that could not be written to the run folder.", "file"
        )
        self.dropped_events = new.counter(
            name + "router_dropped_events_total", "Events about requests or workers that are no longer known."
        )
        self.router_faults = new.counter(name + "router_faults_total", "Exceptions in the router: our bugs.")
        self.restarts = new.counter(
            name + "process_restarts_total",
            "Crashes of engines, frontends and the planner, each of which was started again.",
            "kind",
            "process",
        )
        self.noted = new.counter(name + "notes_total", "What the router noted, by kind.", "kind")
