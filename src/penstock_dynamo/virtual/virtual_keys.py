"""Virtual keys: the four integers, as text in etcd, that a planner and an outside orchestrator share."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

PREFILL, DECODE = "num_prefill_workers", "num_decode_workers"
DECISION, SCALED = "decision_id", "scaled_decision_id"
NEVER = -1
"""Decision id before the first decision, and acknowledged id before the first acknowledgement."""


class VirtualKeys(Protocol):
    """Texts under one prefix: `penstock_dynamo.virtual.etcd_keys.EtcdKeys`."""

    name: str

    async def read(self) -> Mapping[str, str]: ...
    async def write(self, expected: Mapping[str, str | None], values: Mapping[str, str]) -> bool: ...
    async def close(self) -> None: ...


class VirtualCounts(NamedTuple):
    """The values of the keys; None: the key is absent, or is no number."""

    prefill: int | None
    decode: int | None
    decision: int
    scaled: int
    faults: tuple[str, ...] = ()
    """What is wrong with single values, in sentences."""

    @property
    def acknowledged(self) -> bool:
        """Whether the newest decision is acknowledged."""
        return self.scaled >= self.decision


def standing(values: Mapping[str, str]) -> VirtualCounts:
    """Read the keys. A value that is no number is reported in ``faults`` and counts as absent."""
    faults: list[str] = []

    def number(name: str, least: int) -> int | None:
        text = values.get(name)
        if text is None:
            return None
        try:
            value = int(text)
        except ValueError:
            faults.append(f"{name} is {text[:40]!r}, which is not a whole number")
            return None
        if value < least:
            faults.append(f"{name} is {value}, which is below {least}")
            return None
        return value

    prefill, decode = number(PREFILL, 0), number(DECODE, 0)
    decision, scaled = number(DECISION, NEVER), number(SCALED, NEVER)
    decision = NEVER if decision is None else decision
    scaled = NEVER if scaled is None else scaled
    if scaled > decision:
        faults.append(f"{SCALED} is {scaled}, but the newest decision is {decision}: that one was never issued")
    return VirtualCounts(prefill, decode, decision, scaled, tuple(faults))


def prefix_of(namespace: str) -> str:
    """Return what the keys of a namespace begin with."""
    return f"/{namespace.strip('/')}/planner/"
