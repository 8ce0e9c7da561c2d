"""What do administrators want changed? Scaling and draining: wishes that go into the store, for supervisors to read.

Nothing is carried out here: a frontend knows what would make sense, and a supervisor does it. Whoever waits asks
GET /admin/desired how far it is.
"""

from typing import TypeVar

import msgspec
from aiohttp import web

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.frontend.context import CALLER, read_body, service_of
from penstock.frontend.errors import quoted, rejected
from penstock.frontend.models import json_response
from penstock.kernel.errors import OverloadedError
from penstock.kernel.values import Role, WorkerId
from penstock.runtime.changes import line_of
from penstock.runtime.peers import FRONTENDS
from penstock.runtime.wishes import (
    DESIRED,
    DRAINED,
    DRAINS,
    POOLS,
    RESTART,
    RESTARTED,
    ROLES,
    DrainReport,
    DrainWish,
    PoolReport,
    PoolWish,
    RestartReport,
    RestartWish,
    RoleWish,
    decode_all,
    put,
)

T = TypeVar("T")

TIMEOUT_MAX = 86_400.0


class ScaleBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/scale: pool -> replicas."""

    pools: dict[str, int]


class RestartBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/restart; ``force``: also where requests are refused meanwhile."""

    force: bool = False


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/drain: a worker or a frontend; ``timeout`` in seconds."""

    name: str
    timeout: float | None = None
    undo: bool = False


class FlipBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /admin/flip: a worker and its role; None is its pool's. ``timeout`` in seconds."""

    name: str
    role: Role | None = None
    timeout: float | None = None


async def flip(request: web.Request) -> web.Response:
    """POST /admin/flip: let a worker do something else for requests, once it has finished what it has."""
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
    if body.role in ("prefill", "decode") and card.handoff is None and card.engine != "sim":
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
            mine = next((pool for pool in pools.values() if any(r.id == card.id for r in pool.replicas)), None)
            becomes = card.role if mine is None else mine.role
            await store.delete(ROLES + body.name)
        else:
            wish = RoleWish(role=becomes, timeout=body.timeout, by=request[CALLER])
            await put(store, ROLES + body.name, wish)
    except StoreUnavailable as error:
        raise unavailable(error) from error
    note(request, f"flip {body.name}", card.role, becomes)
    return json_response({"name": body.name, "was": card.role, "becomes": becomes})


async def desired(request: web.Request) -> web.Response:
    """GET /admin/desired: what is wished, and how far it is."""
    store = store_of(request)
    try:
        pools = await pools_of(store)
        drains = decode_all(DrainWish, await store.list(DRAINS), DRAINS)
        reports = decode_all(DrainReport, await store.list(DRAINED), DRAINED)
        restarted = decode_all(RestartReport, await store.list(RESTARTED), RESTARTED).get("")
    except StoreUnavailable as error:
        raise unavailable(error) from error
    return json_response(
        {
            "pools": [
                {**msgspec.to_builtins(pool), "ready": pool.ready, "name": name} for name, pool in sorted(pools.items())
            ],
            "drains": {name: msgspec.to_builtins(wish) for name, wish in sorted(drains.items())},
            "drained": {name: msgspec.to_builtins(report) for name, report in sorted(reports.items())},
            "restart": None if restarted is None else msgspec.to_builtins(restarted),
        }
    )


async def scale(request: web.Request) -> web.Response:
    """POST /admin/scale: wish for numbers of replicas; all of them make sense, or none is wished."""
    store, body = store_of(request), await body_of(request, ScaleBody)
    if not body.pools:
        raise rejected('pools names no pool; send {"pools": {"main": 4}}', "pools")
    try:
        known = await pools_of(store)
        for name, replicas in body.pools.items():
            check_scale(known, name, replicas)
        drains = await store.list(DRAINS)
        wishes = {name: PoolWish(replicas=n, by=request[CALLER]) for name, n in body.pools.items()}
        for name, wish in wishes.items():
            await put(store, DESIRED + name, wish)
            for key in drains:
                if key.removeprefix(DRAINS).rpartition("-")[0] == name:
                    await store.delete(key)  # a drain is over with the next scaling, which counts what runs
    except StoreUnavailable as error:
        raise unavailable(error) from error
    for name, wish in wishes.items():
        note(request, f"scale {name}", known[name].desired, wish.replicas)
    return json_response(
        {
            "pools": {
                name: {"was": known[name].desired, "wanted": wish.replicas, "revision": wish.revision}
                for name, wish in wishes.items()
            }
        }
    )


async def drain(request: web.Request) -> web.Response:
    """POST /admin/drain: take a worker or a frontend out of service, or (``undo``) let it in again."""
    store, body = store_of(request), await body_of(request, DrainBody)
    check_timeout(body.timeout)
    try:
        if body.undo:
            name = frontend_name(body.name)
            if DRAINS + name not in await store.list(DRAINS):
                raise rejected(f"{body.name} is not drained", "name", code="not_drained", status=409)
            await store.delete(DRAINS + name)
            note(request, f"drain {name}", True, False)
            return json_response({"name": name, "undone": True})
        name, kind = await drainable(store, body.name)
        wish = DrainWish(timeout=body.timeout, by=request[CALLER])
        await put(store, DRAINS + name, wish)
    except StoreUnavailable as error:
        raise unavailable(error) from error
    note(request, f"drain {name}", False, True)
    return json_response({"name": name, "kind": kind, "revision": wish.revision})


async def restart(request: web.Request) -> web.Response:
    """POST /admin/restart: wish for every engine and every frontend to be replaced."""
    store, body = store_of(request), await body_of(request, RestartBody)
    wish = RestartWish(force=body.force, by=request[CALLER])
    try:
        await put(store, RESTART, wish)
    except StoreUnavailable as error:
        raise unavailable(error) from error
    note(request, "restart", None, wish.revision)
    return json_response({"revision": wish.revision})


# --- what makes sense -------------------------------------------------------------------------------------------------


def check_scale(known: dict[str, PoolReport], name: str, replicas: int) -> None:
    """Refuse a number of replicas that can't be.

    Raises:
        ClientError: 404 where there is no such pool, 400 where it can't have so many.
    """
    pool = known.get(name)
    if pool is None:
        listed = ", ".join(sorted(known)) or "none"
        raise rejected(f"there is no pool {name!r}; pools: {listed}", "pools", code="unknown_pool", status=404)
    if pool.kind == "urls":
        raise rejected(
            f"the servers of pool {name} are run by somebody else, so it can't be scaled; "
            f"'penstock drain {name}-0' takes one of them out",
            "pools",
            code="not_scalable",
        )
    most = pool.limit
    if replicas < 0 or (most is not None and replicas > most):
        reason = "" if most is None else f"0 to {most}"
        has = next((len(replica.gpus) for replica in pool.replicas if replica.gpus), 0)
        why = f" (each has {has} GPUs of its own, and there are no more)" if has and replicas > 0 else ""
        raise rejected(f"pool {name} takes {reason or '0 or more'} replicas, not {replicas}{why}", "pools")


async def drainable(store: Store, wished: str) -> tuple[str, str]:
    """Return the name of what is to be drained, and what it is: engine, server or frontend.

    Raises:
        ClientError: 404: there is no such; 409: it is the only frontend.
    """
    pools = await pools_of(store)
    for pool in pools.values():
        if any(replica.id == wished for replica in pool.replicas):
            return wished, "engine" if pool.kind == "process" else "server"
    frontends = {frontend_name(key.removeprefix(FRONTENDS)) for key in await store.list(FRONTENDS)}
    name = frontend_name(wished)
    if name not in frontends:
        workers = sorted(replica.id for pool in pools.values() for replica in pool.replicas)
        raise rejected(
            f"there is no worker or frontend {wished!r}; there are {', '.join([*workers, *sorted(frontends)])}",
            "name",
            code="unknown_worker",
            status=404,
        )
    drained = {key.removeprefix(DRAINS) for key in await store.list(DRAINS)}
    if not frontends - drained - {name}:
        raise rejected(
            f"{name} is the only frontend, so nobody would answer any more; 'penstock restart' replaces it",
            "name",
            code="only_frontend",
            status=409,
        )
    return name, "frontend"


def check_timeout(timeout: float | None) -> None:
    """Refuse a time that can't be.

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
    """Write down what was changed, and by whom."""
    service_of(request).changes.write(line_of(key, old, new, request[CALLER]))


async def pools_of(store: Store) -> dict[str, PoolReport]:
    """Return every pool as its supervisor last reported it."""
    return decode_all(PoolReport, await store.list(POOLS), POOLS)


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
        ClientError: 400: it is none, or has another shape.
    """
    raw = await read_body(request)
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise rejected(f"the body does not fit: {error}", code="invalid_body") from None


def unavailable(error: StoreUnavailable) -> OverloadedError:
    """Make the 503 for a store that does not work at present."""
    return OverloadedError(str(error), retry_after=1.0)
