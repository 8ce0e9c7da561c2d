"""`RouterMemory`: the router's state, as its snapshots have it."""

from typing import Literal

import msgspec

from penstock.kernel.machine import Nanos
from penstock.kernel.values import RequestId, Slo, Target
from penstock.router.model_pool import ModelPoolState
from penstock.router.routed_request import RoutedRequest
from penstock.router.settings import RouterSettings
from penstock.router.workers.roster import RosterState

Timer = Literal["deadline", "wait", "hedge", "kick", "sweep"]


class RouterMemory(msgspec.Struct):
    """All that a router has to know to go on: see `penstock.router.router_state.RouterState`."""

    name: str
    settings: RouterSettings
    slo: Slo
    rng: tuple[int, tuple[int, ...], float | None]
    roster: RosterState
    pools: dict[str, ModelPoolState]
    requests: dict[RequestId, RoutedRequest]
    waiting_for_worker: dict[RequestId, None]
    timers: list[tuple[Nanos, Timer, str]]
    armed: Nanos | None
    replays: dict[int, Target]
    replay_id: int
    dropped: int
    plugins_left_out: dict[str, str]
