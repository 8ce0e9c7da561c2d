"""Network of a cluster's pods: a bridge and a network namespace per pod, all of which end with this process.

A namespace lives as long as something holds it, and here only file descriptors of this process do: nothing is left
when it ends, however it ends. Of the 10.N.0.0/16 that the network takes, the lower half is for pods and the upper half
for Services; this machine answers for the latter itself.
"""

import asyncio
import ctypes
import os
import random
import threading
from collections.abc import Sequence

from penstock.kernel.errors import ConfigError

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
    await output_of(words, text)


async def output_of(words: Sequence[str], text: bytes | None = None) -> bytes:
    """Run a command and return its output; raise OSError where it fails."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe)
    output, errors = await process.communicate(text)
    if process.returncode:
        raise OSError(f"`{' '.join(words)}` failed: {errors.decode(errors='replace').strip()}")
    return output
