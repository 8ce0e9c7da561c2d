"""What is counted of requests for planners? Every request at its arrival, and again at its end; sums that only grow.

The same counters serve the frontends and the simulator, so that a planner is told the same by both.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.kernel.bins import Bins, count
from penstock.kernel.records import RequestRecord
from penstock.planner.seen import Traffic
from penstock.planner.settings import SloTargets
from penstock.planner.shapes import count_into, length_bin, shape_bin


class SloPair(NamedTuple):
    """What a request is held to, in seconds; None is not promised."""

    ttft: float | None
    itl: float | None


class SloOf(NamedTuple):
    """What each request is held to: its class's pair, or that of all others."""

    others: SloPair
    classes: Mapping[str, SloPair] = {}

    def of(self, record: RequestRecord) -> SloPair:
        """Return what one request is held to."""
        return self.classes.get(record.service_class or "", self.others)


def slo_of(targets: SloTargets) -> SloOf:
    """Return what requests are held to by the planner's settings; a class's own targets first."""
    others = SloPair(targets.ttft, targets.itl)
    classes = {
        name: SloPair(others.ttft if own.ttft is None else own.ttft, others.itl if own.itl is None else own.itl)
        for name, own in targets.classes.items()
    }
    return SloOf(others, classes)


class ModelCounts:
    """One model's requests at one frontend since its start. About 10 us per request."""

    __slots__ = (
        "answered",
        "answered_prompt_tokens",
        "arrived",
        "cached_tokens",
        "classes",
        "duration_sum",
        "in_slo",
        "itl",
        "itl_count",
        "itl_sum",
        "judged",
        "lost",
        "output_tokens",
        "prompt_tokens",
        "prompts",
        "shapes",
        "told_tokens",
        "ttft",
        "ttft_count",
        "ttft_sum",
    )

    def __init__(self) -> None:
        self.arrived = self.prompt_tokens = self.answered = self.answered_prompt_tokens = self.output_tokens = 0
        self.lost = self.judged = self.in_slo = self.cached_tokens = self.told_tokens = 0
        self.ttft_count = self.itl_count = 0
        self.ttft_sum = self.itl_sum = self.duration_sum = 0.0
        self.ttft: Bins = {}
        self.itl: Bins = {}
        self.prompts: Bins = {}
        self.shapes: Bins = {}
        self.classes: dict[str, int] = {}

    def arrive(self, isl: int) -> None:
        """A request is here, with so many prompt tokens."""
        self.arrived += 1
        self.prompt_tokens += isl
        count_into(self.prompts, length_bin(isl))

    def end(self, record: RequestRecord, slo: SloOf) -> None:
        """A request is over; what its client cancelled or got wrong says nothing of us."""
        if record.outcome == "ok":
            self._answered(record, slo.of(record))
        elif record.outcome != "cancelled" and record.fault != "client":
            self.lost += 1
            self.judged += 1

    def _answered(self, record: RequestRecord, slo: SloPair) -> None:
        isl = record.isl or 0
        self.answered += 1
        self.answered_prompt_tokens += isl
        self.output_tokens += record.osl
        hit = 0.0
        if record.cached is not None and record.isl:
            self.cached_tokens += record.cached
            self.told_tokens += record.isl
            hit = record.cached / record.isl
        count_into(self.shapes, shape_bin(isl, record.osl, hit))
        if record.service_class is not None:
            self.classes[record.service_class] = self.classes.get(record.service_class, 0) + 1
        if record.e2e is not None:
            self.duration_sum += record.e2e
        if record.itl is not None:
            self.itl_count += 1
            self.itl_sum += record.itl.mean
            count(self.itl, record.itl.mean)
        if record.ttft is not None:
            self.ttft_count += 1
            self.ttft_sum += record.ttft
            count(self.ttft, record.ttft)
            self.judged += 1
            self.in_slo += record.within(slo.ttft, slo.itl)
        elif slo.ttft is None and slo.itl is None:  # nothing is promised but an answer
            self.judged += 1
            self.in_slo += 1

    def told(self, seconds: float) -> Traffic:
        """Return the counters as they are; ``seconds`` since the frontend's start."""
        found: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name in ("ttft", "itl", "prompts", "shapes", "classes"):
            found[name] = dict(found[name])
        return Traffic(seconds=seconds, **found)
