"""Request counts for planners: every request at its arrival, and again at its end; sums that only grow.

Frontends and simulator use the same counters, so that a planner gets the same numbers from both.
"""

from penstock.kernel.latency_bins import count
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.values import NOTHING_PROMISED, Slo, Traffic
from penstock.planner.sizing.workload_mix import count_into, length_bin, shape_bin


class RequestCounts:
    """One model's requests at one frontend since its start. About 10 us per request."""

    def __init__(self) -> None:
        self._sums = Traffic(seconds=0.0, arrived=0, prompt_tokens=0)

    def arrive(self, isl: int) -> None:
        """Count an arrival with so many prompt tokens."""
        sums = self._sums
        sums.arrived += 1
        sums.prompt_tokens += isl
        count_into(sums.prompts, length_bin(isl))

    def end(self, record: RequestRecord, slo: Slo) -> None:
        """Count an end; a request that its client cancelled or got wrong does not count against us.

        Of a shadow's copy only the load on engines counts: no client waited for it, and it goes last in every queue.
        """
        if record.copy_of is not None:
            if record.outcome == "ok":
                self._worked(record)
        elif record.outcome == "ok":
            self._answered(record, slo)
        elif record.outcome != "cancelled" and record.fault != "client":
            self._sums.lost += 1
            self._sums.judged += 1

    def _answered(self, record: RequestRecord, slo: Slo) -> None:
        self._worked(record)
        sums = self._sums
        if record.service_class is not None:
            sums.classes[record.service_class] = sums.classes.get(record.service_class, 0) + 1
        if record.itl is not None:
            sums.itl_count += 1
            sums.itl_sum += record.itl.mean
            count(sums.itl, record.itl.mean)
        if record.ttft is not None:
            sums.ttft_count += 1
            sums.ttft_sum += record.ttft
            count(sums.ttft, record.ttft)
            sums.judged += 1
            sums.in_slo += record.within(slo)
        elif slo.of(record.service_class) == NOTHING_PROMISED:  # no target but an answer
            sums.judged += 1
            sums.in_slo += 1

    def _worked(self, record: RequestRecord) -> None:
        """Count what an answered request was to engines."""
        sums, isl = self._sums, record.isl or 0
        sums.answered += 1
        sums.answered_prompt_tokens += isl
        sums.output_tokens += record.osl
        hit = 0.0
        if record.cached is not None and record.isl:
            sums.cached_tokens += record.cached
            sums.cache_reported_tokens += record.isl
            hit = record.cached / record.isl
        count_into(sums.shapes, shape_bin(isl, record.osl, hit))
        if record.e2e is not None:
            waited = 0.0 if record.copy_of is None else record.queued or 0.0
            sums.duration_sum += record.e2e - waited

    def totals(self, seconds: float) -> Traffic:
        """Return the counters as they are now, as a copy; ``seconds`` since the frontend's start."""
        return self._sums + Traffic(seconds=seconds, arrived=0, prompt_tokens=0)
