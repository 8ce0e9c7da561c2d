"""Fleet API: bodies and answers of the fleet routes, for frontends, the command line and a planner elsewhere."""

from typing import Annotated, Literal

import msgspec

from penstock.kernel.values import Pool, Role
from penstock.runtime.cluster_state.desired_state import DrainSpec, DrainStatus, RestartStatus

TIMEOUT_MAX = 86_400.0


def _schema_limit(**schema: int) -> msgspec.Meta:
    """Describe a limit that the route checks, with an error of its own."""
    return msgspec.Meta(extra_json_schema=schema)


Timeout = Annotated[float, _schema_limit(minimum=0, maximum=round(TIMEOUT_MAX))]
DrainKind = Literal["engine", "server", "frontend"]


class ScaleBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/scale: pool -> replicas."""

    pools: Annotated[dict[str, Annotated[int, _schema_limit(minimum=0)]], _schema_limit(minProperties=1)]


class RestartBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/restart; ``force``: also where requests are refused meanwhile."""

    force: bool = False


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/drain: a worker or a frontend; ``timeout`` in seconds."""

    name: str
    timeout: Timeout | None = None
    undo: bool = False


class FlipBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/flip: a worker and its role; None is its pool's. ``timeout`` in seconds."""

    name: str
    role: Role | None = None
    timeout: Timeout | None = None


class LoadAdapterBody(msgspec.Struct):
    """POST /v1/load_lora_adapter, as vLLM's: a name, and where the engines find the adapter.

    ``model``: that it adapts, where several take adapters.
    """

    lora_name: str
    lora_path: str
    model: str | None = None


class UnloadAdapterBody(msgspec.Struct):
    """POST /v1/unload_lora_adapter, as vLLM's."""

    lora_name: str


class AdapterWorkersBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/adapters: on how many workers an adapter is to be at any time; None is what the settings say."""

    name: str
    workers: Annotated[int, _schema_limit(minimum=0)] | None = None


class AdapterState(msgspec.Struct, frozen=True):
    """A LoRA adapter. ``workers``: those that hold it; ``loading``: those that load it now.

    ``wanted``: on how many workers it is to be at any time.
    """

    name: str
    model: str
    path: str
    workers: list[str]
    loading: list[str]
    wanted: int = 0


class AdapterList(msgspec.Struct, frozen=True):
    """Every LoRA adapter."""

    adapters: list[AdapterState]


class AdapterUnloaded(msgspec.Struct, frozen=True):
    """A LoRA adapter that is out of service. ``workers``: those that held it."""

    name: str
    model: str
    workers: list[str]


class DesiredPool(Pool, frozen=True, kw_only=True):
    """A pool by name. ``revision``: of the newest spec that was accepted; ``serving``: replicas that are ready."""

    name: str
    kind: Literal["process", "urls"]
    revision: str | None
    serving: int = msgspec.field(name="ready")


class DesiredState(msgspec.Struct, frozen=True):
    """Every pool, the drains, their progress by name, and that of a restart."""

    pools: list[DesiredPool]
    drains: dict[str, DrainSpec]
    drained: dict[str, DrainStatus]
    restart: RestartStatus | None


class PoolScaled(msgspec.Struct, frozen=True):
    """A pool's desired replicas before and now."""

    was: int
    wanted: int
    revision: str


class PoolsScaled(msgspec.Struct, frozen=True):
    """Every pool that POST /admin/scale named."""

    pools: dict[str, PoolScaled]


class DrainBegun(msgspec.Struct, frozen=True):
    """A worker or frontend that is to be drained."""

    name: str
    kind: DrainKind
    revision: str


class DrainUndone(msgspec.Struct, frozen=True):
    """A worker or frontend that is in service again."""

    name: str
    undone: Literal[True] = True


class Flipped(msgspec.Struct, frozen=True):
    """A worker's role before, and the one that it gets."""

    name: str
    was: Role
    becomes: Role


class RestartBegun(msgspec.Struct, frozen=True):
    """``revision``: of the restart, which its progress names."""

    revision: str


class WorkerCleared(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. ``reason``: why it has not cleared its cache, or is late to say so."""

    worker: str
    model: str
    url: str
    cleared: bool
    reason: str | msgspec.UnsetType = msgspec.UNSET


class CachesCleared(msgspec.Struct, frozen=True, kw_only=True):
    """Every engine, and how many of them did and did not."""

    cleared: int
    failed: int
    workers: list[WorkerCleared]


class ProblemFields(msgspec.Struct, frozen=True, kw_only=True):
    """``param``: the field at fault; ``code``: one word, or a number of the engine that made the error."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class Problem(msgspec.Struct, frozen=True):
    """The one shape of every error, OpenAI's."""

    error: ProblemFields
