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
        new = self.registry.below("dynamo_frontend_")
        kind = ("endpoint", "model", "request_type")
        self.requests_started = new.counter("requests_started_total", "Requests that will be routed.", *kind)
        self.requests = new.counter(
            "requests_total", "Requests that are over.", *("endpoint", "error_type", "model", "request_type", "status")
        )
        self.active = new.gauge("active_requests", "Requests from the HTTP handler's start to its end.", "model")
        self.inflight = new.gauge("inflight_requests", "The same, under the older name.", "model")
        self.queued = new.gauge("queued_requests", "Requests that have no first token yet.", "model")
        self.disconnected = new.gauge("disconnected_clients", "Clients that hung up before their answer's end.")
        self.rejections = new.counter(
            "model_rejection_total", "Requests refused for want of capacity.", "endpoint", "model"
        )
        self.cancellations = new.counter("model_cancellation_total", "Requests whose client hung up.", *kind)
        self.ttft = new.histogram("time_to_first_token_seconds", "First output token less arrival.", TTFT, "model")
        self.itl = new.histogram("inter_token_latency_seconds", "Gap before each output token.", ITL, "model")
        self.input = new.histogram("input_sequence_tokens", "Prompt tokens.", INPUT, "model")
        self.output = new.histogram("output_sequence_tokens", "Output tokens.", OUTPUT, "model")
        self.cached = new.histogram(
            "cached_tokens", "Prompt tokens that the engine took from its cache.", INPUT, "model"
        )
        self.duration = new.histogram("request_duration_seconds", "Arrival to end.", DURATION, "model")
        self.output_tokens = new.counter("output_tokens_total", "Output tokens of ended requests.", "model")
        self.stages = new.histogram("stage_duration_seconds", "Time in a stage of a request.", STAGE, "stage")
        self.template = new.histogram("template_seconds", "Applying the chat template.", TEMPLATE)
        self.tokenize = new.histogram("tokenize_seconds", "Tokenising a prompt.", TOKENIZE)
        cache = new.below("tokenizer_cache_")
        self.cache_hits = cache.counter("hits_total", "Parts of prompts found in the tokenizer cache.")
        self.cache_misses = cache.counter("misses_total", "Parts of prompts that had to be tokenised.")
        self.cache_tokens = cache.counter("cached_tokens_total", "Prompt tokens from the cache.", "model")
        self.cache_fresh = cache.counter("uncached_tokens_total", "Prompt tokens that were encoded.", "model")
        self.loop_delay = new.histogram("event_loop_delay_seconds", "By how much a short sleep came back late.", LOOP)
        self.loop_stalls = new.counter("event_loop_stall_total", "Sleeps that came back more than 5 ms late.")
        model = new.below("model_")
        self.ready = model.gauge("ready", "1 where a worker can take requests.", "model")
        self.total_blocks = model.gauge("total_kv_blocks", "KV blocks of a worker.", "model")
        self.max_num_seqs = model.gauge("max_num_seqs", "Sequences that a worker runs at once.", "model")
        self.max_batched = model.gauge("max_num_batched_tokens", "Tokens of one forward pass.", "model")
        self.context_length = model.gauge("context_length", "Longest prompt and output together.", "model")
        self.block_size = model.gauge("kv_cache_block_size", "Tokens per KV block.", "model")
        self.migration = model.gauge("migration_limit", "How often one answer may go on elsewhere.", "model")
        self.migrations = model.counter(
            "migration_total", "Requests tried or taken up on another worker.", "migration_type", "model"
        )
        self.migration_time = model.histogram(
            "migration_duration_seconds", "From a lost engine to the next one's first token.", TTFT, "model"
        )
        worker, labels = new.below("worker_"), ("dp_rank", "worker_id", "worker_type")
        self.worker_blocks = worker.gauge(
            "active_decode_blocks", "KV blocks in use by running requests, as the router counts.", *labels
        )
        self.worker_prefill = worker.gauge(
            "active_prefill_tokens", "Prompt tokens still to prefill, as the router counts.", *labels
        )
        self.last_ttft = worker.gauge("last_time_to_first_token_seconds", "TTFT of the last streamed request.", *labels)
        self.last_itl = worker.gauge(
            "last_inter_token_latency_seconds", "Mean ITL of the last streamed request.", *labels
        )
        self.last_input = worker.gauge("last_input_sequence_tokens", "Prompt tokens of the last request.", *labels)
        self.pending = new.gauge(
            "router_queue_pending_requests", "Requests waiting for a worker.", *("model", "policy_class", "worker_type")
        )

    def _router(self) -> None:
        new = self.registry.below("dynamo_component_router_")
        base = ("dynamo_component", "dynamo_namespace")
        me = (*base, "router_id", "worker_id")
        phase = (*base, "model", "phase", "router_id", "worker_id")
        self.router_started = new.counter("requests_started_total", "Requests placed.", *me)
        self.router_requests = new.counter("requests_total", "Requests that reached their end.", *me)
        self.router_ttft = new.histogram("time_to_first_token_seconds", "TTFT seen at the router.", TTFT, *me)
        self.router_itl = new.histogram("inter_token_latency_seconds", "Mean ITL of a request.", ROUTER_ITL, *me)
        self.router_input = new.histogram("input_sequence_tokens", "Prompt tokens.", INPUT, *phase)
        self.router_output = new.histogram("output_sequence_tokens", "Output tokens.", OUTPUT, *me)
        self.hit_rate = new.histogram(
            "kv_hit_rate", "Share of the prompt that was expected in the chosen worker's cache.", SHARE, *me
        )
        self.blocks_lost = new.histogram(
            "overlap_blocks_lost",
            "Blocks that the candidate with most overlap held beyond the chosen one.",
            LOST,
            *(*me, "worker_type"),
        )
        self.not_best = new.counter(
            "non_max_overlap_selections_total",
            "Placements on a worker with less overlap than another candidate had.",
            *(*me, "worker_type"),
        )
        self.selected_prefix = new.counter(
            "kv_selected_cached_prefix_tokens_total", "Prompt tokens expected in the chosen cache.", *phase
        )
        self.best_prefix = new.counter(
            "kv_best_eligible_cached_prefix_tokens_total", "The most that any candidate held.", *phase
        )
        self.reused = new.counter(
            "kv_worker_reused_tokens_total", "Prompt tokens that engines took from their caches.", *phase
        )
        self.mismatch = new.gauge(
            "kv_event_source_mismatch_workers",
            "Workers without KV events while routing weighs caches.",
            *(*base, "model", "target_component", "target_endpoint", "target_namespace", "worker_id", "worker_type"),
        )
        self.registered = new.gauge(
            "worker_registered",
            "1 per worker that the router knows.",
            *("dp_rank", *base, "router_worker_id", "worker_id", "worker_type"),
        )
        self.kv_applied = self.registry.untyped(
            "dynamo_component_kv_cache_events_applied",
            "KV events applied to the index, by type and result.",
            *(*base, "event_type", "status", "worker_id"),
        )
        self.uptime = self.registry.gauge("dynamo_component_uptime_seconds", "Since this process's start.", "worker_id")

    def _penstock(self) -> None:
        new = self.registry.below("penstock_")
        self.outcomes = new.counter(
            "requests_total", "Requests by how they ended and whose fault it was.", "fault", "model", "outcome"
        )
        self.refusals = new.counter(
            "overload_refusals_total", "Requests that a limit of router.overload refused.", "limit", "model"
        )
        self.decisions = new.counter("decisions_total", "Placements by mode.", "mode", "model")
        self.adapter_events = new.counter(
            "adapter_events_total",
            "Requests that found their LoRA adapter (hit), waited for it (wait) or had it loaded (load); adapters "
            "unloaded for others; loads that failed; adapters that an engine did not hold (missing).",
            *("event", "model"),
        )
        self.retries = new.counter("retries_total", "Attempts after the first.", "model")
        self.handoffs = new.counter(
            "handoffs_total", "Prefills on workers of their own, by what became of them.", "model", "outcome"
        )
        self.media = new.counter(
            "media_total",
            "Images and the like of models with encode workers: encoded there, cached (encoded before, by whomever), "
            "failed there, or encoded by the worker that answers (here).",
            "model",
            "outcome",
        )
        self.awaited = new.counter(
            "awaited_requests_total",
            "Requests for whose sessions a worker's KV tiers were told to bring blocks up, by whether they came to it.",
            "model",
            "place",
        )
        self.embedding_bytes = new.gauge(
            "embedding_bytes", "Encoded media in the store, as this router counts.", "model"
        )
        self.media_fetches = new.counter("media_fetches_total", "Media by URL, by what became of them.", "result")
        self.media_bytes = new.counter("media_fetched_bytes_total", "Bytes of media that were fetched.")
        self.media_cache = new.gauge("media_cache_bytes", "Fetched media that are kept.")
        self.releases = new.counter(
            "handoff_releases_total", "Legs that were sent only so that a worker lets go of KV.", "result"
        )
        self.queue_length = new.gauge("queue_length", "Requests waiting for a worker.", "model")
        self.queue_wait = new.histogram("queue_wait_seconds", "Time that a request waited for a worker.", TTFT, "model")
        self.breaker_open = new.gauge("worker_breaker_open", "1 where failures keep a worker out.", "model", "worker")
        self.worker_ready = new.gauge("worker_ready", "1 where a worker can take requests.", "model", "worker")
        self.worker_failures = new.counter(
            "worker_failures_total", "Attempts that failed by the worker's fault.", "model", "worker"
        )
        self.worker_resident = new.gauge(
            "worker_resident_blocks",
            "KV blocks in an engine's memory by its KV events, used or not.",
            "model",
            "worker",
        )
        self.index_state = new.gauge(
            "worker_index_state", "How well a worker's cache is known.", "model", "state", "worker"
        )
        self.blind = new.gauge("kv_without_event_source", "Workers whose cache is guessed while mode is kv.", "model")
        passes, which = new.below("engine_"), ("model", "source", "worker")
        self.pass_time = passes.gauge("pass_seconds", "Mean of a forward pass in the last window.", *which)
        self.pass_seqs = passes.gauge("decode_seqs", "Sequences that a pass decodes, on average.", *which)
        self.pass_kv = passes.gauge("decode_kv_tokens", "KV tokens that a pass reads to decode, on average.", *which)
        self.pass_waiting = passes.gauge("queued_requests", "Requests waiting in the engine, on average.", *which)
        self.canaries = new.counter("canaries_total", "One-token requests to idle workers.", "result", "worker")
        self.kv_gaps = new.counter("kv_event_gaps_total", "Gaps seen in KV events.", "model", "worker")
        self.kv_lost = new.counter("kv_events_lost_total", "Gaps that replay did not fill.", "model", "worker")
        self.context_types = new.counter(
            "requests_by_context_type_total", "Requests by their context_type.", "model", "context_type"
        )
        self.ignored_hints = new.counter(
            "ignored_hints_total", "Hints of requests that do nothing here.", "model", "hint"
        )
        self.picker_events = new.counter(
            "picker_events_total", "Reports of gateways, and requests that one could not carry as it should.", "event"
        )
        self.prefix_warmings = new.counter(
            "prefix_warmings_total", "Chats whose next turn was to be prepared, by what came of it.", "model", "result"
        )
        self.named = new.counter(
            "name_requests_total", "Requests by an alias or a name that models share, by the model.", "model", "name"
        )
        self.shadows = new.counter(
            "shadow_answers_total",
            "Copies of requests to other models, by what came of them.",
            "model",
            "name",
            "result",
        )
        self.cache_size = new.gauge("tokenizer_cache_bytes", "Memory of the tokenizer cache.", "model")
        self.tokenize_pending = new.gauge("tokenize_pending", "Prompts with or waiting for a thread.")
        self.template_failures = new.counter(
            "template_failures_total", "Chats that the local template refused; routed by plain text."
        )
        self.loop_longest = new.gauge(
            "loop_block_longest_seconds", "Longest that this process held its event loop since the start; budget 0.005."
        )
        self.loop_recent = new.gauge("loop_block_recent_seconds", "Longest block since the last row of metrics.csv.")
        self.kv_lag = new.gauge("kv_events_lag_seconds", "How long the oldest KV event that waits has waited.")
        self.kv_lag_recent = new.gauge(
            "kv_events_lag_recent_seconds", "Longest that a KV event waited in the last minute before the index had it."
        )
        self.kv_skipped = new.counter(
            "kv_events_skipped_total", "Batches of KV events that waited too long and were asked for again."
        )
        self.kv_from_peers = new.counter(
            "kv_engines_told_total", "Engines of which another frontend told what they held when this one joined."
        )
        self.kv_sources = new.gauge(
            "kv_event_sources", "Engines' ranks whose KV events wait, or whose past is being asked for.", "state"
        )
        self.tasks = new.gauge("tasks", "Tasks of this process's event loop.")
        self.unauthorized = new.counter("unauthorized_total", "Requests without a valid key.")
        self.rate_limited = new.counter("rate_limited_total", "Requests above their key's rate.")
        self.tenant_requests = new.counter(
            "tenant_requests_total", "Ended requests of tenants.", "key", "outcome", "tenant"
        )
        self.tenant_tokens = new.counter(
            "tenant_tokens_total",
            "Tokens of tenants' ended requests: prompt, cached (of the prompt), output.",
            "key",
            "kind",
            "tenant",
        )
        self.tenant_refusals = new.counter(
            "tenant_refusals_total", "Requests of tenants that a limit of theirs refused.", "tenant", "limit"
        )
        self.audit_lost = new.gauge("audit_lost", "Requests that the audit log lacks, since it could not be written.")
        self.audit_failing = new.gauge("audit_failing", "Whether the audit log can't be written at present.")
        self.records_lost = new.counter(
            "records_lost_total", "Lines that could not be written to the run folder.", "file"
        )
        self.dropped_events = new.counter(
            "router_dropped_events_total", "Events about requests or workers that are no longer known."
        )
        self.router_faults = new.counter("router_faults_total", "Exceptions in the router: our bugs.")
        self.restarts = new.counter(
            "process_restarts_total",
            "Crashes of engines, frontends and the planner, each of which was started again.",
            "kind",
            "process",
        )
        self.noted = new.counter("notes_total", "What the router noted, by kind.", "kind")
