"""Reads of objects: lists in pages, watches with bookmarks, and objects shown as tables."""

import base64
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec
from aiohttp import web

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.api.api_faults import ApiFaults
from tests.doubles.kubernetes.api.api_requests import ApiPath, flag, number, selection
from tests.doubles.kubernetes.api.object_writes import as_version
from tests.doubles.kubernetes.kinds.printer_tables import TABLE, table
from tests.doubles.kubernetes.kinds.resource_kinds import ResourceKind
from tests.doubles.kubernetes.objects.api_failures import ApiFailure, bad_request, future_version
from tests.doubles.kubernetes.objects.api_store import ApiStore, ObjectChange, key_of

WATCH_S = 3600
"""A watch without a limit of its own ends then, as a real server's does after half an hour to an hour."""


class ObjectReads:
    """Answers lists and watches from the store."""

    def __init__(self, store: ApiStore, faults: ApiFaults, now: Callable[[], float], bookmark_s: float) -> None:
        self._store = store
        self._faults = faults
        self._now = now
        self._bookmark_s = bookmark_s

    def shown(self, kind: ResourceKind, item: JsonObject, accept: str, query: Mapping[str, str]) -> JsonObject:
        """Return an object in the form that a client asks for."""
        if TABLE in accept:
            metadata = {"resourceVersion": item["metadata"].get("resourceVersion", "")}
            return table(kind, [item], self._now(), query.get("includeObject", "Metadata"), metadata)
        return item

    def page(self, kind: ResourceKind, path: ApiPath, accept: str, query: Mapping[str, str]) -> JsonObject:
        """Return a page of a list."""
        self._check_version(number(query, "resourceVersion"))
        limit, start, version = number(query, "limit"), ("", ""), self._faults.stale_version(path)
        if token := query.get("continue"):
            try:
                version, *rest = msgspec.json.decode(base64.urlsafe_b64decode(token), type=tuple[int, str, str])
            except (ValueError, msgspec.MsgspecError) as error:
                raise bad_request(f"continue key is not valid: {error}") from error
            start = (rest[0], rest[1])
        elif query.get("resourceVersionMatch") == "Exact":
            version = number(query, "resourceVersion")
        wanted = selection(query, kind.selectable)
        stored = self._store.items(kind.resource, path.namespace, version)
        items = [as_version(kind, each) for each in stored if key_of(each) > start]
        items = [each for each in items if wanted(each)]
        metadata: JsonObject = {"resourceVersion": str(version or self._store.version)}
        if limit and len(items) > limit:
            left, items = len(items) - limit, items[:limit]
            mark = msgspec.json.encode([version or self._store.version, *key_of(items[-1])])
            metadata |= {"continue": base64.urlsafe_b64encode(mark).decode(), "remainingItemCount": left}
        if TABLE in accept:
            return table(kind, items, self._now(), query.get("includeObject", "Metadata"), metadata)
        return self.list_of(kind, items, metadata)

    def _check_version(self, version: int | None) -> None:
        if version is not None and version > self._store.version:
            raise future_version(version, self._store.version)

    def list_of(self, kind: ResourceKind, items: list[JsonObject], metadata: JsonObject) -> JsonObject:
        """Return objects as a list of their kind."""
        metadata = {"resourceVersion": str(self._store.version)} | metadata
        items = [as_version(kind, each) for each in items]
        return {"apiVersion": kind.api_version, "kind": kind.list_kind, "metadata": metadata, "items": items}

    async def watch(self, request: web.Request, kind: ResourceKind, path: ApiPath) -> web.StreamResponse:
        """Stream what happens from a version on, until the client goes or the time is over."""
        query, accept = request.query, request.headers.get("Accept", "")
        wanted = selection(query, kind.selectable)
        initial = flag(query, "sendInitialEvents")
        version = number(query, "resourceVersion") or 0
        self._check_version(version)
        ends = time.monotonic() + (number(query, "timeoutSeconds") or WATCH_S)
        stream = _WatchStream(self, kind, accept, query)

        def inside(item: JsonObject | None) -> bool:
            return (
                item is not None
                and path.namespace in ("", key_of(item)[0])
                and path.name in ("", key_of(item)[1])
                and wanted(as_version(kind, item))
            )

        await stream.response.prepare(request)
        with suppress(ConnectionResetError), self._store.watcher(kind.resource) as watcher:
            if initial or version == 0:
                version = self._store.version
                for item in self._store.items(kind.resource, path.namespace):
                    if inside(item):
                        await stream.send("ADDED", as_version(kind, item))
                if initial:
                    await stream.bookmark(version, initial=True)
            marked = version
            while time.monotonic() < ends and not self._faults.take("drop-watch", "watch", path):
                try:
                    changes = self._store.changes_since(kind.resource, version)
                except ApiFailure as failure:
                    await stream.error(failure)
                    break
                for change in changes:
                    version = change.version
                    if event := event_of(change, inside):
                        await stream.send(event, as_version(kind, change.after or change.before or {}))
                if changes:
                    continue
                version = max(version, self._store.version)
                await watcher.wait(max(0.0, min(self._bookmark_s, ends - time.monotonic())))
                if version != marked and version == self._store.version:
                    await stream.bookmark(version)
                    marked = version
            await stream.response.write_eof()
        return stream.response


class _WatchStream:
    """Writes the events of one watch."""

    def __init__(self, reads: ObjectReads, kind: ResourceKind, accept: str, query: Mapping[str, str]) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": "application/json"})
        self._reads = reads
        self._kind = kind
        self._accept = accept
        self._query = query

    async def send(self, event: str, item: JsonObject) -> None:
        """Send one event, in the form that the client asks for."""
        await self._write(event, self._reads.shown(self._kind, item, self._accept, self._query))

    async def bookmark(self, version: int, *, initial: bool = False) -> None:
        """Tell the client, if it wants to know, up to which version it has everything."""
        if not flag(self._query, "allowWatchBookmarks"):
            return
        metadata: JsonObject = {"resourceVersion": str(version), "creationTimestamp": None}
        if initial:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        item: JsonObject = {"kind": self._kind.kind, "apiVersion": self._kind.api_version, "metadata": metadata}
        if TABLE in self._accept:
            item = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
            item |= {"columnDefinitions": None, "rows": []}
        await self._write("BOOKMARK", item)

    async def error(self, failure: ApiFailure) -> None:
        """Tell the client why the watch ends."""
        await self._write("ERROR", failure.status())

    async def _write(self, event: str, item: JsonObject) -> None:
        await self.response.write(msgspec.json.encode({"type": event, "object": item}) + b"\n")


def event_of(change: ObjectChange, inside: Callable[[JsonObject | None], bool]) -> str:
    """Return what a change is to a watch that selects: an object can enter and leave its selection."""
    before, after = inside(change.before), inside(change.after)
    return {(True, True): "MODIFIED", (False, True): "ADDED", (True, False): "DELETED"}.get((before, after), "")
