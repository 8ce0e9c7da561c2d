"""Tests over the real NIXL: skipped by the name ``nixl`` where it is not installed."""

import importlib.util
import os

from tests.conftest import skip_or_fail


def needs_nixl() -> None:
    """Skip without the package, and keep UCX on this host: it looks for network cards otherwise."""
    if importlib.util.find_spec("nixl") is None:
        skip_or_fail("nixl", "it is not installed: pip install --no-deps nixl==1.5.0 nixl-cu12==1.5.0")
    os.environ.setdefault("UCX_TLS", "tcp,shm,self")
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
