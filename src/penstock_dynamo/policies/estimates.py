"""Estimates of TTFT and ITL for one more request on an engine, from regressions over its role's passes."""

from typing import Literal

import msgspec

from penstock.kernel.values import USUAL_LIMITS, EngineLimits, RequestShape, Role
from penstock.planner.observation import EngineState
from penstock.planner.performance.regressions import (
    AggregatedRegression,
    DecodeRegression,
    FittedLine,
    PrefillRegression,
    chunked,
    fresh,
)
from penstock.planner.remembering import Remembering
from penstock_dynamo.policies.classic import decode_kv_of, mean

Rule = Literal["all-under", "consolidation"]
"""How a step down is judged: by the present estimates, or by those with one engine fewer."""


class Estimate(msgspec.Struct, frozen=True):
    """One engine. Seconds; None is unknown. ``own``: TTFT with nothing waiting; ``*_after``: with the load of one
    engine fewer shared out."""

    worker: str
    ttft: float | None = None
    itl: float | None = None
    own: float | None = None
    ttft_after: float | None = None
    itl_after: float | None = None
    room_after: bool = True


class RoleRegressions(Remembering):
    """The regressions of one role's engines, and their estimates for one engine."""

    line: FittedLine
    beside: float
    """Prompt tokens of the mean pass of an aggregated engine."""

    def __init__(self, role: Role, rule: Rule) -> None:
        self.role = role
        self._seqs = rule == "consolidation"
        """Whether decode seconds are a line over sequences too; the first generation used KV tokens alone."""
        if role == "prefill":
            self.line = PrefillRegression()
        elif role == "aggregated":
            self.line = AggregatedRegression()
        else:
            self.line = DecodeRegression() if self._seqs else FittedLine(1)
        self.beside = 0.0

    def learn(self, engine: EngineState) -> None:
        """Add an engine's window as its mean pass, which smooths single chunks."""
        steps = engine.steps
        if steps is None or steps.passes <= 0 or not steps.wall:
            return
        seconds = steps.wall / steps.passes
        tokens, seqs, kv = mean(steps, "prefill_tokens"), mean(steps, "decode_seqs"), mean(steps, "decode_kv")
        if self.role == "prefill":
            if tokens:
                self.line.add([tokens], seconds)
        elif self.role == "aggregated":
            if tokens is not None and kv is not None:
                self.line.add([tokens, kv], seconds)
                self.beside += 0.2 * (tokens - self.beside)
        elif kv:
            if not self._seqs:
                self.line.add([kv], seconds)
            elif seqs is not None:
                self.line.add([seqs, kv], seconds)

    def estimate(self, engine: EngineState, typical: RequestShape[float], spread: float) -> Estimate | None:
        """Return the estimate for one more request on an engine; None where it reports too little.

        Args:
            spread: factor by which its load grows if one engine fewer has to carry all of it.
        """
        if self.line.fit is None:
            return None
        limits = engine.limits.filled(USUAL_LIMITS)
        estimate = Estimate(worker=str(engine.worker))
        if self.role != "decode":
            queued = engine.queued_prefill_tokens
            if queued is None:
                return None
            kv = () if self.role == "prefill" else (float(engine.decode_kv or 0),)
            more = tuple(value * spread for value in kv)
            estimate = msgspec.structs.replace(
                estimate,
                ttft=self._ttft(queued, typical, limits, kv),
                own=self._ttft(0.0, typical, limits, kv),
                ttft_after=self._ttft(queued * spread, typical, limits, more),
            )
        if self.role != "prefill":
            load = decode_kv_of(engine)
            if load is None:
                return None
            context = typical.isl + typical.osl / 2.0
            seqs = float((engine.running or 0) + 1)
            estimate = msgspec.structs.replace(
                estimate,
                itl=self._itl(seqs, load + context, typical),
                itl_after=self._itl(seqs * spread, load * spread + context, typical),
                room_after=load * spread < limits.kv_tokens,
            )
        return estimate

    def _ttft(
        self, queued: float, typical: RequestShape[float], limits: EngineLimits[int], kv: tuple[float, ...]
    ) -> float | None:
        return chunked(self.line, fresh(queued + typical.isl, typical.hit_rate), limits.max_num_batched_tokens, *kv)

    def _itl(self, seqs: float, kv: float, typical: RequestShape[float]) -> float:
        if self.role == "aggregated":
            seconds = self.line.seconds(self.beside, kv)
        else:
            seconds = self.line.seconds(seqs, kv) if self._seqs else self.line.seconds(kv)
        return seconds / max(1.0, typical.accept_length or 1.0)
