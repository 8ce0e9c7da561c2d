"""Fault switches of the simulated engine, for tests: stalls, errors, cut streams, lost or reordered KV events.

``POST /fault`` is there where the server was started with faults; it takes ``{"kind": ..., ...}``:

    stall             "seconds": the engine hangs for so long; requests wait and streams stop, /health still answers
    error_rate        "rate": share of new requests answered with 500
    refuse            "status", "count": answer the next requests with this status
    die_mid_stream    "tokens", "count": cut the connection of the next streams after so many tokens
    die               end the process at once, as a crash does
    drop_events       "count": the next KV messages are lost on the wire; the replay socket has them
    lose_events       "count": the next KV messages are lost for good; their numbers are used up
    reorder_events    "count": so many times, the next two KV messages are swapped
    repeat_events     "count": the next KV messages are sent twice
    unhealthy         "on": /health answers 503
    no_sleep          "on": /sleep answers 500; ``no_wake``: /wake_up does
    none              all faults off
"""

import random
from collections.abc import Sequence
from typing import Any

import zmq

from penstock.adapters.engines.kv_events.kv_event_codec import encode_batch
from penstock.adapters.engines.kv_events.kv_publisher import KvPublisher
from penstock.kernel.errors import ClientError
from penstock.kernel.values import JsonObject, KvEvent

KINDS = (
    "stall",
    "error_rate",
    "refuse",
    "die_mid_stream",
    "die",
    "drop_events",
    "lose_events",
    "reorder_events",
    "repeat_events",
    "unhealthy",
    "no_sleep",
    "no_wake",
    "none",
)


class Faults:
    """The faults that are on; those with a ``count`` run out."""

    def __init__(self, seed: int) -> None:
        self.error_rate = 0.0
        self.refusals = 0
        self.refusal_status = 503
        self.broken_streams = 0
        self.broken_after = 1
        self.unhealthy = False
        self.no_sleep = False
        self.no_wake = False
        self.stall = 0.0
        self.die = False
        self.events: dict[str, int] = dict.fromkeys(("drop", "lose", "reorder", "repeat"), 0)
        self._rng = random.Random(seed)

    def switch(self, body: Any) -> None:
        """Switch a fault on, or all off.

        Raises:
            ClientError: there is no such kind, or a number is not valid.
        """
        kind = body.get("kind") if isinstance(body, dict) else None
        if kind not in KINDS:
            raise ClientError(f"Unknown fault {kind!r}; there are {', '.join(KINDS)}.", param="kind")
        count = int(_number_in_body(body, "count", 1))
        if kind == "none":
            self.__init__(0)  # type: ignore[misc]
        elif kind == "stall":
            self.stall = _number_in_body(body, "seconds", 1)
        elif kind == "error_rate":
            self.error_rate = _number_in_body(body, "rate", 1)
        elif kind == "refuse":
            self.refusals, self.refusal_status = count, int(_number_in_body(body, "status", 503))
        elif kind == "die_mid_stream":
            self.broken_streams, self.broken_after = count, int(_number_in_body(body, "tokens", 1))
        elif kind == "die":
            self.die = True
        elif kind in ("no_sleep", "no_wake"):
            setattr(self, kind, body.get("on", True) is True)
        elif kind == "unhealthy":
            self.unhealthy = body.get("on", True) is not False
        else:
            self.events[kind.removesuffix("_events")] = count

    def refusal(self) -> int | None:
        """Return the status to refuse a new request with, or None."""
        if self.refusals > 0:
            self.refusals -= 1
            return self.refusal_status
        if self.error_rate and self._rng.uniform(0.0, 1.0) < self.error_rate:
            return 500
        return None

    def broken(self) -> int | None:
        """Return after how many tokens a new stream must break, or None."""
        if self.broken_streams <= 0:
            return None
        self.broken_streams -= 1
        return self.broken_after

    def spend(self, kind: str) -> bool:
        """Return whether the next KV message must have this fault, and count it."""
        if self.events[kind] <= 0:
            return False
        self.events[kind] -= 1
        return True


class FaultyPublisher(KvPublisher):
    """A publisher that loses, repeats and reorders messages as the fault switches demand."""

    def __init__(self, faults: Faults, **options: Any) -> None:
        super().__init__(**options)
        self._faults = faults
        self._delayed: list[tuple[bytes, bytes, bytes]] = []

    def publish(self, ts: float, events: Sequence[KvEvent]) -> int:
        faults = self._faults
        if not self._delayed and not any(faults.events.values()):
            return super().publish(ts, events)
        sequence = self.next_sequence
        self.next_sequence += 1
        number = sequence.to_bytes(8, "big")
        payload = encode_batch(ts, events, self._rank)
        if faults.spend("lose"):
            return sequence
        self._replay_buffer.append((number, payload))
        if faults.spend("drop"):
            return sequence
        message = (self._topic, number, payload)
        if not self._delayed and faults.spend("reorder"):
            self._delayed.append(message)
            return sequence
        for each in (message, *self._delayed, *((message,) if faults.spend("repeat") else ())):
            self._pub.send_multipart(each, zmq.NOBLOCK)
        self._delayed.clear()
        return sequence


def _number_in_body(body: JsonObject, name: str, default: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ClientError(f"{name} must be a number not below 0.", param=name)
    return float(value)
