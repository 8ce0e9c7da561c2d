"""Metrics of a tier process: bytes, seconds, blocks, hits, misses, failures and occupancy per tier."""

from collections.abc import Mapping

from penstock.adapters.telemetry.prometheus_text import Counter, MetricRegistry
from penstock_kv.blocks.tiers.tier_events import Place, TierName
from penstock_kv.blocks.tiers.tier_state import MachineCounts, TierCounts

PREFIX = "penstock_kv_tier_"
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class TierMetrics:
    """All metrics of one tier process; ``penstock_kv_tier_*``."""

    def __init__(self) -> None:
        self.registry = MetricRegistry(PREFIX)
        new, way = self.registry, ("source", "target")
        self.bytes = new.counter("bytes_total", "Bytes of blocks that arrived, per way between two tiers.", *way)
        self.seconds = new.histogram("move_seconds", "Duration of a move of one or more blocks.", SECONDS, *way)
        self.blocks = new.counter("moved_blocks_total", "Blocks of moves, by what came of them.", *way, "outcome")
        self.hits = new.counter(
            "hits_total", "Blocks that an engine asked for and could load, by fastest tier.", "tier"
        )
        self.misses = new.counter(
            "misses_total", "Blocks that an engine asked for and has to compute, by reason.", "reason"
        )
        self.stored = new.counter("stored_total", "Blocks that came into a tier.", "tier")
        self.removed = new.counter("removed_total", "Blocks that left a tier.", "tier")
        self.jobs = new.counter(
            "job_blocks_total", "Blocks of engines' jobs, by whether they were done.", "job", "done"
        )
        self.refused = new.counter("refused_total", "Jobs and connections that were refused, by reason.", "reason")
        self.skipped = new.counter(
            "skipped_total", "Blocks that were not put into a tier, by reason.", "tier", "reason"
        )
        self.late = new.counter("late_moves_total", "Moves whose deadline passed.", "tier")
        self.lost = new.counter("lost_total", "Blocks that were evicted before a lower tier had them.", "tier")
        self.hints = new.counter("ignored_hints_total", "Blocks whose pin or priority could not be honoured.", "tier")
        self.prefetched = new.counter(
            "prefetched_total",
            "Blocks of requests that were said to be likely: brought up, used or wasted then, or refused.",
            "result",
        )
        self.present = new.gauge("blocks", "Blocks that a tier has.", "tier")
        self.capacity = new.gauge("capacity_blocks", "Blocks that a tier has room for.", "tier")
        self.open = new.gauge("open", "What is under way: jobs, moves, connections.", "what")

    def render(
        self, present: Mapping[TierName, int], capacity: Mapping[TierName, int], under_way: Mapping[str, int]
    ) -> str:
        """Return the text of a scrape."""
        for tier, room in capacity.items():
            self.capacity.set(tier, to=room)
            self.present.set(tier, to=present.get(tier, 0))
        for what, count in under_way.items():
            self.open.set(what, to=count)
        return self.registry.render()

    def read(self, counts: Mapping[Place, TierCounts], whole: MachineCounts) -> None:
        """Take over what the tier machine counts itself."""
        self.prefetched.set("brought", to=whole.prefetched)
        self.prefetched.set("used", to=whole.prefetch_hits)
        self.prefetched.set("wasted", to=whole.prefetch_wasted)
        for tier, count in counts.items():
            for reason, blocks in count.skipped.items():
                self.skipped.set(tier, reason, to=blocks)
            self.late.set(tier, to=count.late)
            self.lost.set(tier, to=count.lost)
            self.hints.set(tier, to=count.hints_ignored)

    def moved(
        self, source: Place, target: Place, outcomes: Mapping[str, int], block_bytes: int, seconds: float
    ) -> None:
        """A move is over; ``outcomes``: how many blocks had which one."""
        for outcome, count in outcomes.items():
            self.blocks.add(source, target, outcome, by=count)
        self.bytes.add(source, target, by=outcomes.get("ok", 0) * block_bytes)
        self.seconds.observe(seconds, source, target)

    def bytes_of(self, tier: str, *, into: bool) -> int:
        """Return bytes that came into a tier, or that were read from it."""
        return int(sum(cell.value for way, cell in self.bytes.cells.items() if way[into] == tier))

    def failures(self, tier: str) -> dict[str, int]:
        """Return blocks of moves to or from a tier that did not arrive, by outcome."""
        counts: dict[str, int] = {}
        for (source, target, outcome), cell in self.blocks.cells.items():
            if tier in (source, target) and outcome != "ok":
                counts[outcome] = counts.get(outcome, 0) + int(cell.value)
        return counts


def tier_families(text: str) -> str:
    """Return a page of metrics that has those of tiers and no others.

    Raises:
        ValueError: it has others.
    """
    for line in text.splitlines():
        if not line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith(PREFIX):
            raise ValueError(f"{line!r:.80} is not of {PREFIX}")
    return text


def by_label(counter: Counter) -> dict[str, int]:
    """Return a counter of one label as numbers."""
    return {labels[0]: int(cell.value) for labels, cell in counter.cells.items()}
