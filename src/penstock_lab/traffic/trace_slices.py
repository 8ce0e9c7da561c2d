"""Slices of a trace by time, count or conversation, and its rate scaled; all keep the order of arrival."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice

from msgspec.structs import replace

from penstock_lab.traffic.traffic_request import TrafficRequest

COMMON = 0.01
"""A hash id in more than this share of a trace's requests is taken for a system prompt, not for one conversation."""


def by_time(requests: Iterable[TrafficRequest], start: float, end: float | None = None) -> Iterator[TrafficRequest]:
    """Keep arrivals in [start, end) seconds of a trace; their times stay (see `rebase`)."""
    for request in requests:
        if request.at >= start and (end is None or request.at < end):
            yield request


def by_count(requests: Iterable[TrafficRequest], count: int | None, skip: int = 0) -> Iterator[TrafficRequest]:
    """Keep ``count`` requests after the first ``skip``."""
    return islice(requests, skip, None if count is None else skip + count)


def rebase(requests: Iterable[TrafficRequest], start: float | None = None) -> Iterator[TrafficRequest]:
    """Let ``start`` (the first arrival where None) be second 0."""
    for request in requests:
        if start is None:
            start = request.at
        yield replace(request, at=request.at - start)


def scale_rate(requests: Iterable[TrafficRequest], factor: float) -> Iterator[TrafficRequest]:
    """Let everything arrive ``factor`` times as fast; pauses shrink alike."""
    if not factor > 0.0:
        raise ValueError(f"a rate is scaled by a factor above 0, not {factor}")
    for request in requests:
        think = None if request.think is None else request.think / factor
        yield replace(request, at=request.at / factor, think=think)


def paced(requests: Iterable[TrafficRequest], rate: float, rng: random.Random) -> Iterator[TrafficRequest]:
    """Let requests that have no times arrive as a Poisson stream, in their order; ``rate``: per second."""
    at = 0.0
    for request in requests:
        yield replace(request, at=at)
        at += rng.expovariate(rate)


def spread_ties(requests: Iterable[TrafficRequest]) -> Iterator[TrafficRequest]:
    """Spread requests of one timestamp evenly up to the next one.

    The clock of the Mooncake conversation trace ticks every 3 s; sent as it stands, ten requests arrive at once and
    then none for 3 s, as in no real service. The last timestamp, which has no next one, stays as it is.
    """
    waiting: list[TrafficRequest] = []
    for at, group in groupby(requests, key=lambda request: request.at):
        yield from _spread_evenly(waiting, at)
        waiting = list(group)
    yield from waiting


def deal_conversations(
    requests: Sequence[TrafficRequest], parts: int, *, common: float = COMMON
) -> list[list[TrafficRequest]]:
    """Split a trace into parts that resemble each other and the whole, conversations kept whole.

    Conversations are dealt like cards, the one with most requests (then most tokens) first and the order turned with
    each round: a few large ones carry much of a trace's reuse, and drawn at random they make unequal parts.

    Raises:
        ValueError: a request has no hash ids.
    """
    names = conversations(requests, common=common)
    sizes: dict[int, tuple[int, int]] = {}
    for request, name in zip(requests, names, strict=True):
        count, tokens = sizes.get(name, (0, 0))
        sizes[name] = (count + 1, tokens + request.isl)
    order = sorted(sizes, key=lambda name: sizes[name], reverse=True)
    owner: dict[int, int] = {}
    for place, name in enumerate(order):
        turn, seat = divmod(place, parts)
        owner[name] = seat if turn % 2 == 0 else parts - 1 - seat
    out: list[list[TrafficRequest]] = [[] for _ in range(parts)]
    for request, name in zip(requests, names, strict=True):
        out[owner[name]].append(request)
    return out


def conversations(requests: Sequence[TrafficRequest], *, common: float = COMMON) -> list[int]:
    """Return which conversation each request belongs to, shape (n,).

    A conversation is named by the first hash id of its prompts that stands in at most ``common`` of all requests:
    ids before that are a system prompt that many share.

    Raises:
        ValueError: a request has no hash ids.
    """
    holders = Counter(number for request in requests for number in set(request.hash_ids))
    most = max(1.0, common * len(requests))
    names: list[int] = []
    for request in requests:
        if not request.hash_ids:
            raise ValueError("conversations are told apart by hash ids; this trace has requests without")
        names.append(next((number for number in request.hash_ids if holders[number] <= most), request.hash_ids[-1]))
    return names


def _spread_evenly(waiting: list[TrafficRequest], until: float) -> Iterator[TrafficRequest]:
    for index, request in enumerate(waiting):
        yield replace(request, at=request.at + (until - request.at) * index / len(waiting))
