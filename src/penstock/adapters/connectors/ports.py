"""Which port can an engine be given that has to be told one?"""

import socket


def free_port() -> int:
    """Return a loopback port that nobody has at this moment; an engine that finds it taken is started again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
