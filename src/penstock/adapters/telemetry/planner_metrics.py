"""Prometheus metrics of a planner: ``dynamo_planner_*`` as Dynamo's dashboards query them, from its tick records.

Milliseconds where those names have that unit. The role ``decode`` there means workers that answer clients: aggregated
workers count in it. A value that a record does not have has no sample: unknown is not zero.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.adapters.telemetry.planner_estimate_metrics import PlannerEstimateMetrics
from penstock.adapters.telemetry.prometheus_text import Gauge, MetricRegistry
from penstock.kernel.values import Slo
from penstock.planner.observation import Observation
from penstock.planner.plugins.proposals import CEILING
from penstock.planner.tick_record import ModelTick, PluginResult, TickRecord

PREFIX = "dynamo_planner_"
DECISIONS = ("scale_up", "scale_down", "hold")
LOOPS = {"load": "load_scaling_decision", "throughput": "throughput_scaling_decision"}
"""Word in a plugin's id -> gauge of the outcome of its last answer."""


class PlannerMetrics:
    """Everything that a planner shows; fed by `ticked` and `saw`.

    Args:
        slo: a target that is not set has no sample.
        watts: power limit, in watts; None has no sample.
    """

    def __init__(self, *, slo: Slo = Slo(), watts: float | None = None) -> None:
        self.registry = MetricRegistry()
        self._at: float | None = None
        self._gpus = 0
        new = self.registry.below(PREFIX)
        self.replicas = {role: self._gauge(f"num_{role}_replicas", f"{role} workers that are ready.") for role in ROLES}
        self.wanted = {
            role: self._gauge(f"predicted_num_{role}_replicas", f"{role} workers that there should be.")
            for role in ROLES
        }
        in_last = "in the last look"
        self.observed = {
            "ttft_ms": self._gauge("observed_ttft_ms", f"Mean TTFT {in_last}."),
            "itl_ms": self._gauge("observed_itl_ms", f"Mean ITL {in_last}."),
            "requests_per_second": self._gauge("observed_requests_per_second", f"Requests that arrived {in_last}."),
            "request_duration_seconds": self._gauge("observed_request_duration_seconds", f"Mean duration {in_last}."),
            "input_sequence_tokens": self._gauge("observed_input_sequence_tokens", f"Mean prompt {in_last}."),
            "output_sequence_tokens": self._gauge("observed_output_sequence_tokens", f"Mean output {in_last}."),
        }
        self.predicted = {
            "requests_per_second": self._gauge("predicted_requests_per_second", "Requests that are expected."),
            "input_sequence_tokens": self._gauge("predicted_input_sequence_tokens", "Mean prompt that is expected."),
            "output_sequence_tokens": self._gauge("predicted_output_sequence_tokens", "Mean output that is expected."),
        }
        self.gpu_hours = new.untyped("gpu_hours", "GPU hours paid for, those of starting replicas included.")
        for name, value in (("ttft", slo.ttft), ("itl", slo.itl)):
            if value is not None:
                new.gauge(f"sla_target_{name}_ms", f"{name.upper()} that is kept.").set(to=value * 1e3)
        self.loops = {
            loop: new.gauge(name, f"What the {loop} loop last said.", "decision") for loop, name in LOOPS.items()
        }
        engine = ("model", "worker_id", "dp_rank")
        self.queued_prefill = new.gauge(
            "engine_queued_prefill_tokens", "Prompt tokens that an engine has still to prefill.", *engine
        )
        self.queued_decode = new.gauge(
            "engine_queued_decode_kv_tokens", "KV tokens of decodes that wait in an engine.", *engine
        )
        self.decode_kv = new.gauge(
            "engine_inflight_decode_kv_tokens", "KV tokens of requests that an engine runs.", *engine
        )
        self.evaluations = new.counter("plugin_evaluations_total", "Answers of plugins.", "plugin", "stage", "result")
        self.overriding = new.gauge("plugin_override_active", "1 while a plugin's targets count.", "plugin")
        self.reused = new.counter("plugin_held_over_total", "Ticks where an earlier answer counted.", "plugin")
        self.capped = new.counter("constrain_capped_total", "Ticks in which a limit changed a proposal.")
        self.vetoed = new.counter("reject_short_circuited_total", "Ticks that a plugin's veto ended.")
        self.timeouts = new.counter("tick_timeout_total", "Ticks that took too long.")
        self.skipped = new.counter("tick_skipped_total", "Ticks without a decision.", "reason")
        self.unsatisfied = new.counter(
            "tick_requires_unsatisfied_total", "Plugins passed over for want of what they need.", "plugin"
        )
        self.lag = new.gauge("tick_lag_seconds", "By how much the last tick began late.")
        own = self.registry.below("penstock_planner_")
        self.pool_replicas = own.gauge("pool_replicas", "Replicas of a pool by state.", "pool", "state")
        self.pool_target = own.gauge("pool_target", "Replicas that a pool should have.", "pool")
        self.outcomes = own.counter("ticks_total", "Ticks by what came of them.", "outcome")
        self.health = own.gauge("source_fresh", "1 where a model's traffic can be read.", "model", "health")
        self.alarms = own.counter("alarms_total", "Alarms for the operator, by kind.", "code")
        self.refusals = own.counter(
            "plugin_registrations_refused_total", "Plugins whose registration was refused, by reason.", "code"
        )
        self.attainment = own.gauge("in_slo_ratio", "Share of judged requests within the SLO.", "model")
        self.short = own.gauge("ceiling_short_gpus", "GPUs more that a model would get without a limit.", "model")
        self.gpus = own.gauge("gpus", "GPUs paid for now.")
        self.estimates = PlannerEstimateMetrics(new, watts)

    def ticked(self, record: TickRecord) -> None:
        """Show a tick."""
        self._clear()
        self.estimates.ticked(record)
        self.outcomes.add(record.outcome)
        if self._at is not None and record.at > self._at:
            self.gpu_hours.add(by=self._gpus * (record.at - self._at) / 3600)
        self._at, self._gpus = record.at, record.gpus
        self.gpus.set(to=record.gpus)
        self.lag.set(to=record.late)
        if record.outcome == "timeout":
            self.timeouts.add()
        if record.outcome in ("blind", "timeout", "hold"):
            self.skipped.add(record.outcome)
        if record.outcome == "veto":
            self.vetoed.add()
        if record.bound:
            self.capped.add()
        for reason in record.bound:
            if reason.code == CEILING:
                self.short.set(reason.facts["model"], to=reason.facts["more_gpus"])
        for name, pool in record.pools.items():
            for state in ("ready", "starting", "draining", "failed", "given_up"):
                self.pool_replicas.set(name, state, to=getattr(pool, state))
            self.pool_target.set(name, to=pool.target)
        for model, tick in record.models.items():
            self._model(model, tick)
        for result in record.plugin_results:
            self._result(result, record)

    def saw(self, observation: Observation) -> None:
        """Show an observation: replicas by role, and each engine's queues."""
        self.estimates.saw(observation)
        durations = self.observed["request_duration_seconds"]
        for gauge in (self.queued_prefill, self.queued_decode, self.decode_kv, durations, *self.replicas.values()):
            gauge.clear()
        for model, each in observation.models.items():
            for state in each.pools.values():
                role = "prefill" if state.pool.role == "prefill" else "decode"
                self.replicas[role].set(model, to=self.replicas[role].get(model) + state.ready)
            traffic = each.traffic
            if traffic is not None and traffic.answered:
                mean = traffic.duration_sum / traffic.answered
                durations.set(model, to=mean)
            for state in each.pools.values():
                for engine in state.engines:
                    labels = (model, engine.worker, str(engine.rank))
                    for gauge, value in (
                        (self.queued_prefill, engine.queued_prefill_tokens),
                        (self.queued_decode, engine.queued_decode_kv),
                        (self.decode_kv, engine.decode_kv),
                    ):
                        if value is not None:
                            gauge.set(*labels, to=value)

    def wants(self, targets: Iterable[tuple[str, str, int]]) -> None:
        """Show the desired replicas: (model, role, replicas) of each pool."""
        for gauge in self.wanted.values():
            gauge.clear()
        for model, role, replicas in targets:
            gauge = self.wanted["prefill" if role == "prefill" else "decode"]
            gauge.set(model, to=gauge.get(model) + replicas)

    def refused(self, code: str) -> None:
        """Count a plugin whose registration was refused."""
        self.refusals.add(code)

    def alarmed(self, code: str) -> None:
        """Count an alarm for the operator."""
        self.alarms.add(code)

    def render(self) -> str:
        """Return all metrics in the text format of Prometheus."""
        return self.registry.render()

    def _gauge(self, name: str, help: str) -> Gauge:
        return self.registry.gauge(PREFIX + name, help, "model")

    def _clear(self) -> None:
        durations = self.observed["request_duration_seconds"]
        for gauge in (*self.observed.values(), *self.predicted.values()):
            if gauge is not durations:
                gauge.clear()
        for gauge in (self.pool_replicas, self.pool_target, self.health, self.attainment, self.overriding, self.short):
            gauge.clear()

    def _model(self, model: str, tick: ModelTick) -> None:
        for health in ("fresh", "stale", "broken"):
            self.health.set(model, health, to=float(tick.health == health))
        observed = {
            "ttft_ms": _ms(tick.ttft),
            "itl_ms": _ms(tick.itl),
            "requests_per_second": tick.rate,
            "input_sequence_tokens": tick.shape.isl,
            "output_sequence_tokens": tick.shape.osl,
        }
        for name, value in observed.items():
            if value is not None:
                self.observed[name].set(model, to=value)
        for name, value in _expected(tick.predicted).items():
            if value is not None:
                self.predicted[name].set(model, to=value)
        if tick.judged:
            self.attainment.set(model, to=tick.in_slo / tick.judged)

    def _result(self, result: PluginResult, record: TickRecord) -> None:
        self.evaluations.add(result.id, result.stage, result.result)
        self.overriding.set(result.id, to=float(result.result in ("override", "held")))
        if result.result == "held":
            self.reused.add(result.id)
        if result.result == "unsatisfied":
            self.unsatisfied.add(result.id)
        for loop, gauge in self.loops.items():
            if result.stage == "propose" and loop in result.id and result.result in ("override", "accept"):
                gauge.clear()
                change = sum(n - record.pools[p].desired for p, n in result.targets.items() if p in record.pools)
                now = "scale_up" if change > 0 else "scale_down" if change < 0 else "hold"
                for decision in DECISIONS:
                    gauge.set(decision, to=float(decision == now))


ROLES = ("prefill", "decode")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _expected(predicted: Mapping[str, Any]) -> dict[str, float | None]:
    seconds, requests, shape = predicted.get("seconds"), predicted.get("requests"), predicted.get("shape", {})
    return {
        "requests_per_second": requests / seconds if seconds and requests is not None else None,
        "input_sequence_tokens": shape.get("isl"),
        "output_sequence_tokens": shape.get("osl"),
    }
