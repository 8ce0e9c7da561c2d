"""The doctor's look at ports: tries those of this machine's engines by an address that other machines have for it.

A stock engine trusts whoever reaches it: its HTTP, its KV events, its replay and NIXL's side channel ask for no name.
"""

import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from penstock.cli.doctor_checks.finding import Finding
from penstock.frontend.admin.admin_answers import ClusterStatus

LISTENING = "0A"
"""The state of a socket in /proc/net/tcp."""
PATIENCE = 0.5
"""Seconds for a connection to this machine itself."""


def check_open_ports(status: ClusterStatus) -> Iterator[Finding]:
    """Try the ports at which engines of this machine listen, by an address that other machines have for it."""
    here = {worker.id: (worker.pid, port) for worker in status.workers if (port := _local_port(worker.url)) is not None}
    if not here:
        return
    listening, children = _listening(), _children()
    for worker, (pid, port) in here.items():
        server = next((each for each, places in listening.items() if port in {number for _, number in places}), pid)
        processes = set() if server is None else set(_family(server, children))
        ports = {place for each in processes for place in listening.get(each, ())}
        outside = {(address, port) for address, port in ports if not ipaddress.ip_address(address).is_loopback}
        tried = sorted({port for address, port in outside if _opens(_outward(address), port)})
        if tried:
            yield Finding(
                "warning",
                "ports",
                f"{worker} can be reached from other machines at port {', '.join(map(str, tried))}",
                "bind them to 127.0.0.1, or have a firewall close them: docs/guides/security.md says what each allows",
            )
        elif ports:
            yield Finding("ok", "ports", f"{worker} listens for this machine alone")


def _local_port(url: str) -> int | None:
    """Return the port of a server of this machine; None for one of another."""
    parts = urlsplit(url)
    try:
        return parts.port if ipaddress.ip_address(parts.hostname or "").is_loopback else None
    except ValueError:
        return parts.port if parts.hostname == "localhost" else None


def _outward(bound: str) -> str | None:
    """Return an address by which others reach what is bound to one: that one, or for all of them this machine's own."""
    address = ipaddress.ip_address(bound)
    if not address.is_unspecified:
        return bound
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it asks the kernel for the way
        except OSError:
            return None
        own = str(probe.getsockname()[0])
    return None if ipaddress.ip_address(own).is_loopback else own


def _opens(address: str | None, port: int) -> bool:
    if address is None:
        return False
    try:
        socket.create_connection((address, port), PATIENCE).close()
    except OSError:
        return False
    return True


def _listening() -> dict[int, set[tuple[str, int]]]:
    """Return (address, port) of the TCP sockets at which processes listen, by ids of those that we may look at."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in _readable_text(Path("/proc/net") / table).splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                host, _, port = fields[1].partition(":")
                words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
                found[fields[9]] = (str(ipaddress.ip_address(b"".join(words))), int(port, 16))
    listening: dict[int, set[tuple[str, int]]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        for inode in found.keys() & set(_sockets(folder)):
            listening.setdefault(int(folder.name), set()).add(found[inode])
    return listening


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        fields = _readable_text(stat).rpartition(")")[2].split()
        if len(fields) > 1:
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return children


def _family(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    yield pid
    for child in children.get(pid, ()):
        yield from _family(child, children)


def _sockets(process: Path) -> Iterator[str]:
    """Yield the inodes of a process's sockets; none where this user may not look."""
    try:
        links = list((process / "fd").iterdir())
    except OSError:
        return
    for link in links:
        try:
            kind, _, inode = str(link.readlink()).partition(":[")
        except OSError:
            continue  # it is closed by now
        if kind == "socket":
            yield inode.rstrip("]")


def _readable_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
