"""An engine's host that loses its network closes no connection: Envoy ends what waits for it, and goes on."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.doubles.kubernetes.kubelet.pod_network import PodNetwork
from tests.kubernetes.cluster_process import need_namespaces
from tests.kubernetes.picker.envoy import envoy_stand

pytestmark = pytest.mark.slow

ENGINE = """
import socket, threading, time
server = socket.create_server(("", 8000))
print("up", flush=True)
def serve(connection):
    while connection.recv(65536):
        print("asked", flush=True)
        time.sleep({pause})
        connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\n{{}}")
while True:
    threading.Thread(target=serve, args=server.accept()[:1], daemon=True).start()
"""


@pytest.mark.parametrize("when", ["while it computes", "before it is asked"])
async def test_a_request_on_a_host_that_is_gone_ends(when: str, tmp_path: Path) -> None:
    need_namespaces()
    computes = when == "while it computes"
    async with PodNetwork() as network:
        address = await network.attach("engine")
        script = ENGINE.format(pause=1000 if computes else 0)
        inside = ("nsenter", f"--net={network.namespace_of('engine')}", sys.executable, "-c", script)
        engine = await asyncio.create_subprocess_exec(*inside, stdout=asyncio.subprocess.PIPE)
        assert engine.stdout is not None
        try:
            assert await engine.stdout.readline() == b"up\n"
            async with envoy_stand(tmp_path, 1, extra=[f"{address}:8000"], fail_open=True) as stand:
                await stand.listener.close()  # now Envoy takes its engines in turn
                asked = [asyncio.create_task(stand.chat()) for _ in range(2)]
                assert await engine.stdout.readline() == b"asked\n"
                if not computes:  # the connection is kept, and the next request is sent on it
                    assert [(await each).status for each in asked] == [200, 200]
                await network.cut("engine", away=True)
                if not computes:
                    asked = [asyncio.create_task(stand.chat()) for _ in range(2)]
                async with asyncio.timeout(60):
                    assert sorted([(await each).status for each in asked]) == [200, 503]
        finally:
            engine.kill()
            await engine.wait()
