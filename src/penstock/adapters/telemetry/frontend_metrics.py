"""Prometheus metrics of a frontend: counts what happens to requests, under Dynamo's names and ``penstock_*``.

``dynamo_frontend_*`` and ``dynamo_component_*`` have Dynamo's names, labels and buckets; a label of Dynamo's without a
meaning here holds a constant. ``penstock_*`` is what those lack. Seconds and tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from penstock.adapters.telemetry.metric_names import MetricNamesOf
from penstock.adapters.telemetry.prometheus_text import MetricCell, Observations
from penstock.kernel.values import WorkerCard
from penstock.router.events import Closed, Dispatch
from penstock.router.selection.cost import cached_beside_most
from penstock.router.status_rows import RouterStatus, WorkerStatus

NAMESPACE, COMPONENT = "dynamo", "backend"
"""Constant labels of the router's metrics, as in a default deployment of Dynamo."""
WORKER_TYPE = "decode"
"""Dynamo's name for a worker that does both prefill and decode."""
OTHER = "other"
CONTEXT_TYPES_MAX = 16
"""Distinct values of the label ``context_type``; clients choose them, and each is a series for Prometheus to keep."""
HINTS_MAX = 64
"""The same of the label ``hint``: tools that have no effect are named by their kind, which clients choose."""

SAME_IN_EVERY_PROCESS = (
    *("dynamo_frontend_worker_active_decode_blocks", "dynamo_frontend_worker_active_prefill_tokens"),
    *("dynamo_frontend_model_ready", "dynamo_frontend_model_total_kv_blocks", "dynamo_frontend_model_max_num_seqs"),
    *("dynamo_frontend_model_max_num_batched_tokens", "dynamo_frontend_model_context_length"),
    *("dynamo_frontend_model_kv_cache_block_size", "dynamo_frontend_model_migration_limit"),
    *("dynamo_frontend_worker_last_time_to_first_token_seconds", "dynamo_component_router_worker_registered"),
    *("dynamo_frontend_worker_last_inter_token_latency_seconds", "penstock_worker_ready"),
    *("dynamo_frontend_worker_last_input_sequence_tokens", "dynamo_component_uptime_seconds"),
    *("dynamo_component_router_kv_event_source_mismatch_workers", "penstock_kv_without_event_source"),
    *("penstock_worker_breaker_open", "penstock_worker_index_state", "penstock_loop_block_longest_seconds"),
    *("penstock_kv_events_lag_seconds", "penstock_kv_events_lag_recent_seconds", "penstock_kv_event_sources"),
    *("penstock_loop_block_recent_seconds", "penstock_engine_pass_seconds", "penstock_engine_decode_seqs"),
    *("penstock_engine_decode_kv_tokens", "penstock_engine_queued_requests", "penstock_process_restarts_total"),
)
"""Metrics of which every frontend process shows the same: of several processes the largest counts, not the sum."""


class _OfModel:
    """One model's children of the metrics that every request counts in: looking labels up costs more than counting.

    Each is created at its first count, so that a scrape shows no model's zeros.
    """

    def __init__(self, names: MetricNamesOf, model: str, router: str) -> None:
        self.names = names
        self.model = model
        self.phase = (COMPONENT, NAMESPACE, model, "aggregated", router, router)

    duration: cached_property[Observations] = cached_property(lambda of: of.names.duration.of(of.model))
    queue_wait: cached_property[Observations] = cached_property(lambda of: of.names.queue_wait.of(of.model))
    input: cached_property[Observations] = cached_property(lambda of: of.names.input.of(of.model))
    output: cached_property[Observations] = cached_property(lambda of: of.names.output.of(of.model))
    output_tokens: cached_property[MetricCell] = cached_property(lambda of: of.names.output_tokens.of(of.model))
    cached: cached_property[Observations] = cached_property(lambda of: of.names.cached.of(of.model))
    reused: cached_property[MetricCell] = cached_property(lambda of: of.names.reused.of(*of.phase))
    router_input: cached_property[Observations] = cached_property(lambda of: of.names.router_input.of(*of.phase))
    selected_prefix: cached_property[MetricCell] = cached_property(lambda of: of.names.selected_prefix.of(*of.phase))
    best_prefix: cached_property[MetricCell] = cached_property(lambda of: of.names.best_prefix.of(*of.phase))


class _OfRouter:
    """The same of this process's router."""

    def __init__(self, names: MetricNamesOf, router: str) -> None:
        self.names = names
        self.labels = (COMPONENT, NAMESPACE, router, router)

    started: cached_property[MetricCell] = cached_property(lambda of: of.names.router_started.of(*of.labels))
    requests: cached_property[MetricCell] = cached_property(lambda of: of.names.router_requests.of(*of.labels))
    hit_rate: cached_property[Observations] = cached_property(lambda of: of.names.hit_rate.of(*of.labels))
    output: cached_property[Observations] = cached_property(lambda of: of.names.router_output.of(*of.labels))
    ttft: cached_property[Observations] = cached_property(lambda of: of.names.router_ttft.of(*of.labels))
    itl: cached_property[Observations] = cached_property(lambda of: of.names.router_itl.of(*of.labels))
    blocks_lost: cached_property[Observations] = cached_property(
        lambda of: of.names.blocks_lost.of(*of.labels, "prefill")
    )


class FrontendMetrics(MetricNamesOf):
    """Everything that a frontend process counts.

    Args:
        router: name of this process's router, a label of its metrics.
        migration_limit: how often one answer may continue on another worker.
    """

    def __init__(self, router: str, migration_limit: int = 0) -> None:
        super().__init__()
        self.router = router
        self.migration_limit = migration_limit
        self._context_types: set[str] = set()
        self._hints: set[str] = set()
        self._models: dict[str, _OfModel] = {}
        self._stages: dict[str, Observations] = {}
        self._of_router = _OfRouter(self, router)
        self._active: dict[str, int] = {}
        self._queued: dict[str, int] = {}
        self._tokenizer_hits: dict[str, tuple[int, int]] = {}

    # --- request events ---------------------------------------------------------------------------------------------

    def started(
        self,
        model: str,
        endpoint: str,
        streamed: bool,
        context_type: str | None = None,
    ) -> None:
        """A request has been read and will be routed."""
        self.requests_started.add(endpoint, model, "stream" if streamed else "unary")
        self._active[model] = self._active.get(model, 0) + 1
        self._queued[model] = self._queued.get(model, 0) + 1
        if context_type is not None:
            self.context_types.add(model, _bounded_label(context_type, self._context_types, CONTEXT_TYPES_MAX))

    def ignored(self, model: str, hints: Sequence[str]) -> None:
        """A request is over, and these hints of it had no effect."""
        for hint in hints:
            self.ignored_hints.add(model, _bounded_label(hint, self._hints, HINTS_MAX))

    def first_token(self, model: str) -> None:
        """A request has its first token, or ended without one: it waits no more. Called once per request."""
        self._queued[model] = self._queued.get(model, 1) - 1

    def ended(self, model: str, endpoint: str, streamed: bool, error_type: str, duration: float) -> None:
        """A request that `started` is over; ``error_type`` is empty where it succeeded; ``duration`` in seconds."""
        kind = "stream" if streamed else "unary"
        self._active[model] = self._active.get(model, 1) - 1
        self.requests.add(endpoint, error_type, model, kind, "error" if error_type else "success")
        self._of(model).duration.observe(duration)
        if error_type == "overload":
            self.rejections.add(endpoint, model)
        elif error_type == "cancelled":
            self.cancellations.add(endpoint, model, kind)

    def refused(self, model: str, endpoint: str, streamed: bool, error_type: str) -> None:
        """A request was answered with an error before it was routed."""
        self.requests.add(endpoint, error_type, model, "stream" if streamed else "unary", "error")
        if error_type == "overload":
            self.rejections.add(endpoint, model)

    def gaps(self, model: str) -> Observations:
        """Return where a stream's gaps between tokens are counted, in seconds."""
        return self.itl.of(model)

    def stage(self, name: str, took: float) -> None:
        """A stage of a request took so many seconds."""
        observed = self._stages.get(name)
        if observed is None:
            own = {"template": self.template, "tokenize": self.tokenize}.get(name)
            observed = self._stages[name] = self.stages.of(name) if own is None else own.of()
        observed.observe(took)

    def dispatched(self, effect: Dispatch) -> None:
        """The router sent a request to a worker."""
        decision = effect.decision
        self.decisions.add(decision.mode, decision.model)
        if decision.again:
            self.retries.add(decision.model)
            self.migrations.add("ongoing_request" if decision.resumed else "new_request", decision.model)
            return
        if effect.attempt > 1:
            return  # a later stage of a request that was counted with its first one
        self._of_router.started.value += 1
        of = self._of(decision.model)
        of.router_input.observe(decision.isl)
        if decision.isl:
            self._of_router.hit_rate.observe(min(1.0, decision.expected_cached_tokens / decision.isl))
        compared = cached_beside_most(decision.candidates, decision.chosen)
        if compared is None:
            return
        chosen, best = compared
        of.selected_prefix.value += chosen.overlap_tokens
        of.best_prefix.value += best.overlap_tokens
        self._of_router.blocks_lost.observe(best.overlap_blocks - chosen.overlap_blocks)
        if best is not chosen:
            self.not_best.add(COMPONENT, NAMESPACE, self.router, self.router, "prefill")

    def migrated(self, model: str, took: float) -> None:
        """An answer continued on another worker, so many seconds after its engine was lost."""
        self.migration_time.observe(took, model)

    def closed(self, effect: Closed, *, promised: bool = True) -> None:
        """A request reached its end in the router; ``promised``: a client waited for it."""
        of = self._of(effect.model)
        self._of_router.requests.value += 1
        if promised:
            self.outcomes.add(effect.fault, effect.model, effect.outcome)
            of.queue_wait.observe(effect.queued)
        if effect.outcome != "ok":
            return
        of.input.observe(effect.isl)
        of.output.observe(effect.osl)
        of.output_tokens.value += effect.osl
        self._of_router.output.observe(effect.osl)
        if effect.cached is not None:
            of.cached.observe(effect.cached)
            of.reused.value += effect.cached
        if effect.legs:
            target = effect.legs[-1].target
            self.last_input.set(str(target.rank), target.worker, WORKER_TYPE, to=effect.isl)

    def timed(self, model: str, worker: str, rank: int, ttft: float, itl: float | None) -> None:
        """A streamed request ended with these times, in seconds."""
        self.ttft.observe(ttft, model)
        self._of_router.ttft.observe(ttft)
        self.last_ttft.set(str(rank), worker, WORKER_TYPE, to=ttft)
        if itl is not None:
            self._of_router.itl.observe(itl)
            self.last_itl.set(str(rank), worker, WORKER_TYPE, to=itl)

    # --- gauges read at a scrape ------------------------------------------------------------------------------------

    def read_status(self, status: RouterStatus, cards: Iterable[WorkerCard], uptime: float) -> None:
        """Take over what the router shows of models, workers and queues."""
        me = self.router
        for gauge in (
            *(self.active, self.inflight, self.queued, self.pending, self.queue_length, self.registered),
            *(self.mismatch, self.blind, self.ready, self.worker_blocks, self.worker_prefill, self.breaker_open),
            *(self.index_state, self.worker_ready, self.worker_resident, self.block_size, self.total_blocks),
            *(self.context_length, self.max_num_seqs, self.max_batched, self.migration),
            *(self.pass_time, self.pass_seqs, self.pass_kv, self.pass_waiting),
        ):
            gauge.clear()
        self.uptime.set(me, to=uptime)
        for model in status.models:
            name = model.name
            self.ready.set(name, to=float(model.ready))
            self.migration.set(name, to=self.migration_limit)
            for outcome, count in (model.handoffs or {}).items():
                self.handoffs.set(name, outcome, to=count)
            for outcome, count in (model.media or {}).items():
                self.media.set(name, outcome, to=count)
            for place, count in model.awaited.items():
                self.awaited.set(name, place, to=count)
            if model.media is not None:
                self.embedding_bytes.set(name, to=model.embedding_bytes)
            for limit, count in model.refused.items():
                self.refusals.set(limit, name, to=count)
            for event, count in model.adapters.items():
                self.adapter_events.set(event, name, to=count)
            length = status.queue[name].length if name in status.queue else 0
            self.queue_length.set(name, to=length)
            self.pending.set(name, "default", WORKER_TYPE, to=length)
        for name in {*self._active, *(model.name for model in status.models)}:
            self.active.set(name, to=self._active.get(name, 0))
            self.inflight.set(name, to=self._active.get(name, 0))
            self.queued.set(name, to=self._queued.get(name, 0))
        for worker in status.workers:
            self._read_worker(worker, kv=status.mode == "kv")
        for card in cards:
            for gauge, value in (
                (self.block_size, card.block_size),
                (self.total_blocks, card.kv_blocks),
                (self.context_length, card.max_model_len),
                (self.max_num_seqs, card.max_num_seqs),
                (self.max_batched, card.max_num_batched_tokens),
            ):
                if value is not None:  # unknown is not zero: no sample
                    gauge.set(card.model, to=value)
        self.dropped_events.set(to=status.dropped_events)

    def read_kv_events(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Take over the index's counts by (event type, result)."""
        for (kind, result), count in counts.items():
            self.kv_applied.set(COMPONENT, NAMESPACE, kind, result, self.router, to=count)

    def read_tokenizer(self, model: str, hits: int, misses: int, cached: int, encoded: int, size: int) -> None:
        """Take over one model's tokenizer cache; Dynamo's two hit counters have no model, so they are sums."""
        self._tokenizer_hits[model] = (hits, misses)
        self.cache_hits.set(to=sum(h for h, _ in self._tokenizer_hits.values()))
        self.cache_misses.set(to=sum(m for _, m in self._tokenizer_hits.values()))
        self.cache_tokens.set(model, to=cached)
        self.cache_fresh.set(model, to=encoded)
        self.cache_size.set(model, to=size)

    def render(self) -> str:
        """Return the text of a scrape."""
        return self.registry.render()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _of(self, model: str) -> _OfModel:
        metrics = self._models.get(model)
        if metrics is None:
            metrics = self._models[model] = _OfModel(self, model, self.router)
        return metrics

    def _read_worker(self, worker: WorkerStatus, kv: bool) -> None:
        name, model, me = worker.id, worker.model, self.router
        kind = "prefill" if worker.role == "prefill" else WORKER_TYPE
        self.registered.set("0", COMPONENT, NAMESPACE, name, me, kind, to=1)
        self.worker_blocks.set("0", name, kind, to=worker.active_blocks)
        self.worker_prefill.set("0", name, kind, to=worker.active_prefill_tokens)
        self.breaker_open.set(model, name, to=float(worker.breaker != "closed"))
        self.index_state.set(model, worker.index, name, to=1)
        self.worker_ready.set(model, name, to=float(worker.why_not is None))
        self.worker_failures.set(model, name, to=worker.failures)
        if worker.resident_blocks is not None:
            self.worker_resident.set(model, name, to=worker.resident_blocks)
        labels = (COMPONENT, NAMESPACE, model, COMPONENT, "generate", NAMESPACE, me, WORKER_TYPE)
        blind = kv and worker.index == "none"
        self.mismatch.add(*labels, by=float(blind))
        self.blind.add(model, by=float(blind))
        events = worker.kv_events
        if events is not None:
            self.kv_gaps.set(model, name, to=events.gaps)
            self.kv_lost.set(model, name, to=events.lost)
        self._read_watched(worker)

    def _read_watched(self, worker: WorkerStatus) -> None:
        """Take over a worker's other observations; unknown is not zero: no sample."""
        name, model, steps, canary = worker.id, worker.model, worker.steps, worker.canary
        if steps is not None:
            for gauge, value, scale in (
                (self.pass_time, steps.wall_pass_ms, 1e-3),
                (self.pass_seqs, steps.wall_decode_seqs, 1.0),
                (self.pass_kv, steps.wall_decode_kv_tokens, 1.0),
                (self.pass_waiting, steps.wall_queued_requests, 1.0),
            ):
                if value is not None:
                    gauge.set(model, steps.source, name, to=value * scale)
        if canary is not None:
            self.canaries.set("missed", name, to=canary.missed)
            self.canaries.set("answered", name, to=canary.sent - canary.missed)


def _bounded_label(value: str, known: set[str], most: int) -> str:
    """Return a label's value, or `OTHER` for one that comes after ``most`` have come."""
    if value not in known and len(known) >= most:
        return OTHER
    known.add(value)
    return value
