"""Finds a free loopback port for an engine that cannot choose one by itself."""

import socket


def free_port() -> int:
    """Return a loopback port that is free at this moment; an engine that finds it taken is started again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
