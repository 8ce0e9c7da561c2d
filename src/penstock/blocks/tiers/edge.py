"""`Edge`: the way from one place to another, what is under way there, and how long a move takes, as measured."""

import msgspec

from penstock.blocks.tiers.tier_events import Place
from penstock.kernel.machine import SECOND, Nanos

FADE = 0.9
"""A measured move counts so much of the next one: the last ten decide."""
PRIOR_WEIGHT = 0.1
"""Of the prior's latency, where a measured move has 1. Most moves are of one size: then this point decides how much of
their time is latency, and the rest goes to the rate."""
INSTANT = 1e-9
"""Seconds that a move takes at the least."""
HALF_LIFE: Nanos = 60 * SECOND
"""In which half of what a move took longer than assumed is forgotten. A slow edge is used no more, so nothing would
measure that it is fast again: one stalled copy would have prompts computed for ever. A guess."""


class EdgeSpeed(msgspec.Struct, frozen=True):
    """What is assumed until it is measured."""

    latency: float
    """seconds"""
    rate: float
    """bytes per second"""


PRIORS = {
    "engine>host": EdgeSpeed(0.0001, 10e9),
    "host>engine": EdgeSpeed(0.0001, 10e9),
    "host>disk": EdgeSpeed(0.001, 1e9),
    "disk>host": EdgeSpeed(0.001, 1e9),
    "host>object": EdgeSpeed(0.03, 0.1e9),
    "object>host": EdgeSpeed(0.03, 0.1e9),
    "peer>host": EdgeSpeed(0.002, 1e9),
}
"""Of one core's memcpy, one virtual disk, an object store in the same region and a TCP connection of 10 Gbit/s."""


class Edge(msgspec.Struct, kw_only=True):
    """One direction between two places.

    Seconds of a move are a line over its bytes, fitted by least squares to the moves that came through whole: the
    older a move, the less it counts. The prior's latency is a point of the line, too; its rate counts until the first
    move. Where the fit makes no sense, such as longer moves that took less time, the line is one without latency.
    Slowness that is not measured again fades towards the prior.

    Args:
        peer: of which peer; empty for the others.
        queue, ahead: ids of fetches that wait, those that a load wants and those that are prefetched.
        rest_until: after a failure.
    """

    source: Place
    target: Place
    peer: str = ""
    in_flight: int = 0
    """bytes"""
    queue: list[int] = []
    ahead: list[int] = []
    queued: int = 0
    """bytes of ``queue``"""
    rest_until: Nanos = 0
    moves: int = 0
    measured_at: Nanos = 0
    sums: list[float] = msgspec.field(default_factory=lambda: [0.0] * 5)
    """Of weight, bytes, seconds, bytes squared and bytes times seconds."""

    @property
    def name(self) -> str:
        return f"{self.source}>{self.target}"

    def measured(self, now: Nanos, size: int, seconds: float) -> None:
        """Take note of a move of so many bytes that came through whole."""
        seconds = max(seconds, INSTANT)
        self.moves += 1
        self.measured_at = now
        for number, term in enumerate((1.0, size, seconds, size * size, size * seconds)):
            self.sums[number] = self.sums[number] * FADE + term

    def speed(self, now: Nanos) -> EdgeSpeed:
        """Return latency and rate as they are now."""
        prior = PRIORS[self.name]
        if not self.moves:
            return prior
        found, left = self._fitted(prior), 0.5 ** (max(0, now - self.measured_at) / HALF_LIFE)
        latency = found.latency - (1 - left) * max(0.0, found.latency - prior.latency)
        return EdgeSpeed(latency, 1 / (1 / found.rate - (1 - left) * max(0.0, 1 / found.rate - 1 / prior.rate)))

    def _fitted(self, prior: EdgeSpeed) -> EdgeSpeed:
        weight, x, y, xx, xy = self.sums
        weight += PRIOR_WEIGHT  # of a move without bytes
        y += PRIOR_WEIGHT * prior.latency
        slope = (weight * xy - x * y) / (weight * xx - x * x)
        latency = (y - slope * x) / weight
        if slope <= 0 or latency < 0:
            return EdgeSpeed(0.0, xx / xy)
        return EdgeSpeed(latency, 1 / slope)

    def seconds(self, now: Nanos, size: int) -> float:
        """Return how long a move of so many bytes would take, behind what is under way."""
        speed = self.speed(now)
        return speed.latency + (self.in_flight + self.queued + size) / speed.rate

    def rests(self, now: Nanos) -> bool:
        return now < self.rest_until
