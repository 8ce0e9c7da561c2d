"""KVCR, Dynamo's KV Cache Runner, where its parts run on a CPU: an engine's memory to its own DRAM and back.

Needs only kvcr, nixl and numpy. ``deposit`` copies blocks out of the framework's memory, ``deliver`` brings them back;
both are one operation over all blocks, by NIXL within one process.
"""

import os
import socket
import time

os.environ.setdefault("UCX_TLS", "tcp,shm,self,cma")
os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")

import numpy as np
from child import serve
from kvcr import KVCR, KVCRBindings
from kvcr.config import KVCRBackendConfigs, KVCRConfig, LocalDramOptions
from kvcr.types import MemoryRef, RegionDescriptor
from sizes import TOTAL

OWN = "bench"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(block):
    """Time one deposit and one delivery of `TOTAL` bytes by a new KVCR."""
    count = TOTAL // block
    engine, pool = np.full(TOTAL, 7, np.uint8), np.full(TOTAL, 1, np.uint8)
    kvcr = KVCR(
        KVCRConfig(
            nixl_agent_name=OWN,
            pool_layouts=[("kv", block)],
            operation_timeout_ms=30000,
            abandon_timeout_ms=60000,
            nixl_listen_port=free_port(),
        ),
        KVCRBindings(request_pin=lambda keys: 1, poll_pin_results=list, release_pin=lambda handle: True),
        KVCRBackendConfigs(
            framework_regions=[RegionDescriptor(addr=engine.ctypes.data, count=count, size=block, label="kv")],
            local_dram=LocalDramOptions(pools=[("kv", pool.ctypes.data, TOTAL)]),
        ),
    )
    blocks = {
        number.to_bytes(16, "big"): [MemoryRef(end_point_name=OWN, label="kv", element_index=number)]
        for number in range(count)
    }
    seconds = {}
    try:
        for name in ("deposit", "deliver"):
            start = time.perf_counter()
            handle = getattr(kvcr, name)(blocks)
            results = None
            while results is None:
                results = next((result for each, result in kvcr.poll_completed() if each == handle), None)
            seconds[name] = time.perf_counter() - start
            bad = [result for result in results.values() if not result.success]
            if bad:
                raise SystemExit(f"KVCR: {len(bad)} of {count} blocks failed in {name}")
            if name == "deposit":
                engine[:] = 0
        if engine.min() != 7:
            raise SystemExit("KVCR delivered other bytes than were deposited")
    finally:
        kvcr.close()
    return {"seconds": seconds}


if __name__ == "__main__":
    serve({}, run)
