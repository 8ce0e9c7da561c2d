"""Saturation of the load generator itself: samples the machine's CPU and judges the generator's lateness."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penstock.kernel.statistics import percentile

Reason = Literal["late", "cpu", "inflight_max", "interrupted", "no_answers"]

LATE_SHARE = 0.25
"""A run is in doubt where its p99 lateness exceeds this share of the mean gap between arrivals, or of the median
TTFT."""
LATE_FLOOR = 0.002
"""Seconds: a timer's own resolution, below which lateness means nothing."""
CPU_BUSY = 0.95
"""A second in which the machine's CPUs were busier than this is a saturated one."""
CPU_SECONDS_SHARE = 0.10
"""A run is in doubt where more than this share of its seconds were saturated."""
SAMPLE_EVERY = 1.0
PROC_STAT = Path("/proc/stat")


@dataclass(slots=True)
class CpuSampler:
    """Share of the whole machine's CPU time that was busy, second by second; no sample where /proc is absent."""

    samples: list[float] = field(default_factory=list)
    _last: tuple[int, int] | None = None

    async def run(self) -> None:
        """Sample until cancelled."""
        self.sample()
        while True:
            await asyncio.sleep(SAMPLE_EVERY)
            self.sample()

    def sample(self) -> None:
        """Take one sample; the first only sets the mark."""
        now = read_cpu()
        if now is None:
            return
        if self._last is not None and now[1] > self._last[1]:
            self.samples.append((now[0] - self._last[0]) / (now[1] - self._last[1]))
        self._last = now

    @property
    def mean(self) -> float | None:
        """Mean busy share; None without samples."""
        return sum(self.samples) / len(self.samples) if self.samples else None

    @property
    def peak(self) -> float | None:
        """Busiest second."""
        return max(self.samples, default=None)

    @property
    def saturated_share(self) -> float | None:
        """Share of seconds in which the CPUs were busier than `CPU_BUSY`."""
        if not self.samples:
            return None
        return sum(sample > CPU_BUSY for sample in self.samples) / len(self.samples)


def read_cpu(path: Path = PROC_STAT) -> tuple[int, int] | None:
    """Return (busy, all) clock ticks of all CPUs together since boot, or None where the system has no such counts.

    Time that a hypervisor took (steal) counts as busy: it was not available to us either.
    """
    try:
        with path.open() as file:
            words = file.readline().split()
    except OSError:
        return None
    if len(words) < 9 or words[0] != "cpu":
        return None
    ticks = [int(field) for field in words[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def judge(
    *,
    lateness: Sequence[tuple[float, float]],
    mean_gap: float | None,
    ttft_p50: float | None,
    cpu: CpuSampler,
) -> list[tuple[Reason, str]]:
    """Return why a run's times are in doubt: (word, sentence) for each reason; empty for a good one. Times in seconds.

    Args:
        lateness: when each request was sent, and how long after its due time.
    """
    doubts: list[tuple[Reason, str]] = []
    late = sorted(each for _, each in lateness)
    for what, base in (("mean gap between arrivals", mean_gap), ("median TTFT", ttft_p50)):
        if not late or base is None:
            continue
        allowed = max(LATE_FLOOR, LATE_SHARE * base)
        if percentile(late, 0.99) > allowed:
            when, worst = max(lateness, key=lambda each: each[1])
            busy = cpu.samples[int(when)] if int(when) < len(cpu.samples) else None
            doubts.append(
                (
                    "late",
                    f"{sum(each > allowed for each in late)} of {len(late)} requests were sent over "
                    f"{allowed * 1e3:.1f} ms late ({LATE_SHARE:.0%} of the {what}), the worst {worst * 1e3:.1f} ms at "
                    f"second {when:.0f}" + ("" if busy is None else f", when the machine's CPUs were {busy:.0%} busy"),
                )
            )
            break
    share = cpu.saturated_share
    if share is not None and share > CPU_SECONDS_SHARE:
        doubts.append(
            ("cpu", f"the machine was saturated: its CPUs were over {CPU_BUSY:.0%} busy in {share:.0%} of the seconds")
        )
    return doubts


def reasons(doubts: Sequence[tuple[Reason, str]]) -> list[Reason]:
    """Return each word once, in order."""
    return list(dict.fromkeys(reason for reason, _ in doubts))
