"""How does a test get several hosts on one machine? A network namespace for each, with a wire (veth) between two."""

import ctypes
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.conftest import skip_or_fail

_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


class Host:
    """A network namespace with an address of its own; it reaches nobody but the other end of its wire."""

    def __init__(self, name: str, address: str, device: str) -> None:
        self.name = name
        self.address = address
        self.device = device

    @property
    def words(self) -> list[str]:
        """What stands before a command line that runs there."""
        return ["ip", "netns", "exec", self.name]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let this thread's new sockets be of that host."""
        own = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            _setns(there)
            try:
                yield
            finally:
                _setns(own)
        finally:
            os.close(there)
            os.close(own)

    def unplug(self) -> None:
        """Take it off its wire: nothing arrives any more, and nobody is told."""
        _ip("-n", self.name, "link", "set", self.device, "down")

    def plug(self) -> None:
        _ip("-n", self.name, "link", "set", self.device, "up")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts with a wire between them; skip by the name ``netns`` where this user may not."""
    if os.geteuid() != 0:
        skip_or_fail("netns", "only root makes network namespaces")
    if shutil.which("ip") is None:
        skip_or_fail("netns", "there is no ip command (iproute2)")
    number = next(_numbers)
    names = [f"penstock-{os.getpid()}-{number}{end}" for end in "ab"]
    devices = [f"p{os.getpid() % 100_000}n{number}{end}" for end in "ab"]
    hosts = [Host(name, f"10.77.{number}.{n + 1}", device) for n, (name, device) in enumerate(zip(names, devices))]
    made: list[str] = []
    try:
        for name in names:
            failed = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
            if failed.returncode:
                skip_or_fail("netns", f"a network namespace can't be made: {failed.stderr.strip()}")
            made.append(name)
        a, b = hosts
        ends = ["type", "veth", "peer", "name", b.device, "netns", b.name]
        _ip("link", "add", a.device, "netns", a.name, *ends)
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.name, "link", "set", "lo", "up")
            host.plug()
        yield a, b
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _setns(handle: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def faketime(offset: str) -> list[str]:
    """Return what stands before a command line whose clock is off, such as ``+1h``."""
    program = shutil.which("faketime")
    if program is None:
        skip_or_fail("faketime", "there is no faketime command")
    # The command itself stays as a parent that signals would reach instead; what it preloads does the work.
    asked = [str(program), "-f", offset, "printenv", "LD_PRELOAD"]
    library = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    return ["env", f"LD_PRELOAD={library}", f"FAKETIME={offset}"]
