"""Watch of Kubernetes resources that resumes: everything there is, then batches of changes."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from penstock.adapters.seams import StoreUnavailable
from penstock_kubernetes.api.api_client import PAUSES, ask, code_of, unavailable

if TYPE_CHECKING:
    from lightkube import AsyncClient

log = logging.getLogger(__name__)

WATCH_SECONDS = 240
"""Seconds after which the server ends a watch, and we make the next."""
_SILENCE = WATCH_SECONDS + 15.0
"""Seconds without a byte after which a watch's connection is dead: the server should have ended the watch by then."""
_PAGE = 500
"""Objects of one answer to a list: what kubectl asks for."""


class ResourceChange(NamedTuple):
    """One object that appeared or changed; ``object`` is None where it was deleted."""

    namespace: str
    name: str
    object: Any | None


Labels = Mapping[str, str] | str | None
"""Labels that objects have, or a label selector as kubectl takes it: ``app=vllm,tier in (a,b)``."""


async def follow(
    client: "AsyncClient",
    resource: Any,
    *,
    namespace: str | None = None,
    labels: Labels = None,
    fields: Mapping[str, str] | None = None,
) -> AsyncGenerator[list[ResourceChange], None]:
    """Yield first every object there is, then batches of changes as the API server tells them.

    A connection that breaks is made again from the last resourceVersion, which bookmarks keep fresh; where the server
    has forgotten that one (410), or has not come to it because it lags or was restored from a backup (504), everything
    is listed again, and only the differences are yielded.

    Args:
        resource: a class of lightkube's resources, or one of `create_namespaced_resource`.
        namespace: unset is the client's own; "*" is all of them.
    Raises:
        StoreUnavailable: the API server can't be read; call again to go on, with everything at first.
    """
    versions: dict[tuple[str, str], str] = {}
    version: str | None = None
    newest: str | None = None
    first = True
    while True:
        if version is None:
            objects, version = await list_all(
                client, resource, namespace=namespace, labels=labels, fields=fields, since=newest
            )
            changes = _differences(versions, objects)
            if changes or first:
                first = False
                yield changes
        try:
            stream = _watch_once(client, resource, namespace, labels, fields, version)
            async with aclosing(_batch_events(stream)) as batches:
                async for batch in batches:
                    version = batch[-1][1].metadata.resourceVersion or version
                    if changes := _applied(versions, batch):
                        yield changes
        except _Expired:
            log.info("the API server does not know where a watch of %s was: all is listed anew", resource.__name__)
            version, newest = None, version
        except _Broken as error:
            log.info("a watch of %s broke and is made again: %s", resource.__name__, error)


async def list_all(
    client: "AsyncClient",
    resource: Any,
    *,
    namespace: str | None = None,
    labels: Labels = None,
    fields: Mapping[str, str] | None = None,
    since: str | None = None,
) -> tuple[list[Any], str]:
    """Return every object and the resourceVersion of the list.

    Args:
        since: a resourceVersion that was seen already; a list of before it (of a server that lags) is asked again.
    Raises:
        StoreUnavailable: the API server can't be read, or lags for too long.
    """
    from lightkube import ApiError

    async def once() -> tuple[list[Any], str]:
        listing = client.list(
            resource,
            namespace=namespace,
            chunk_size=_PAGE,
            labels=_label_selector(labels),
            fields=dict(fields or {}) or None,
        )
        objects = [found async for found in listing]
        return objects, listing.resourceVersion

    for pause in (*PAUSES, None):
        try:
            objects, version = await ask(once)
            if since is None or not older(version, since):
                return objects, version
        except ApiError as error:
            if code_of(error) != 410 or pause is None:  # 410: its pages took too long, and it begins anew
                raise unavailable(error) from error
        if pause is not None:
            await asyncio.sleep(pause)
    raise StoreUnavailable(
        f"the API server answers with a list of {resource.__name__} that is older than what it said before",
        hint="nothing to do: it is read again",
    )


def older(version: str, than: str) -> bool:
    """Return whether a resourceVersion comes before another: both are numbers, which the API server counts up."""
    return version.isdigit() and than.isdigit() and int(version) < int(than)


# --- internals --------------------------------------------------------------------------------------------------------


class _Expired(Exception):
    """The server has forgotten the resourceVersion, or has not come to it."""


class _Broken(Exception):
    """A watch ended, and can be made again from where it was."""


async def _watch_once(
    client: "AsyncClient",
    resource: Any,
    namespace: str | None,
    labels: Labels,
    fields: Mapping[str, str] | None,
    version: str,
) -> AsyncGenerator[tuple[str, Any], None]:
    """Yield the events of one watch, bookmarks among them."""
    from httpx2 import HTTPError, Timeout
    from lightkube.core.generic_client import WatchDriver
    from lightkube.core.selector import build_selector

    # The public `watch` has no argument for bookmarks, without which a quiet watch is listed anew after each break, and
    # begins the next watch by itself at once.
    inner: Any = client._client
    request = inner.prepare_request(
        "list",
        res=resource,
        namespace=namespace,
        watch=True,
        params={
            "allowWatchBookmarks": "true",
            "timeoutSeconds": WATCH_SECONDS,
            "resourceVersion": version,
            "labelSelector": build_selector(_label_selector(labels) or {}) or None,
            "fieldSelector": build_selector(dict(fields or {}), for_fields=True) or None,
        },
    )
    driver: Any = cast(Any, WatchDriver)(request, inner._client.build_request)
    connected = False
    try:
        response = await inner.send(driver.get_request(timeout=Timeout(10.0, read=_SILENCE)), stream=True)
        try:
            if response.status_code >= 400:
                await response.aread()
                inner.raise_for_status(response)
            connected = True
            async for line in response.aiter_lines():
                yield driver.process_one_line(line)
        finally:
            await response.aclose()
    except (HTTPError, OSError) as error:
        code = code_of(error)
        if code == 410 or _too_large(error):
            raise _Expired from error
        if code in (401, 403, 404):
            raise unavailable(error) from error
        await asyncio.sleep(PAUSES[0])
        if not connected:
            await _reachable(client, resource, namespace)
        raise _Broken(str(error) or type(error).__name__) from error
    await asyncio.sleep(PAUSES[0])  # a server that ends each watch at once must not be asked without a pause


def _too_large(error: Exception) -> bool:
    """Return whether the server says that it has not come to the resourceVersion (a 504 with that cause)."""
    details = getattr(getattr(error, "status", None), "details", None)
    return any(cause.reason == "ResourceVersionTooLarge" for cause in getattr(details, "causes", None) or ())


async def _reachable(client: "AsyncClient", resource: Any, namespace: str | None) -> None:
    """Raise `StoreUnavailable` unless the server answers a small list."""
    from lightkube import ApiError

    async def once() -> None:
        async for _ in client.list(resource, namespace=namespace, chunk_size=1):
            break

    try:
        await ask(once)
    except ApiError as error:
        if code_of(error) != 410:
            raise unavailable(error) from error


async def _batch_events(events: AsyncGenerator[tuple[str, Any], None]) -> AsyncGenerator[list[tuple[str, Any]], None]:
    """Yield events that are there at the same time together."""

    async def following() -> tuple[str, Any]:
        async for event in events:
            return event
        raise _Broken("the server ended it")

    waiting = asyncio.ensure_future(following())
    try:
        while True:
            batch: list[tuple[str, Any]] = []
            await asyncio.wait({waiting})
            while waiting.done():
                if batch and waiting.exception() is not None:
                    break  # what came before it counts first
                batch.append(waiting.result())
                waiting = asyncio.ensure_future(following())
                await asyncio.sleep(0)
            yield batch
    finally:
        waiting.cancel()
        with suppress(asyncio.CancelledError, StoreUnavailable, _Broken, _Expired):
            await waiting
        await events.aclose()


def _applied(versions: dict[tuple[str, str], str], batch: list[tuple[str, Any]]) -> list[ResourceChange]:
    """Apply events to what is known; of several changes of an object the last one counts."""
    changes: dict[tuple[str, str], ResourceChange] = {}
    for kind, event in batch:
        if kind == "BOOKMARK":
            continue
        meta = event.metadata
        key = (meta.namespace or "", meta.name)
        if kind == "DELETED":
            versions.pop(key, None)
            changes[key] = ResourceChange(*key, None)
        elif versions.get(key) != meta.resourceVersion:
            versions[key] = meta.resourceVersion
            changes[key] = ResourceChange(*key, event)
    return list(changes.values())


def _differences(versions: dict[tuple[str, str], str], objects: list[Any]) -> list[ResourceChange]:
    """Return what changed up to a list, and remember the list."""
    now = {(found.metadata.namespace or "", found.metadata.name): found for found in objects}
    changes = [ResourceChange(*key, None) for key in versions if key not in now]
    changes += [
        ResourceChange(*key, found) for key, found in now.items() if versions.get(key) != found.metadata.resourceVersion
    ]
    versions.clear()
    versions.update({key: found.metadata.resourceVersion for key, found in now.items()})
    return changes


def _label_selector(labels: Labels) -> Any:
    """Return labels as lightkube takes them; a text is passed on as it is."""
    if not isinstance(labels, str):
        return dict(labels) if labels else None
    from lightkube.operators import Operator

    class Verbatim(Operator[str]):
        def encode(self, key: str) -> str:
            return self.value

    return [("", Verbatim("verbatim", "", labels))]
