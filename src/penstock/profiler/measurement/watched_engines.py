"""Watched engines: those of a cluster, by its frontend's status, or the one at a URL."""

from typing import NamedTuple

import aiohttp
import msgspec

from penstock.adapters.engines.http.engine_http import EngineServer
from penstock.frontend.admin.cluster_status import ClusterStatus
from penstock.kernel.errors import ConfigError, EngineError
from penstock.kernel.values import WorkerCard
from penstock.profiler.measurement.measured_engines import attached_engine
from penstock.router.status_rows import WorkerStatus

STATUS = "/admin/status"


class WatchedEngine(NamedTuple):
    """An engine that is listened to. ``version``: as it says itself; None is unknown."""

    card: WorkerCard
    version: str | None


async def watched_engines(
    http: aiohttp.ClientSession, url: str, model: str | None, key: str | None, stats: str | None
) -> list[WatchedEngine]:
    """Return the engines behind a URL, all of one model, kind and version.

    Args:
        model: which one; None takes the only one. ``key``: of an administrator, where a frontend asks for one.
        stats: endpoint of the statistics plug-in of the engine at the URL; those of a cluster are known to it.
    Raises:
        EngineError: one can't be reached, or a cluster has none.
        ConfigError: they are not of one model, kind and version.
    """
    rows = await _workers(http, url.rstrip("/").removesuffix("/v1"), key)
    if rows is None:
        cards = [await attached_engine(http, url, model, "engine", stats)]
    else:
        rows = [row for row in rows if row.role != "encode" and model in (None, row.model)]
        if not rows:
            raise EngineError(f"the cluster at {url} has no engine" + (f" of {model}" if model else ""))
        cards = [await attached_engine(http, row.url, row.model, row.id, row.stats, row.labels) for row in rows]
    watched = []
    for card in cards:
        version = (await EngineServer(http, card.url).object("/version")).get("version")
        watched.append(WatchedEngine(card, version if isinstance(version, str) else None))
    for what, values in (
        ("models", {each.card.model for each in watched}),
        ("engines", {each.card.engine for each in watched}),
        ("versions", {each.version or "unknown" for each in watched}),
    ):
        if len(values) > 1:
            raise ConfigError(
                f"{url} has engines of {what} {', '.join(sorted(values))}, and a profile is of one",
                hint="name one by --model" if what == "models" else "give the URL of one engine",
            )
    return watched


async def _workers(http: aiohttp.ClientSession, base: str, key: str | None) -> list[WorkerStatus] | None:
    """Return the rows of a cluster's status; None where the server at the URL is no frontend."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        async with http.get(base + STATUS, headers=headers) as answer:
            if answer.status in (401, 403):
                raise ConfigError(f"{base}{STATUS} asks for a key", hint="give --admin-key, or PENSTOCK_ADMIN_KEY")
            if answer.status != 200:
                return None
            return msgspec.json.decode(await answer.read(), type=ClusterStatus).workers
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise EngineError(f"{base} can't be reached: {error}") from error
    except msgspec.DecodeError:
        return None
