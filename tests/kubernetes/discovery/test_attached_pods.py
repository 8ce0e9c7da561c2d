"""`penstock attach --selector` before pods that know nothing of us: they come, drain and vanish under load."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.config.settings.discovery_settings import KubernetesSettings
from penstock_kubernetes.api.api_client import open_client
from tests.kubernetes.conftest import RunningApi
from tests.kubernetes.discovery.test_pod_pool import Pods
from tests.live.cluster import served, until
from tests.live.test_etcd import LIMIT
from tests.live.test_operate import FAST, load, workers

pytestmark = pytest.mark.slow


def test_pods_join_drain_and_vanish_under_load(
    tmp_path: Path, entries: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    if entries.real:
        pytest.skip("a pod of a real cluster can't have the address of a process here")
    monkeypatch.setenv("KUBECONFIG", str(entries.kubeconfig))

    def at_api(do: Callable[[Pods], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            client = open_client(KubernetesSettings())
            try:
                await do(Pods(client, "stock"))
            finally:
                await client.close()

        asyncio.run(run())

    (tmp_path / "engines").mkdir()
    behind = ["up", "--frontend.port", "0", *FAST, "--set", "models.sim.pools.main.replicas=3"]
    with served(tmp_path / "engines", *behind) as engines:
        ports = [str(urlsplit(worker["url"]).port) for worker in workers(engines).values()]
        for name, port in zip("ab", ports):
            at_api(lambda pods, name=name, port=port: pods.create(name, "127.0.0.1", port=port))  # type: ignore[misc]
        attach = ["attach", "--selector", "app=stock", "--frontend.port", "0"]
        state = {"PENSTOCK_STATE_DIR": str(tmp_path / "attached")}
        with served(tmp_path, *attach, env=state) as front:
            until(lambda: set(workers(front)) == {"pods-0", "pods-1"}, LIMIT, lambda: front.text)
            with load(front, 4):
                at_api(lambda pods: pods.create("c", "127.0.0.1", port=ports[2]))
                until(lambda: set(workers(front)) == {"pods-0", "pods-1", "pods-2"}, LIMIT, lambda: front.text)
                at_api(lambda pods: pods.delete("a"))
                until(lambda: "pods-0" not in workers(front), LIMIT, lambda: front.text)
                at_api(lambda pods: pods.vanish("a"))
                at_api(lambda pods: pods.report("b", "127.0.0.1", ready=False))
                until(lambda: set(workers(front)) == {"pods-2"}, LIMIT, lambda: front.text)
                at_api(lambda pods: pods.report("b", "127.0.0.1", ready=True))
                until(lambda: len(workers(front)) == 2, LIMIT, lambda: front.text)
    for name in "bc":
        at_api(lambda pods, name=name: pods.vanish(name))  # type: ignore[misc]
