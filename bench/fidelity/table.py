"""How do the errors become the page's tables? One per part, each between markers of its own."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from errors import LATENCIES, POINTS, Compared
from live import Live
from measured import Run
from passes import Recovered, Stretch
from tail import Steps

from penstock_lab.engine.timing.timing_model import TimingModel

TPOT_MEAN, TTFT_MEAN, PERCENTILE = 0.01, 0.04, 0.10
"""Goals on the measured GPU run, as shares: the best published simulator's means, and every percentile."""
FLOOR, TIMES = 0.10, 1.5
"""Goal on the live run: the larger of a share, and of so many times what two real runs differ by."""
BY_SEQS = (0, 32, 64, 96, 128)
BY_TOKENS = (0, 512, 1024, 1536, 2048)
"""Bounds of the groups of passes: sequences that decode, and tokens of a pass with a prompt."""
DISTURBED = 0.05
"""Share of the passes' time without a core from which on the live errors say more about the machine than the engine."""
NOT_QUIET = "**The machine was busy with other things: these errors don't count.**"
HEAD = ["| | mean | p50 | p90 | p99 | each request |", "|---|---:|---:|---:|---:|---:|"]


def measured(run: Run, found: Mapping[str, Sequence[Compared]], day: str) -> str:
    """Return the part on a measured GPU run; the first timing is the one that the goals are for."""
    blocks = "KV blocks as the GPU has room for" if run.kv_blocks is None else f"{run.kv_blocks:,} KV blocks"
    lines = [f"### {run.name}", "", f"{run.model}, {blocks}, at most {run.max_num_seqs} sequences.", ""]
    lines += [f"{day}. Errors of mean and percentiles; *each request*: median of the sizes of the requests' own.", ""]
    lines += HEAD
    goal = next(iter(found.values()))
    for name in LATENCIES:
        lines.append(_real(name, goal))
        lines += [_errors(timing, name, rows) for timing, rows in found.items()]
    lines.append(f"| **throughput**, real, tokens/s | {_row(goal, 'throughput')['mean'].real:,.0f} | | | | |")
    for timing, rows in found.items():
        lines.append(f"| {timing} | {_signed(_row(rows, 'throughput')['mean'].error)} | | | | |")
    return "\n".join([*lines, "", *_verdicts(goal)])


def recovered(ours: Recovered, theirs: Recovered, timing: TimingModel) -> str:
    """Return the part on the measured run's passes.

    Args:
        ours, theirs: planned when the pass before has ended, and when it starts.
        timing: what passes take by the profile.
    """
    lines = [
        "**When a pass is planned**",
        "",
        "| a pass is planned when the one before it | milestones | contradicted |",
        "|---|---:|---:|",
        f"| ends | {ours.milestones} | {ours.contradicted} |",
        f"| starts | {theirs.milestones} | {theirs.contradicted} |",
        "",
        "**Longer than by the profile**",
        "",
        "| passes | stretches | longer than by the profile, ms per pass |",
        "|---|---:|---:|",
    ]
    decoding = [one for one in theirs.stretches if not any(each.chunks for each in one.passes)]
    for low, high in pairwise(BY_SEQS):
        group = [one for one in decoding if low < one.passes[0].seqs <= high]
        if group:
            more = median(_longer(one, timing) / len(one.passes) for one in group)
            lines.append(f"| decoding alone, {low + 1} to {high} sequences | {len(group)} | {_ms(more)} |")
    usual = median(_longer(one, timing) / len(one.passes) for one in decoding)
    mixed = [one for one in theirs.stretches if sum(1 for each in one.passes if each.chunks) == 1]
    for low, high in pairwise(BY_TOKENS):
        group = [one for one in mixed if low < _largest(one) <= high]
        if group:
            more = median(_longer(one, timing) - usual * (len(one.passes) - 1) for one in group)
            lines.append(f"| with a prompt, {low + 1} to {high:,} tokens | {len(group)} | {_ms(more)} |")
    return "\n".join(lines)


def steps_at_the_end(run: Run, tail: Sequence[Steps]) -> str:
    """Return the part on the steps at the end of a run."""
    shown = " | ".join(f"{one.seqs:.0f}" for one in tail)
    lines = [
        f"**{run.name}, its end**",
        "",
        f"| sequences, second by second | {shown} |",
        f"|---|{'---:|' * len(tail)}",
    ]
    lines.append(f"| step, ms | {' | '.join(f'{one.real * 1e3:.1f}' for one in tail)} |")
    lines.append(f"| longer than by the profile, ms | {' | '.join(_ms(one.real - one.operators) for one in tail)} |")
    return "\n".join(lines)


def live(found: Live, day: str, machine: str) -> str:
    """Return the part on the live run."""
    lines = [
        f"{day}, {machine}. The sweep timed {found.passes} passes in {found.sweep_seconds:.0f} s; the cost fitted to "
        f"them is {found.missed:.1%} off one of its points in the median.",
        "",
        *HEAD,
    ]
    met = missed = 0
    quiet = max(found.waited) <= DISTURBED
    for name in LATENCIES:
        lines.append(_real(name, found.ours))
        lines += [_errors("simulated", name, found.ours), _errors("real, second run to first", name, found.again)]
        ours, again = _row(found.ours, name), _row(found.again, name)
        within = [abs(ours[point].error) <= most(again[point].error) for point in POINTS]
        met, missed = met + within.count(True), missed + within.count(False)
        if quiet:
            lines.append("| goal met | " + " | ".join("yes" if each else "no" for each in within) + " | |")
    ours, again = _row(found.ours, "throughput")["mean"], _row(found.again, "throughput")["mean"]
    lines += [
        f"| **throughput**, real, tokens/s | {ours.real:,.0f} | | | | |",
        f"| simulated | {_signed(ours.error)} | | | | |",
        f"| real, second run to first | {_signed(again.error)} | | | | |",
        "",
        "Goal: at most 10 %, or 1.5 times what the real runs differ by. "
        + (f"Met for {met} of {met + missed} latencies." if quiet else "Not judged."),
        "",
        f"In the two runs vLLM had no core for {' and '.join(f'{share:.0%}' for share in found.waited)} of its passes' "
        f"time. {'The machine was quiet enough.' if quiet else NOT_QUIET}",
    ]
    return "\n".join(lines)


def most(difference: float) -> float:
    """Return the largest error that the goal on the live run allows, as a share."""
    return max(FLOOR, TIMES * abs(difference))


def _longer(one: Stretch, timing: TimingModel) -> float:
    """Return by how many seconds a stretch is longer than what its passes' operators take."""
    return one.real - sum(each.profiled(timing) for each in one.passes)


def _largest(one: Stretch) -> int:
    return max(each.prompt_tokens + each.seqs for each in one.passes)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:+.2f}"


def _verdicts(rows: Sequence[Compared]) -> list[str]:
    worst = max((row for row in rows if row.name in LATENCIES and row.point != "mean"), key=lambda row: abs(row.error))
    named = [
        ("Mean TPOT", _row(rows, "TPOT")["mean"].error, TPOT_MEAN),
        ("Mean TTFT", _row(rows, "TTFT")["mean"].error, TTFT_MEAN),
        (f"Furthest percentile ({worst.name} {worst.point})", worst.error, PERCENTILE),
    ]
    return [
        f"- {what}: {_signed(error)}, goal {goal:.0%}: {'met' if abs(error) <= goal else 'missed'}."
        for what, error, goal in named
    ]


def _row(rows: Sequence[Compared], name: str) -> dict[str, Compared]:
    return {row.point: row for row in rows if row.name == name}


def _real(name: str, rows: Sequence[Compared]) -> str:
    cells = " | ".join(f"{_row(rows, name)[point].real * 1e3:,.1f}" for point in POINTS)
    return f"| **{name}**, real, ms | {cells} | |"


def _errors(what: str, name: str, rows: Sequence[Compared]) -> str:
    found = _row(rows, name)
    each = found["mean"].requests
    cells = " | ".join(_signed(found[point].error) for point in POINTS)
    return f"| {what} | {cells} | {'' if each is None else f'{100 * each:.1f} %'} |"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %"
