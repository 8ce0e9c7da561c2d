"""Adapter mix: which LoRA adapter each request of a workload or a trace names, as in ``count=200,skew=1``."""

import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Annotated

import msgspec

from penstock.kernel.settings import Knob
from penstock_lab.traffic.traffic_request import TrafficRequest


class AdapterMix(msgspec.Struct, frozen=True, kw_only=True):
    """How many adapters there are, and how unevenly they are asked for."""

    count: Annotated[int, Knob("LoRA adapters.", unit="count", ge=1, le=1_000_000)] = 100
    skew: Annotated[float, Knob("The n-th is asked for n to the power of minus this as often (Zipf).", ge=0)] = 1.0
    base: Annotated[float, Knob("Share of the requests that name none.", unit="ratio", ge=0, le=1)] = 0.0

    def named(self, requests: Iterable[TrafficRequest], seed: int) -> Iterator[TrafficRequest]:
        """Yield the requests, each with its adapter, ``adapter-1`` the most popular; a session's turns share one.

        Cost: a session with turns to come has an entry in a dict.
        """
        rng = random.Random(f"adapters {seed}")
        sums = list(accumulate((number + 1) ** -self.skew for number in range(self.count)))
        sessions: dict[str, str | None] = {}
        for request in requests:
            session = request.session
            if session is not None and session in sessions:
                adapter = sessions[session]
            else:
                place = bisect_left(sums, rng.random() * sums[-1])
                adapter = None if rng.random() < self.base else f"adapter-{min(place, self.count - 1) + 1}"
                if session is not None:
                    sessions[session] = adapter
            yield msgspec.structs.replace(request, adapter=adapter)


ADAPTER_KINDS = {"adapters": AdapterMix}
