"""Is a port free to listen on?"""

import socket


def bind_error(host: str, port: int) -> str | None:
    """Return why an address can't be bound, or None where it can. Nothing stays bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None
