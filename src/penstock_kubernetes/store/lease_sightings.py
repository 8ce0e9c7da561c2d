"""Lease sightings: which Leases of a Kubernetes store are alive, judged by this process's own clock.

A lease is alive until this process sees no renewal of it for a whole ttl; the time that its owner wrote does not count,
so clocks of hosts may differ. A lease that is new to this process is alive.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock_kubernetes.api.resource_watch import older

LONG_DEAD = 3.0
"""Times the ttl, at least, after which a lease that is not renewed is deleted: a slow owner has come back by then."""


class LeaseRenewal(NamedTuple):
    """A lease as the API server has it: ``version`` changes with each renewal, ``ttl`` is in seconds."""

    version: str
    ttl: float


@dataclass(slots=True)
class _LeaseState:
    renewal: LeaseRenewal
    at: float
    alive: bool = True


class LeaseSightings:
    """What this process knows of all leases of a cluster; ``monotonic`` is a clock in seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._leases: dict[str, _LeaseState] = {}
        self._long_dead = LONG_DEAD + secrets.randbelow(100) / 50
        """Up to two ttls later than others, so that not all processes delete a lease at once."""

    def see(self, lease: str, renewal: LeaseRenewal) -> bool:
        """Note a lease; return whether that makes it alive."""
        state = self._leases.get(lease)
        if state is not None and (state.renewal == renewal or older(renewal.version, state.renewal.version)):
            return False  # also what a watch tells late, after a list was newer
        self._leases[lease] = _LeaseState(renewal, self._monotonic())
        return state is None or not state.alive

    def vanish(self, lease: str) -> bool:
        """Note that a lease was deleted; return whether it was alive."""
        state = self._leases.pop(lease, None)
        return state is not None and state.alive

    def look(self, leases: Mapping[str, LeaseRenewal]) -> None:
        """Note all leases that there are now."""
        for lease in [lease for lease in self._leases if lease not in leases]:
            del self._leases[lease]
        for lease, renewal in leases.items():
            state = self._leases.get(lease)
            if state is None or state.renewal != renewal:
                self._leases[lease] = _LeaseState(renewal, self._monotonic())

    @property
    def newest(self) -> str | None:
        """The newest version of all leases: a list of before it is no news."""
        versions = (state.renewal.version for state in self._leases.values())
        return max(versions, key=lambda version: int(version) if version.isdigit() else 0, default=None)

    def is_known(self, lease: str) -> bool:
        """Return whether a lease was noted at all."""
        return lease in self._leases

    def is_alive(self, lease: str) -> bool:
        """Return whether a lease counts as alive."""
        state = self._leases.get(lease)
        return state is not None and state.alive

    def is_dead(self, lease: str, renewals: Mapping[str, LeaseRenewal]) -> bool:
        """Return whether a lease was ended by `judge`, and was not renewed since."""
        state = self._leases.get(lease)
        return state is not None and not state.alive and renewals.get(lease) == state.renewal

    def late(self) -> list[str]:
        """Return the leases that count as alive and were not renewed for their ttl."""
        now = self._monotonic()
        return [lease for lease, state in self._leases.items() if state.alive and now - state.at > state.renewal.ttl]

    def judge(self) -> list[str]:
        """End the leases that are late, once it is certain that no renewal was missed; return them."""
        late = self.late()
        for lease in late:
            self._leases[lease].alive = False
        return late

    def forgive(self) -> None:
        """Give live leases their whole ttl again: neither owners nor we could reach the API server."""
        now = self._monotonic()
        for state in self._leases.values():
            if state.alive:
                state.at = now

    def long_dead(self) -> dict[str, str]:
        """Return the leases to delete, each with its version."""
        now = self._monotonic()
        return {
            lease: state.renewal.version
            for lease, state in self._leases.items()
            if not state.alive and now - state.at > self._long_dead * state.renewal.ttl
        }

    def wait(self, longest: float) -> float:
        """Return the seconds until the next lease can be late."""
        now = self._monotonic()
        due = (state.at + state.renewal.ttl - now for state in self._leases.values() if state.alive)
        return max(0.05, min(longest, min(due, default=longest)))
