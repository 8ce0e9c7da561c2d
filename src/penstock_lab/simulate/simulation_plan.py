"""`SimulationPlan`: pools of engines, their faults and the service level of a simulated run, as plain values."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from penstock.fleet.fleet_state import FleetTimes
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import HandoffProtocol, Role, Slo, WorkerId
from penstock.router.settings import RouterSettings
from penstock.router.stage_graph import FINAL
from penstock_lab.engine.settings import SimSettings
from penstock_lab.simulate.tiers.tier_plan import TierPlan

FaultKind = Literal["fail", "drain", "undrain", "add", "cordon", "uncordon", "flip", "restart"]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault of a worker, or an action of an operator, at second ``at`` of the run.

    ``fail`` ends it at once with all that it runs; ``drain`` lets it finish first, and ``undrain`` lets it come back;
    ``add`` starts one more in ``pool``; ``flip`` lets it finish and gives it ``role``; ``restart`` replaces all, one by
    one. A worker that failed is started again after ``restart`` seconds, in addition to its start-up time; unset is by
    the supervisor's back-off, and None leaves it dead.
    """

    at: float
    kind: FaultKind
    worker: WorkerId | None = None
    pool: str | None = None
    restart: float | msgspec.UnsetType | None = msgspec.UNSET
    role: Role | None = None

    @property
    def starts_again(self) -> "float | Literal['never'] | None":
        """When a worker that failed is started again: `penstock.fleet.events.Died`."""
        if self.restart is None:
            return "never"
        return self.restart if isinstance(self.restart, float) else None


class StartUp(msgspec.Struct, frozen=True, kw_only=True):
    """How long a worker takes until it serves, in seconds: lognormal around ``median``; ``sigma`` 0 is always that."""

    median: float = 0.0
    sigma: float = 0.0


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Engines of one kind. ``table``: arrays of its timing table, where it has one; ``gpus``: of one replica."""

    sim: SimSettings
    replicas: int
    gpus: int = 1
    role: Role = "aggregated"
    handoff: HandoffProtocol | None = "completed"
    table: Mapping[str, Any] | None = None
    cache: TierPlan = TierPlan()
    """Tiers below each engine's memory."""
    sleeping: int = 0
    """Replicas that sleep at most, in place of ending."""
    adapter_slots: int | None = None
    """LoRA adapters that each engine holds in memory; None loads none."""
    share_weights: bool = False
    """Whether a replica takes its weights from another one that serves, in ``sim.sibling_load_time``."""


class SimulationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``until``: seconds after which nothing more arrives; the run ends when all that arrived has ended."""

    model: str
    pools: Mapping[str, PoolPlan]
    router: RouterSettings
    seed: int = 0
    until: float | None = None
    faults: Sequence[Fault] = ()
    start_up: StartUp = StartUp()
    drain_timeout: float = FleetTimes().drain_timeout
    restart_backoff: float = FleetTimes().restart_backoff
    slo: Slo = Slo()
    """By which the router splits prefills, and policies and planners are told what was kept."""
    policy_interval: float = 30.0
    observe_every: float = 10.0
    """Seconds between two calls of the cluster's ``observe``, where one is given."""
    by_block: bool = False
    """Let engines and router keep every block by itself, as live ones do: the yardstick for runs of blocks; slow."""
    checked: bool = False
    """Let every machine check its invariants after each event: for tests, it is slow."""

    @property
    def single_blocks(self) -> bool:
        """Whether prompts are kept block by block: ``by_block``, or some pool has tiers, which leave holes in runs."""
        return self.by_block or any(pool.cache.host for pool in self.pools.values())

    @property
    def block_size(self) -> int:
        """Tokens per block, the same in every pool."""
        return next(iter(self.pools.values())).sim.block_size


def checked(plan: SimulationPlan) -> SimulationPlan:
    """Return the plan, or raise where it contradicts itself.

    Raises:
        ConfigError: pools differ in block size, or a fault names no pool or worker that it needs.
    """
    if not plan.pools:
        raise ConfigError(f"model {plan.model} has no pool to simulate", hint=f"give models.{plan.model}.pools one")
    roles = {pool.role for pool in plan.pools.values()}
    if not roles & FINAL:
        raise ConfigError(
            f"no pool of {plan.model} answers clients: their roles are {', '.join(sorted(roles))}",
            hint="add one of role decode or aggregated",
        )
    sizes = {name: pool.sim.block_size for name, pool in plan.pools.items()}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(f"the pools of {plan.model} have different block sizes: {told}", hint="give them one")
    for number, fault in enumerate(plan.faults):
        where = f"faults[{number}]"
        if not fault.at >= 0:
            raise ConfigError(f"{where}.at is {fault.at:g}", hint="seconds from the start of the run, 0 or later")
        if fault.kind == "add":
            if fault.pool is not None and fault.pool not in plan.pools:
                raise ConfigError(f"{where}.pool is {fault.pool!r}", hint=f"pools are {', '.join(plan.pools)}")
        elif fault.kind == "flip" and fault.role is None:
            raise ConfigError(f"{where}.role is missing", hint="flip needs one: aggregated, prefill or decode")
        elif fault.worker is None and fault.kind != "restart":
            raise ConfigError(f"{where}.worker is missing", hint=f"{fault.kind} needs a worker, such as main-0")
    return plan
