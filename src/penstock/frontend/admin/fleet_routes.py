"""Fleet routes for administrators: scale, drain, flip and restart write desired state into the store for supervisors.

Nothing is carried out here: a frontend checks what is possible, and a supervisor does it. GET /admin/desired shows the
progress.
"""

from typing import TypeVar

import msgspec
from aiohttp import web

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.http.request_context import CALLER, read_body
from penstock.frontend.openai.models import json_response
from penstock.frontend.service import service_of
from penstock.kernel.errors import OverloadedError
from penstock.kernel.values import WorkerId
from penstock.runtime.cluster_state.desired_state import (
    DESIRED,
    DRAINED,
    DRAINS,
    POOLS,
    RESTART,
    RESTARTED,
    ROLES,
    DrainSpec,
    DrainStatus,
    PoolSpec,
    PoolStatus,
    RestartSpec,
    RestartStatus,
    RoleSpec,
    decode_all,
    put,
)
from penstock.runtime.cluster_state.fleet_api import (
    TIMEOUT_MAX,
    DesiredState,
    DrainBegun,
    DrainBody,
    DrainKind,
    DrainUndone,
    FlipBody,
    Flipped,
    PoolScaled,
    PoolsScaled,
    RestartBegun,
    RestartBody,
    ScaleBody,
)
from penstock.runtime.cluster_state.placement_sync import FRONTENDS
from penstock.runtime.cluster_state.pool_statuses import desired_pools
from penstock.runtime.records.change_log import change_of

T = TypeVar("T")


async def flip(request: web.Request) -> web.Response:
    """POST /admin/flip: change a worker's role, once it has finished its requests."""
    store, body = store_of(request), await body_of(request, FlipBody)
    check_timeout(body.timeout)
    cards = {card.id: card for card in service_of(request).cluster.cards()}
    card = cards.get(WorkerId(body.name))
    if card is None:
        raise rejected(
            f"there is no worker {quoted(body.name)}; there are {', '.join(sorted(cards)) or 'none'}",
            "name",
            code="unknown_worker",
            status=404,
        )
    fixed = card.fixed_role and body.role not in (None, card.role)
    if fixed or (body.role in ("prefill", "decode") and card.handoff is None and card.engine != "sim"):
        raise rejected(
            f"{card.id} can't hand KV over or take it: its engine was not started for that",
            "role",
            code="no_handoff",
            status=409,
        )
    try:
        becomes = body.role
        if becomes is None:
            pools = await pools_of(store)
            mine = next((each.pool for each in pools.values() if card.id in each.pool.ids), None)
            becomes = card.role if mine is None else mine.role
            await store.delete(ROLES + body.name)
        else:
            spec = RoleSpec(role=becomes, timeout=body.timeout, by=request[CALLER])
            await put(store, ROLES + body.name, spec)
    except StoreUnavailable as error:
        raise unavailable(error) from error
    note(request, f"flip {body.name}", card.role, becomes)
    return json_response(Flipped(body.name, card.role, becomes))


async def desired(request: web.Request) -> web.Response:
    """GET /admin/desired: the desired state and the progress towards it."""
    store = store_of(request)
    try:
        pools = await pools_of(store)
        drains = decode_all(DrainSpec, await store.list(DRAINS), DRAINS)
        reports = decode_all(DrainStatus, await store.list(DRAINED), DRAINED)
        restarted = decode_all(RestartStatus, await store.list(RESTARTED), RESTARTED).get("")
    except StoreUnavailable as error:
        raise unavailable(error) from error
    progress = dict(sorted(drains.items())), dict(sorted(reports.items()))
    return json_response(DesiredState(desired_pools(pools), *progress, restarted))


async def scale(request: web.Request) -> web.Response:
    """POST /admin/scale: set desired replicas; either all of them are possible, or none is set."""
    store, body = store_of(request), await body_of(request, ScaleBody)
    if not body.pools:
        raise rejected('pools names no pool; send {"pools": {"main": 4}}', "pools")
    try:
        known = await pools_of(store)
        for name, replicas in body.pools.items():
            check_scale(known, name, replicas)
        drains = await store.list(DRAINS)
        specs = {name: PoolSpec(replicas=n, by=request[CALLER]) for name, n in body.pools.items()}
        for name, spec in specs.items():
            await put(store, DESIRED + name, spec)
            for key in drains:
                if key.removeprefix(DRAINS).rpartition("-")[0] == name:
                    await store.delete(key)  # a drain ends with the next scaling, which counts the running replicas
    except StoreUnavailable as error:
        raise unavailable(error) from error
    for name, spec in specs.items():
        note(request, f"scale {name}", known[name].pool.desired, spec.replicas)
    return json_response(
        PoolsScaled(
            {name: PoolScaled(known[name].pool.desired, spec.replicas, spec.revision) for name, spec in specs.items()}
        )
    )


async def drain(request: web.Request) -> web.Response:
    """POST /admin/drain: take a worker or a frontend out of service, or (``undo``) put it back."""
    store, body = store_of(request), await body_of(request, DrainBody)
    check_timeout(body.timeout)
    try:
        if body.undo:
            name = frontend_name(body.name)
            if DRAINS + name not in await store.list(DRAINS):
                raise rejected(f"{body.name} is not drained", "name", code="not_drained", status=409)
            await store.delete(DRAINS + name)
            note(request, f"drain {name}", True, False)
            return json_response(DrainUndone(name))
        name, kind = await drainable(store, body.name)
        spec = DrainSpec(timeout=body.timeout, by=request[CALLER])
        await put(store, DRAINS + name, spec)
    except StoreUnavailable as error:
        raise unavailable(error) from error
    note(request, f"drain {name}", False, True)
    return json_response(DrainBegun(name, kind, spec.revision))


async def restart(request: web.Request) -> web.Response:
    """POST /admin/restart: request the replacement of every engine and every frontend."""
    store, body = store_of(request), await body_of(request, RestartBody)
    spec = RestartSpec(force=body.force, by=request[CALLER])
    try:
        await put(store, RESTART, spec)
    except StoreUnavailable as error:
        raise unavailable(error) from error
    note(request, "restart", None, spec.revision)
    return json_response(RestartBegun(spec.revision))


# --- what makes sense -------------------------------------------------------------------------------------------------


def check_scale(known: dict[str, PoolStatus], name: str, replicas: int) -> None:
    """Refuse an impossible number of replicas.

    Raises:
        ClientError: 404 where there is no such pool, 400 where it can't have so many.
        OverloadedError: no pool is reported at present.
    """
    _reported(known)
    status = known.get(name)
    if status is None:
        listed = ", ".join(sorted(known)) or "none"
        raise rejected(f"there is no pool {name!r}; pools: {listed}", "pools", code="unknown_pool", status=404)
    if status.kind == "urls":
        raise rejected(
            f"the servers of pool {name} are run by another party, so it can't be scaled; "
            f"'penstock drain {name}-0' takes one of them out",
            "pools",
            code="not_scalable",
        )
    most = status.pool.limit
    if replicas < 0 or (most is not None and replicas > most):
        reason = "" if most is None else f"0 to {most}"
        has = next((len(replica.gpus) for replica in status.pool.replicas or () if replica.gpus), 0)
        why = f" (each has {has} GPUs of its own, and there are no more)" if has and replicas > 0 else ""
        raise rejected(f"pool {name} takes {reason or '0 or more'} replicas, not {replicas}{why}", "pools")


async def drainable(store: Store, target: str) -> tuple[str, DrainKind]:
    """Return the name of the worker or frontend to drain, and its kind: engine, server or frontend.

    Raises:
        ClientError: 404: it does not exist; 409: it is the only frontend.
        OverloadedError: no pool is reported at present.
    """
    pools = await pools_of(store)
    _reported(pools)
    for status in pools.values():
        if target in status.pool.ids:
            return target, "engine" if status.kind == "process" else "server"
    frontends = {frontend_name(key.removeprefix(FRONTENDS)) for key in await store.list(FRONTENDS)}
    name = frontend_name(target)
    if name not in frontends:
        workers = sorted(worker for status in pools.values() for worker in status.pool.ids)
        raise rejected(
            f"there is no worker or frontend {target!r}; there are {', '.join([*workers, *sorted(frontends)])}",
            "name",
            code="unknown_worker",
            status=404,
        )
    drained = {key.removeprefix(DRAINS) for key in await store.list(DRAINS)}
    if not frontends - drained - {name}:
        raise rejected(
            f"{name} is the only frontend, so no process would answer any more; 'penstock restart' replaces it",
            "name",
            code="only_frontend",
            status=409,
        )
    return name, "frontend"


def _reported(pools: dict[str, PoolStatus]) -> None:
    """Refuse to judge names while the store has no report of any pool: it was lost or replaced, or nobody supervises.

    Raises:
        OverloadedError: 503.
    """
    if not pools:
        raise OverloadedError(
            "the store has no supervisor's report of its pools at present, so which there are is unknown",
            hint="a supervisor that runs writes it again within a few seconds; 'penstock status' says more",
            retry_after=1.0,
        )


def check_timeout(timeout: float | None) -> None:
    """Refuse an impossible timeout.

    Raises:
        ClientError: 400.
    """
    if timeout is not None and not 0 <= timeout <= TIMEOUT_MAX:
        raise rejected(f"timeout is {timeout:g} s; it must be 0 to {TIMEOUT_MAX:g}", "timeout")


def frontend_name(name: str) -> str:
    """Return ``frontend-1`` for ``frontend-1-4711``: the pid changes with each restart. Other names stay."""
    parts = name.split("-")
    return "-".join(parts[:2]) if parts[0] == "frontend" and len(parts) == 3 else name


# --- parts ------------------------------------------------------------------------------------------------------------


def note(request: web.Request, key: str, old: object, new: object) -> None:
    """Record a change and the caller that made it."""
    service_of(request).changes.write(change_of(key, old, new, request[CALLER]))


async def pools_of(store: Store) -> dict[str, PoolStatus]:
    """Return every pool as its supervisor last reported it."""
    return decode_all(PoolStatus, await store.list(POOLS), POOLS)


def store_of(request: web.Request) -> Store:
    """Return the cluster's store.

    Raises:
        ClientError: 503: this frontend has none.
    """
    store = service_of(request).cluster.store
    if store is None:
        raise rejected("this frontend has no store, so nothing can be changed through it", code="no_store", status=503)
    return store


async def body_of(request: web.Request, kind: type[T]) -> T:
    """Read a request's JSON body.

    Raises:
        ClientError: 400: it is no JSON, or has another shape.
    """
    raw = await read_body(request)
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise rejected(f"the body does not fit: {error}", code="invalid_body") from None


def unavailable(error: StoreUnavailable) -> OverloadedError:
    """Make the 503 for a store that does not work at present."""
    return OverloadedError(str(error), retry_after=1.0)
