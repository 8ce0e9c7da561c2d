"""What is run? Places (traffic, layout, start-up), who takes part, with which knob, and in which order."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from traffic import CONVERSATION

TTFT, ITL = 0.5, 0.02
"""Seconds that are promised: a request is in SLO if its TTFT and its own mean ITL keep these."""
GPUS = 16
"""Ceiling of everybody."""
ENGINE = {
    "num_gpu_blocks": 2048,
    "block_size": 256,
    "enable_prefix_caching": False,
    "max_model_len": 16_384,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
}
PER_WORKER = 2.2
"""Requests per second for which one of the workers is there that everybody begins with."""
STATIC = {"aggregated": (3, 4, 5, 6, 8, 10), "disaggregated": ((2, 1), (3, 1), (3, 2), (4, 2), (5, 2))}
MISS_COSTS = (2.5, 5.0, 20.0, 60.0, 240.0)
"""Values of our one knob, planner.slo.miss_cost, from lean to eager."""


class Place(NamedTuple):
    """Where everybody is judged: traffic, layout, and the seconds a worker takes until it serves."""

    traffic: str
    layout: str
    start_up: float

    @property
    def name(self) -> str:
        return f"{self.traffic}, {self.layout}, start-up {self.start_up:g} s"


@dataclass(frozen=True, slots=True)
class Entry:
    """A policy with a value of its knob. ``kind``: static, peer or ours; ``settings``: what follows from these."""

    kind: str
    policy: str
    knob: str
    settings: dict[str, Any] = field(compare=False)


class Cell(NamedTuple):
    """One run."""

    place: Place
    seed: int
    entry: Entry

    @property
    def key(self) -> str:
        return " | ".join((*map(str, self.place), str(self.seed), self.entry.policy, self.entry.knob))


_LOAD = {"optimization_target": "sla", "enable_throughput_scaling": False, "enable_load_scaling": True}
_FLOORS: dict[str, dict[str, Any]] = {
    "default": {},
    **{f"min_endpoint {least}": {"min_endpoint": least} for least in (3, 5, 6, 8, 10, 13, GPUS)},
}
"""To the ceiling: with a floor that suffices for the peak, a mode of the peer is a static fleet, and has its front."""
_SLA: dict[str, dict[str, Any]] = {
    "default": {},
    **{f"SLA x {factor:g}": {"service_level_times": factor} for factor in (0.6, 0.4)},
}
PEER: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "throughput": ({"optimization_target": "throughput"}, _FLOORS),
    "latency": ({"optimization_target": "latency"}, _FLOORS),
    "sla, load loop": (_LOAD, {**_SLA, "sensitivity 50": {"load_scaling_down_sensitivity": 50}}),
    "sla, throughput loop, arima": ({"optimization_target": "sla"}, _SLA),
    "sla, throughput loop, constant": ({"optimization_target": "sla", "load_predictor": "constant"}, _SLA),
    "sla, throughput loop, kalman": ({"optimization_target": "sla", "load_predictor": "kalman"}, _SLA),
    "sla, both loops": ({"optimization_target": "sla", "enable_load_scaling": True}, _SLA),
}
"""The peer's modes, its default first, and what of each is turned from lean to eager."""
MAIN = (
    Place("waves", "aggregated", 120.0),
    Place("a slow wave and a burst", "aggregated", 120.0),
    Place("ramps", "aggregated", 120.0),
    Place("bursts", "aggregated", 120.0),
)
MORE = (
    Place("waves", "aggregated", 0.0),
    Place("a beat on a slow wave", "aggregated", 120.0),
    Place("ramps", "disaggregated", 120.0),
    Place(CONVERSATION, "aggregated", 120.0),
)
"""Places with fewer seeds."""
QUICK = (Place("six-fold spike", "aggregated", 120.0),)


def roles_of(place: Place) -> tuple[str, ...]:
    """Return the roles of a place's workers."""
    return ("decode",) if place.layout == "aggregated" else ("prefill", "decode")


def entries(place: Place, *, quick: bool) -> Iterator[Entry]:
    """Yield who takes part at a place."""
    sizes = STATIC[place.layout]
    for size in sizes[:: 2 if quick else 1]:
        first, second = size if isinstance(size, tuple) else (0, size)
        named = f"{first}P{second}D" if first else f"{second}"
        yield Entry("static", "static", named, {"prefill": first, "decode": second})
    for cost in MISS_COSTS[2:4] if quick else MISS_COSTS:
        yield Entry("ours", "slo", f"miss_cost {cost:g}", {"miss_cost": cost})
    for policy, (settings, knobs) in PEER.items():
        for knob, more in knobs.items():
            # A floor holds for each role; two of them above the ceiling are none of this peer's settings.
            if more.get("min_endpoint", 0) > GPUS // len(roles_of(place)):
                continue
            if not quick or knob == "default":
                yield Entry("peer", policy, knob, {**settings, **more})


def cells(seeds: int, *, quick: bool, public: bool) -> list[Cell]:
    """Return all runs, seed by seed, so that a part of them from the beginning says something of every place.

    Args:
        seeds: of the main places; the others have one less.
        public: whether the public trace is there.
    """
    if quick:
        return [Cell(place, 1, entry) for place in QUICK for entry in entries(place, quick=True)]
    more = tuple(place for place in MORE if public or place.traffic != CONVERSATION)
    order = [(place, seed) for seed in range(1, seeds + 1) for place in (*MAIN, *(more if seed < seeds else ()))]
    return [Cell(place, seed, entry) for place, seed in order for entry in entries(place, quick=False)]
