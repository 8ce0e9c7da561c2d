"""Which requests does a run get? A part of a trace, or our own, at a rate and for a seed."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path

from plan import MAX_LEN, Work

from penstock_lab.traffic import trace_slices
from penstock_lab.traffic.formats.mooncake import MooncakeTrace
from penstock_lab.traffic.formats.trace_format import reader
from penstock_lab.traffic.lengths import Lognormal
from penstock_lab.traffic.traffic_request import TrafficRequest
from penstock_lab.traffic.workloads import Plain, agent, plain

OWN: dict[str, Callable[[float, random.Random], Iterator[TrafficRequest]]] = {
    "long prompts": lambda rate, rng: plain(rate, rng, shape=LONG_PROMPTS, kind="long prompts"),
    "long answers": lambda rate, rng: plain(rate, rng, shape=LONG_ANSWERS, kind="long answers"),
    "agent": agent,
}
LONG_PROMPTS = Plain(prompt=Lognormal(6000, 0.6, 256, 32_768), answer=Lognormal(150, 0.7, 8, 1024))
LONG_ANSWERS = Plain(prompt=Lognormal(600, 0.8, 16, 8192), answer=Lognormal(600, 0.6, 16, 4096))


def requests_of(work: Work, rate: float, seed: int, traces: Path | None, count: int) -> list[TrafficRequest]:
    """Return ``count`` requests at ``rate`` per second, or as many as a third of the trace has."""
    if work.trace is None:
        made = OWN[work.name.partition(",")[0]](rate, random.Random(seed))
        found = list(islice((one for one in made if one.isl + one.osl <= MAX_LEN), count))
    else:
        assert traces is not None
        parts = _parts(traces / work.trace)
        found = list(islice(parts[seed % len(parts)], count))
        found = list(trace_slices.scale_rate(found, rate * (found[-1].at - found[0].at) / len(found)))
    return list(trace_slices.rebase(found))


@cache
def _parts(path: Path) -> list[Sequence[TrafficRequest]]:
    """Deal a trace into three: conversations from end to end where hash ids tell them, else stretches of time."""
    with path.open("rb") as lines:
        rows = list(reader("azure", lines) if path.suffix == ".csv" else MooncakeTrace(lines))
    fits = [one for one in trace_slices.spread_ties(rows) if one.isl + one.osl <= MAX_LEN]
    if all(one.hash_ids for one in fits):
        return list(trace_slices.deal_conversations(fits, 3))
    third = len(fits) // 3
    return [fits[start : start + third] for start in (0, third, 2 * third)]
