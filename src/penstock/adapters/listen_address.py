"""Listen address: binds sockets to a host and port, and says why one can't be bound."""

import errno
import os
import socket

from penstock.kernel.errors import bind_hint


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
