"""Services of a cluster as addresses of this machine: a forwarder to ready pods, and the names that pods resolve."""

import asyncio
import logging
import ssl
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import ClusterObjects, name_of
from tests.doubles.kubernetes.controllers.endpoints import SERVICE_LABEL

log = logging.getLogger(__name__)

CHUNK = 65536
CONNECT_S = 5.0
"""Seconds that a pod's address may take to answer a connection."""


class Backend(NamedTuple):
    """Where connections to a Service go."""

    host: str
    port: int


class ServiceProxy:
    """Listens at each Service's address and port while it has ready pods, and forwards connections to them in turn."""

    def __init__(
        self, objects: ClusterObjects, network: str, api: Backend, tls: ssl.SSLContext, api_tls: ssl.SSLContext | None
    ) -> None:
        self._objects = objects
        self._network = ip_network(network)
        self._api = api
        self._tls = tls
        self._api_tls = api_tls
        self._backends: dict[Backend, list[Backend]] = {}
        self._listeners: dict[Backend, asyncio.Server] = {}
        self._turns: dict[Backend, int] = {}

    async def reconcile(self) -> None:
        """Listen where there is something to forward to, and nowhere else."""
        wanted: dict[Backend, list[Backend]] = {}
        for service in self._objects.all("Service"):
            address = service["spec"].get("clusterIP") or "None"
            if address == "None" or ip_address(address) not in self._network:
                continue
            for port in service["spec"].get("ports") or ():
                backends = self._backends_of(service, port)
                if backends and (port.get("protocol") or "TCP") == "TCP":
                    wanted[Backend(address, port["port"])] = backends
        self._backends = wanted
        for place in self._listeners.keys() - wanted.keys():
            self._listeners.pop(place).close()
        for place in wanted.keys() - self._listeners.keys():
            tls = self._tls if wanted[place] == [self._api] else None
            with suppress(OSError):  # the address is another Service's that is just being removed: tried again
                self._listeners[place] = await asyncio.start_server(self._serve(place), *place, ssl=tls)

    def close(self) -> None:
        """Stop listening."""
        for listener in self._listeners.values():
            listener.close()

    def _backends_of(self, service: JsonObject, port: JsonObject) -> list[Backend]:
        if name_of(service) == ("default", "kubernetes"):
            return [self._api]
        backends = []
        for each in slices_of(self._objects, service):
            numbers = [p["port"] for p in each.get("ports") or () if (p.get("name") or "") == (port.get("name") or "")]
            backends += [Backend(address, number) for address in ready_addresses(each) for number in numbers]
        return sorted(backends)

    def _serve(self, place: Backend):  # type: ignore[no-untyped-def]
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError, TimeoutError):
                await self._forward(place, reader, writer)
            writer.close()

        return serve

    async def _forward(self, place: Backend, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        backends = self._backends.get(place)
        if not backends:
            return
        turn = self._turns[place] = self._turns.get(place, -1) + 1
        async with asyncio.timeout(CONNECT_S):
            backend = backends[turn % len(backends)]
            tls = self._api_tls if backend is self._api else None
            back_reader, back_writer = await asyncio.open_connection(*backend, ssl=tls)
        try:
            await asyncio.gather(_copy(reader, back_writer), _copy(back_reader, writer))
        finally:
            back_writer.close()

    # --- names --------------------------------------------------------------------------------------------------------

    def hosts(self, namespace: str) -> str:
        """Return the lines of a hosts file for pods of a namespace."""
        lines = []
        for service in sorted(self._objects.all("Service"), key=name_of):
            space, name = name_of(service)
            address = service["spec"].get("clusterIP")
            if not address:
                continue
            if address != "None":
                lines.append(f"{address} {_names(name, space, namespace)}")
                continue
            for each in slices_of(self._objects, service):
                for endpoint in each.get("endpoints") or ():
                    named = endpoint.get("hostname")
                    ready = (endpoint.get("conditions") or {}).get("ready")
                    names = [_names(name, space, namespace)] if ready else []
                    names += [_names(f"{named}.{name}", space, namespace)] if named and ready else []
                    lines += [f"{endpoint['addresses'][0]} {' '.join(names)}"] if names else []
        return "".join(f"{line}\n" for line in lines)


def slices_of(objects: ClusterObjects, service: JsonObject) -> Iterable[JsonObject]:
    """Return the EndpointSlices of a Service."""
    namespace, name = name_of(service)
    slices = objects.all("EndpointSlice", namespace)
    return [each for each in slices if (each["metadata"].get("labels") or {}).get(SERVICE_LABEL) == name]


def ready_addresses(endpoint_slice: JsonObject) -> list[str]:
    """Return the addresses of the ready endpoints."""
    endpoints = endpoint_slice.get("endpoints") or ()
    return [each["addresses"][0] for each in endpoints if (each.get("conditions") or {}).get("ready")]


def _names(name: str, space: str, namespace: str) -> str:
    own = [name] if space == namespace else []
    return " ".join([*own, f"{name}.{space}", f"{name}.{space}.svc", f"{name}.{space}.svc.cluster.local"])


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        else:  # TLS has no half that stays open
            writer.close()
    except OSError:
        writer.close()
