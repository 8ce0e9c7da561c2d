"""NIXL by itself: two processes over UCX, and files over POSIX with direct I/O. Needs only nixl and numpy.

usage: nixl_peer.py FOLDER; as a child of run.py
"""

import json
import mmap
import os
import socket
import subprocess
import sys
import time

os.environ.setdefault("UCX_TLS", "tcp,shm,self,cma")
os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")

import numpy as np
from child import serve
from nixl._api import nixl_agent, nixl_agent_config
from sizes import TOTAL


def wait(agent, handle, state):
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise SystemExit(f"NIXL says {state}")


def target():
    """The other process: has the memory, and polls, as an agent with a progress thread does."""
    agent = nixl_agent("target", nixl_agent_config(backends=["UCX"]))
    memory = np.resize(np.arange(251, dtype=np.uint8), TOTAL)
    agent.register_memory([(memory.ctypes.data, TOTAL, 0, "")], "DRAM", backends=["UCX"])
    print(json.dumps([memory.ctypes.data, agent.get_agent_metadata().hex()]), flush=True)
    sys.stdin.readline()


class Peer:
    def __init__(self, folder):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        line = next(line for line in self.process.stdout if line.startswith("["))
        self.there, metadata = json.loads(line)
        self.agent = nixl_agent("initiator", nixl_agent_config(backends=["UCX"]))
        self.agent.create_backend("POSIX", {})
        self.map = mmap.mmap(-1, TOTAL)
        self.memory = np.frombuffer(self.map, np.uint8)
        self.memory[:] = 1
        self.here = self.memory.ctypes.data
        self.agent.register_memory([(self.here, TOTAL, 0, "")], "DRAM")
        self.agent.add_remote_agent(bytes.fromhex(metadata))
        self.file = os.open(f"{folder}/nixl.bin", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.pwritev(self.file, [self.map], 0)
        self.agent.register_memory([(0, TOTAL, self.file, "")], "FILE", backends=["POSIX"])

    def run(self, what, direction, block):
        agent = self.agent
        here = agent.get_xfer_descs([(self.here + at, block, 0) for at in range(0, TOTAL, block)], "DRAM")
        if what == "dram":
            remote = [(self.there + at, block, 0) for at in range(0, TOTAL, block)]
            there, name, plugin = agent.get_xfer_descs(remote, "DRAM"), "target", "UCX"
        else:
            remote = [(at, block, self.file) for at in range(0, TOTAL, block)]
            there, name, plugin = agent.get_xfer_descs(remote, "FILE"), "initiator", "POSIX"
        # What can be prepared is not timed, with ours neither.
        handle = agent.initialize_xfer(direction.upper(), here, there, name, b"", backends=[plugin])
        start = time.perf_counter()
        wait(agent, handle, agent.transfer(handle))
        seconds = time.perf_counter() - start
        agent.release_xfer_handle(handle)
        return {"seconds": seconds}


if __name__ == "__main__":
    if sys.argv[1] == "target":
        target()
    else:
        peer = Peer(sys.argv[1])
        serve({"host": socket.gethostname()}, peer.run)
        peer.process.communicate("\n")
