"""Desired-state connector: a planner writes its replica counts for `penstock up` as specs into the cluster's store.

The supervisor's reconciler does the rest: a worker to remove leaves the routers first, and is ended once it is idle.
A planner that runs elsewhere does the same through a frontend's admin routes.
"""

import logging
import ssl
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import aiohttp
import msgspec

from penstock.adapters.http_session import within
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.fleet.victims import to_flip
from penstock.kernel.errors import PenstockError
from penstock.kernel.plurals import counted
from penstock.kernel.values import Pool, Role
from penstock.planner.plugins.proposals import Flip, Reason
from penstock.runtime.cluster_state.desired_state import (
    DESIRED,
    PLANNER,
    POOLS,
    ROLES,
    PoolSpec,
    PoolStatus,
    RoleSpec,
    decode_all,
    put,
)
from penstock.runtime.cluster_state.fleet_api import DesiredState, FlipBody, Flipped, PoolsScaled, Problem, ScaleBody

log = logging.getLogger("penstock.planner")
T = TypeVar("T")
ADMIN_TIMEOUT = 10.0


class DesiredStateConnector:
    """A `penstock.adapters.connectors.scale_connector.ScaleConnector` over the store of a cluster.

    Args:
        patience: seconds that removed workers get to finish: as long as any request may take, so that none is cut.
        gpus: of a replica of a pool, by the config; for other pools what their supervisor reports counts.
    """

    def __init__(self, store: Store, *, patience: float | None = None, gpus: Mapping[str, int] | None = None) -> None:
        self._store = store
        self._gpus = gpus or {}
        self._patience = patience
        self._pools: dict[str, PoolStatus] = {}

    async def look(self) -> Mapping[str, Pool]:
        self._pools = decode_all(PoolStatus, await self._store.list(POOLS), POOLS)
        specs = decode_all(PoolSpec, await self._store.list(DESIRED), DESIRED)
        statuses = self._pools.items()
        return {name: pool_of_status(report, specs.get(name), self._gpus.get(name)) for name, report in statuses}

    async def scale(
        self, targets: Mapping[str, int], flips: Sequence[Flip], reasons: Sequence[Reason]
    ) -> dict[str, str]:
        problems = refusals(self._pools, targets)
        try:
            for name, replicas in targets.items():
                if name not in problems:
                    await put(
                        self._store, DESIRED + name, PoolSpec(replicas=replicas, timeout=self._patience, by=PLANNER)
                    )
            for worker, role in flipped(self._pools, flips):
                await put(self._store, ROLES + worker, RoleSpec(role=role, timeout=self._patience, by=PLANNER))
        except StoreUnavailable as error:
            log.warning("the desired state can't be written: %s", error)
            return {name: str(error) for name in targets}
        return problems

    def describe(self) -> str:
        return "penstock up, through its store"

    async def close(self) -> None:
        """Do nothing: the store's opener closes it."""


def pool_of_status(status: PoolStatus, spec: PoolSpec | None, gpus: int | None = None) -> Pool:
    """Return a pool as a planner's connector reports it.

    The spec counts as desired, not the supervisor's present target: a restart adds one replica for a while, which no
    operator or planner set. A pool that another party runs can have no more than it has.
    """
    pool = status.pool
    desired = pool.desired if spec is None else spec.replicas
    limit = pool.limit if status.kind == "process" else desired
    return msgspec.structs.replace(pool, desired=desired, gpus=gpus or pool.gpus, limit=limit)


def refusals(pools: Mapping[str, PoolStatus], targets: Mapping[str, int]) -> dict[str, str]:
    """Return why pools can't have as many replicas as they should, by pool; those that can are absent."""
    reasons = {name: _scaling_refusal(pools.get(name), replicas) for name, replicas in targets.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def flipped(pools: Mapping[str, PoolStatus], flips: Sequence[Flip]) -> Iterator[tuple[str, Role]]:
    """Yield the workers that change their role, and the role of each."""
    known = [status.pool for status in pools.values()]
    for flip in flips:
        for worker in to_flip(known, flip.model, flip.frm, flip.count):
            yield worker, flip.to


def _scaling_refusal(status: PoolStatus | None, replicas: int) -> str | None:
    """Return why a pool can't have so many replicas, or None where it can."""
    if status is None:
        return "its supervisor does not report it any more"
    if status.kind == "urls":
        return "its servers are run by another party, which alone can add and remove servers"
    if status.pool.limit is not None and replicas > status.pool.limit:
        return f"it can have at most {counted(status.pool.limit, 'replica')} on this machine, not {replicas}"
    return None


class AdminRefused(PenstockError):
    """The cluster does not answer, or refuses."""


class AdminApiConnector:
    """A `penstock.adapters.connectors.scale_connector.ScaleConnector` over a cluster's frontend.

    Args:
        url: of the frontend, or of its admin port.
        key: of an administrator; None where callers of this machine need none.
    """

    def __init__(self, url: str, key: str | None, tls: ssl.SSLContext | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._pools: dict[str, PoolStatus] = {}
        self._http = within(ADMIN_TIMEOUT, tls, headers)

    async def look(self) -> Mapping[str, Pool]:
        answer = await self._call("GET", "/admin/desired", None, DesiredState)
        self._pools = {
            each.name: PoolStatus(pool=each, kind=each.kind, revision=each.revision) for each in answer.pools
        }
        return {name: pool_of_status(report, None) for name, report in self._pools.items()}

    async def scale(
        self, targets: Mapping[str, int], flips: Sequence[Flip], reasons: Sequence[Reason]
    ) -> dict[str, str]:
        problems = refusals(self._pools, targets)
        for name, replicas in targets.items():
            if name not in problems:
                try:
                    await self._call("POST", "/admin/scale", ScaleBody({name: replicas}), PoolsScaled)
                except PenstockError as error:
                    problems[name] = str(error)
        for worker, role in flipped(self._pools, flips):
            try:
                await self._call("POST", "/admin/flip", FlipBody(worker, role), Flipped)
            except PenstockError as error:
                problems[worker] = str(error)
        return problems

    def describe(self) -> str:
        return f"the admin routes of {self._url}"

    async def close(self) -> None:
        await self._http.close()

    async def _call(self, method: str, path: str, body: msgspec.Struct | None, kind: type[T]) -> T:
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._http.session.request(method, self._url + path, data=data, allow_redirects=False) as answer:
                content = await answer.read()
                if answer.status == 200:
                    return msgspec.json.decode(content, type=kind)
                message = msgspec.json.decode(content, type=Problem).error.message
                raise AdminRefused(f"{self._url}{path} answers {answer.status}: {message}")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, msgspec.DecodeError) as error:
            raise AdminRefused(f"{self._url}{path} does not answer: {str(error) or type(error).__name__}") from error
