"""Finds a free loopback port for an engine that cannot choose one by itself."""

import secrets
import socket
from pathlib import Path

LOWEST, FEWEST = 20_000, 4_000
"""The ports below it belong to services by convention; with fewer than so many to draw from, the system chooses."""
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The first and the last port that Linux gives to outgoing connections."""
TRIES = 100
"""Ports that are drawn before the system chooses: with half of them in use, all would be taken once in 10^30 times."""


def free_port() -> int:
    """Return a loopback port that is free at this moment and that no outgoing connection will be given.

    An engine binds it half a minute later, and vLLM waits for ever where it finds the port of its KV hand-offs taken.
    """
    highest = _below_outgoing()
    for _ in range(TRIES if highest - LOWEST >= FEWEST else 0):
        port = LOWEST + secrets.randbelow(highest - LOWEST)
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _below_outgoing() -> int:
    """Return the first port of outgoing connections, 0 where the system does not say it."""
    try:
        return int(OUTGOING.read_text().split()[0])
    except OSError:
        return 0
