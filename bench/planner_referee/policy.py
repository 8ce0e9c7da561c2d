"""How does our planner decide in Dynamo's simulator? Its snapshots become our observations, our targets its decisions.

Imported by the peer's Python as well: it needs only our pure rooms. What the snapshot does not tell stays untold: no
arrivals to come, no single requests, no shapes, no word on who kept the service level, no start-up time.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.kernel.machine import Event, Wake, Woken, nanos
from penstock.kernel.values import EngineLimits, Pool, Role, Slo, StepStats, Traffic, WorkerId
from penstock.planner import events as planning
from penstock.planner.observation import EngineState, ModelState, Observation, PoolState
from penstock.planner.performance.speed_sources import KnownSpeeds
from penstock.planner.planner import Planner
from penstock.planner.policies import PolicyInputs, plugins_of
from penstock.planner.settings import BudgetSettings, PlannerMode, PlannerSettings, PolicyName, SloPolicySettings

MODEL = "model"
ROLES: Mapping[str, Mapping[str, Role]] = {
    "aggregated": {"decode": "aggregated"},
    "disaggregated": {"prefill": "prefill", "decode": "decode"},
}
"""Layout -> what the simulator calls a pool -> its role; engines that do everything it calls decode."""

Told = Mapping[str, Any]


class Fleet:
    """One pool's workers from tick to tick: the snapshot has ids and no ages, so those are kept here."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.desired: int | None = None
        """Workers that there should be; None until the first snapshot, which tells how many there are."""
        self._since: dict[int, float] = {}
        """Second in which each that does not serve yet was ordered."""
        self._served: set[int] = set()
        self._before: float | None = None
        """Second of the tick before, in which whatever is new now was ordered."""

    def look(self, told: Told, name: str, at: float, limits: EngineLimits[int]) -> PoolState:
        """Return what is to be seen of the pool at second ``at``."""
        active, starting = list(told[f"active_{name}_ids"]), list(told[f"starting_{name}_ids"])
        ordered = at if self._before is None else self._before
        for worker in (*starting, *active):
            if worker not in self._since and worker not in self._served:
                self._since[worker] = ordered
        if self._before is None:  # who is there from the beginning never started in our time
            self._served.update(active)
        came = [at - self._since[worker] for worker in active if worker not in self._served]
        self._served.update(active)
        self._since = {worker: since for worker, since in self._since.items() if worker in starting}
        self._before = at
        if self.desired is None:
            self.desired = len(active) + len(starting)
        return PoolState(
            pool=Pool(model=MODEL, role=self.role, desired=self.desired),
            ready=len(active),
            starting=tuple(sorted((at - since for since in self._since.values()), reverse=True)),
            draining=len(told[f"draining_{name}_ids"]),
            start_up_times=tuple(came),
            engines=_engines(told[f"{name}_fpm_snapshots"], active, self.role, limits),
        )


class Policy:
    """Our planner as a scaling policy of the peer's simulator.

    Args:
        planner: in whatever settings.
        layout: a key of `ROLES`.
        limits: of each engine.
    """

    def __init__(self, planner: Planner, layout: str, limits: EngineLimits[int]) -> None:
        self.planner = planner
        self.fleets = {name: Fleet(role) for name, role in ROLES[layout].items()}
        self._limits = limits
        self._isl = 0.0
        """Mean prompt as last told: the snapshot tells it of what was answered, and arrivals have only a number."""
        self._wake: float | None = None

    def initial_tick_ms(self) -> float:
        """Return when the first tick is due."""
        return self.planner.settings.base * 1e3

    def on_tick(self, told: Told) -> dict[str, float | int | None]:
        """Return the targets for a snapshot and when the next is wanted."""
        at = float(told["now_ms"]) / 1e3
        targets: dict[str, int] = {}
        seen = self._see(told, at)
        # Never re-entrantly: what the planner said of an event is carried out before it hears of the next.
        events: deque[Event] = deque([Woken()])
        while events:
            for effect in self.planner.handle(nanos(at), events.popleft()):
                match effect:
                    case Wake():
                        self._wake = effect.at / 1e9
                    case planning.Observe():
                        events.append(planning.Observed(id=effect.id, observation=seen))
                    case planning.Scale():
                        targets.update(effect.targets)
                        events.append(planning.Scaled(id=effect.id))
        for name, count in targets.items():
            self.fleets[name].desired = count
        return {
            "target_prefill": targets.get("prefill"),
            "target_decode": targets.get("decode"),
            "next_tick_ms": None if self._wake is None else self._wake * 1e3,
        }

    def _see(self, told: Told, at: float) -> Observation:
        pools = {name: fleet.look(told, name, at, self._limits) for name, fleet in self.fleets.items()}
        traffic = told.get("traffic")
        window = self.planner.settings.base if traffic is None else float(traffic["duration_s"])
        seen = ModelState(traffic=None if traffic is None else self._traffic(traffic), pools=pools, queued=None)
        return Observation(at=at, window=window, models={MODEL: seen})

    def _traffic(self, told: Told) -> Traffic:
        """Return a window's traffic: ``num_req`` counts arrivals, the means are of answers."""
        answered = round(told.get("shape_count", told["num_req"]))
        if answered:
            self._isl = float(told["avg_isl"])
        arrived = round(told["num_req"])
        ttfts, itls = round(told.get("ttft_count", answered)), round(told.get("itl_count", answered))
        return Traffic(
            seconds=float(told["duration_s"]),
            arrived=arrived,
            prompt_tokens=round(arrived * self._isl),
            answered=answered,
            answered_prompt_tokens=round(answered * float(told["avg_isl"])),
            output_tokens=round(answered * float(told["avg_osl"])),
            ttft_sum=ttfts * float(told["avg_ttft_ms"]) / 1e3,
            ttft_count=ttfts,
            itl_sum=itls * float(told["avg_itl_ms"]) / 1e3,
            itl_count=itls,
        )


class Watched:
    """A scaling policy, whoever's, of which is counted what it does and how long it takes."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._last: dict[str, tuple[int, int]] = {}
        self.ticks = self.changes = self.turns = 0
        self.seconds = 0.0

    def initial_tick_ms(self) -> float:
        return float(self._policy.initial_tick_ms())

    def on_tick(self, told: dict[str, Any]) -> dict[str, Any]:
        """Let the policy decide; count changes of the wanted number and changes of direction."""
        started = time.perf_counter()
        said: dict[str, Any] = self._policy.on_tick(told)
        self.seconds += time.perf_counter() - started
        self.ticks += 1
        for name in ("prefill", "decode"):
            now, wanted = told[f"non_draining_{name}_count"], said.get(f"target_{name}")
            if wanted is None or wanted == now:
                continue
            direction = 1 if wanted > now else -1
            _, before = self._last.get(name, (now, 0))
            self.changes += 1
            self.turns += before == -direction
            self._last[name] = (wanted, direction)
        return said


def planner_of(
    layout: str,
    known: KnownSpeeds,
    *,
    ttft: float,
    itl: float,
    gpus: int,
    miss_cost: float | None = None,
    hold: float | None = None,
    policy: PolicyName = "slo",
) -> Planner:
    """Return our planner, at its defaults but for what is named.

    Args:
        known: the profile that the peer's planner is given too.
        ttft, itl: the service level in seconds; ``gpus``: the ceiling.
    """
    own = SloPolicySettings()
    slo = SloPolicySettings(
        miss_cost=own.miss_cost if miss_cost is None else miss_cost,
        hold=own.hold if hold is None else hold,
    )
    mode: PlannerMode = "aggregated" if layout == "aggregated" else "disaggregated"
    settings = PlannerSettings(
        enabled=True,
        mode=mode,
        policy=policy,
        slo=slo,
        budget=BudgetSettings(max_gpus=gpus),
    )
    inputs = PolicyInputs(slo=Slo(ttft=ttft, itl=itl), speeds={"": dict.fromkeys(ROLES[layout].values(), known)})
    return Planner(settings, plugins_of(settings, inputs), strict=True)


def _engines(
    snapshots: Sequence[Told], active: Sequence[int], role: Role, limits: EngineLimits[int]
) -> tuple[EngineState, ...]:
    """Return the engines that serve; a snapshot is of an engine's newest pass, and one that did none has no news."""
    by_worker = {int(each["worker_id"]): each for each in snapshots}
    return tuple(_engine(worker, by_worker.get(worker), role, limits) for worker in active)


def _engine(worker: int, told: Told | None, role: Role, limits: EngineLimits[int]) -> EngineState:
    seen = EngineState(
        worker=WorkerId(str(worker)),
        role=role,
        limits=limits,
    )
    if told is None:
        return seen
    steps = StepStats(
        passes=1,
        wall=float(told["wall_time"]),
        prefill_tokens=int(told["sum_prefill_tokens"]),
        prefill_requests=int(told["num_prefill_requests"]),
        decode_seqs=int(told["num_decode_requests"]),
        decode_kv=int(told["sum_decode_kv_tokens"]),
    )
    return msgspec.structs.replace(
        seen,
        steps=steps,
        running=int(told["num_prefill_requests"]) + int(told["num_decode_requests"]),
        waiting=int(told["num_queued_prefill"]) + int(told["num_queued_decode"]),
        queued_prefill_tokens=int(told["sum_queued_prefill_tokens"]),
        queued_decode_kv=int(told["sum_queued_decode_kv_tokens"]),
        decode_kv=int(told["sum_decode_kv_tokens"]),
    )
