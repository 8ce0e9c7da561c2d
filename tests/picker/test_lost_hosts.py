"""An engine's host that loses its network closes no connection: Envoy ends what waits for it, and goes on."""

import asyncio
import sys
from pathlib import Path

import pytest

from penstock.testing.kubernetes.kubelet.pod_network import PodNetwork
from tests.kubernetes.cluster_process import need_namespaces
from tests.picker.envoy import envoy_stand

pytestmark = pytest.mark.slow

SILENT = "import socket, time; s = socket.create_server(('', 8000)); print('up', flush=True); c = s.accept(); "
SILENT += "c[0].recv(1); print('asked', flush=True); time.sleep(1000)"


async def test_a_request_on_a_host_that_is_gone_ends(tmp_path: Path) -> None:
    need_namespaces()
    async with PodNetwork() as network:
        address = await network.attach("engine")
        inside = ("nsenter", f"--net={network.namespace_of('engine')}", sys.executable, "-c", SILENT)
        engine = await asyncio.create_subprocess_exec(*inside, stdout=asyncio.subprocess.PIPE)
        assert engine.stdout is not None
        try:
            assert await engine.stdout.readline() == b"up\n"
            async with envoy_stand(tmp_path, 1, extra=[f"{address}:8000"], fail_open=True) as stand:
                await stand.listener.close()  # now Envoy takes its engines in turn
                asked = [asyncio.create_task(stand.chat()) for _ in range(2)]
                assert await engine.stdout.readline() == b"asked\n"
                await network.cut("engine", away=True)
                async with asyncio.timeout(60):
                    assert sorted([(await each).status for each in asked]) == [200, 503]
        finally:
            engine.kill()
            await engine.wait()
