"""Listen address: binds sockets to a host and port, and says why one can't be bound; finds free ports for engines."""

import errno
import os
import secrets
import socket
from pathlib import Path

from penstock.kernel.errors import bind_hint

OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The first and the last port that Linux gives to outgoing connections."""
PORT_TRIES = 100
"""Ports that are drawn before the system chooses: with half of them in use, all would be taken once in 10^30 times."""


def bind_error(host: str, port: int) -> OSError | None:
    """Return why an address can't be bound, or None where it can. Nothing stays bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def listen_hint(listen: str, choose: str) -> str:
    """Return what to do about HOST:PORT that gRPC could not bind, since its own errors do not name a cause."""
    host, _, port = listen.rpartition(":")
    error = bind_error(host.strip("[]"), int(port) if port.isdigit() else 0)
    return choose if error is None else bind_hint(error, choose)


def bind(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Bind every address that a host name stands for, all on one port; they do not listen yet.

    Args:
        port: 0 lets the system choose.
        shared: other sockets of this user may be bound to the same port (SO_REUSEPORT).
    Raises:
        OSError: an address can't be bound.
    """
    sockets: list[socket.socket] = []
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            try:
                made = socket.socket(family, kind, protocol)
            except OSError:
                continue  # this machine has no such address family
            sockets.append(made)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            taken = port or (sockets[0].getsockname()[1] if len(sockets) > 1 else 0)
            made.bind((address[0], taken, *address[2:]))
            made.setblocking(False)
    except OSError:
        for made in sockets:
            made.close()
        raise
    if not sockets:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    return sockets


LOWEST_PORT, FEWEST_PORTS = 20_000, 4_000
"""The ports below it belong to services by convention; with fewer than so many to draw from, the system chooses."""


def free_port() -> int:
    """Return a loopback port that is free at this moment and that no outgoing connection will be given.

    An engine binds it half a minute later, and vLLM waits for ever where it finds the port of its KV hand-offs taken.
    """
    highest = _ports_below_outgoing()
    for _ in range(PORT_TRIES if highest - LOWEST_PORT >= FEWEST_PORTS else 0):
        port = LOWEST_PORT + secrets.randbelow(highest - LOWEST_PORT)
        if _is_free_port(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_free_port(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _ports_below_outgoing() -> int:
    """Return the first port of outgoing connections, 0 where the system does not say it."""
    try:
        return int(OUTGOING_PORTS.read_text().split()[0])
    except OSError:
        return 0
