"""Network of pods: a namespace for each, and the addresses of Services that lead to them."""

import asyncio
import ctypes
import os
import random
import ssl
import threading
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import ClusterObjects, name_of
from tests.doubles.kubernetes.controllers.small_controllers import SERVICE_LABEL

CLONE_NEWNET = 0x40000000
FIRST, LAST = 64, 250
"""Second numbers of the networks to choose from: several doubles run beside each other on one machine."""


class PodNetwork:
    """Addresses and links of pods; use it as a context."""

    def __init__(self) -> None:
        self.number = 0
        self._bridge = -1
        self._pods: dict[str, int] = {}
        self._links: dict[str, str] = {}
        self._addresses = 0

    @property
    def services(self) -> str:
        """The addresses for Services."""
        return f"10.{self.number}.128.0/17"

    async def __aenter__(self) -> "PodNetwork":
        if os.geteuid() != 0:
            raise ConfigError("pods with networks of their own need root", hint="run it as root")
        numbers = list(range(FIRST, LAST))
        random.Random().shuffle(numbers)
        self._bridge = new_namespace()
        for number in numbers:
            if await self._claim(number):
                self.number = number
                break
        else:
            raise ConfigError("no network 10.N.0.0/16 is free", hint="`ip link` shows psk devices; end their processes")
        name = f"psk{self.number}"
        await command("ip", "addr", "add", f"10.{self.number}.0.1/17", "dev", name)
        await command("ip", "link", "set", name, "up")
        await command("ip", "route", "add", "local", self.services, "dev", name)
        await self._inside(self._bridge, "link add pods type bridge", "link set pods up")
        await self._inside(self._bridge, "link set host master pods", "link set host up")
        return self

    async def _claim(self, number: int) -> bool:
        """Take a network: the name of its device is there once on a machine."""
        try:
            path = self.path_of(self._bridge)
            device = ("ip", "link", "add", f"psk{number}", "type", "veth", "peer", "name", "host", "netns", path)
            await command(*device)
        except OSError as error:
            if "exists" in str(error):
                return False
            raise
        return True

    async def __aexit__(self, *_: object) -> None:
        for namespace in (*self._pods.values(), self._bridge):
            os.close(namespace)
        self._pods.clear()
        try:
            await command("ip", "link", "del", f"psk{self.number}")
        except OSError:
            pass  # the kernel took it away with its other end

    async def attach(self, pod: str) -> str:
        """Make a pod's namespace; return its address."""
        self._addresses += 1
        number, name = self._addresses, f"p{self._addresses}"
        address = f"10.{self.number}.{1 + number // 250}.{1 + number % 250}"
        namespace = self._pods[pod] = new_namespace()
        self._links[pod] = name
        path = self.path_of(namespace)
        link = f"link add {name} type veth peer name eth0 netns {path}"
        await self._inside(self._bridge, link, f"link set {name} master pods", f"link set {name} up")
        gateway = f"route add default via 10.{self.number}.0.1"
        up = ("link set lo up", f"addr add {address}/17 dev eth0", "link set eth0 up", gateway)
        await self._inside(namespace, *up)
        return address

    def detach(self, pod: str) -> None:
        """Drop a pod's namespace; its links go with the last process in it."""
        namespace = self._pods.pop(pod, None)
        self._links.pop(pod, None)
        if namespace is not None:
            os.close(namespace)

    async def cut(self, pod: str, *, away: bool) -> None:
        """Take a pod's network away, or give it back."""
        if pod in self._links:
            await self._inside(self._bridge, f"link set {self._links[pod]} {'down' if away else 'up'}")

    def namespace_of(self, pod: str) -> str:
        """Return the path of a pod's namespace."""
        return self.path_of(self._pods[pod])

    def path_of(self, namespace: int) -> str:
        """Return the path under which other processes open a namespace."""
        return f"/proc/{os.getpid()}/fd/{namespace}"

    async def _inside(self, namespace: int, *lines: str) -> None:
        await command(
            "nsenter", f"--net={self.path_of(namespace)}", "ip", "-batch", "-", text="\n".join(lines).encode()
        )


def new_namespace() -> int:
    """Return a descriptor of a new network namespace: a thread makes it, and ends in it."""
    made: list[int] = []
    failures: list[int] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            failures.append(ctypes.get_errno())
        else:
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if failures:
        raise OSError(failures[0], "no network namespace can be made: " + os.strerror(failures[0]))
    return made[0]


async def command(*words: str, text: bytes | None = None) -> None:
    """Run a command.

    Raises:
        OSError: it failed; the message is what it wrote.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe)
    _, errors = await process.communicate(text)
    if process.returncode:
        raise OSError(f"`{' '.join(words)}` failed: {errors.decode(errors='replace').strip()}")


CHUNK = 65536
CONNECT_S = 5.0
"""Seconds that a pod's address may take to answer a connection."""


class Backend(NamedTuple):
    """Where connections to a Service go."""

    host: str
    port: int


class ServiceProxy:
    """Listens at each Service's address and port while it has ready pods, and forwards connections to them in turn."""

    def __init__(self, objects: ClusterObjects, network: str, api: Backend, tls: ssl.SSLContext) -> None:
        self._objects = objects
        self._network = ip_network(network)
        self._api = api
        self._tls = tls
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
            back_reader, back_writer = await asyncio.open_connection(*backend)
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
