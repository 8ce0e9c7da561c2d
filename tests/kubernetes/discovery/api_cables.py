"""Stores over an API server behind a cable that tests can cut, and owners in processes of their own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from penstock.config.settings.discovery_settings import KubernetesSettings
from penstock.kernel.secret import ClusterSecret
from penstock_kubernetes.api.api_client import open_client
from penstock_kubernetes.store.kubernetes_store import KubernetesStore
from tests.cable import Cable

OWNER = """
import asyncio, sys
from penstock_kubernetes.api.api_client import open_client
from penstock_kubernetes.store.kubernetes_store import KubernetesStore
from penstock.config.settings.discovery_settings import KubernetesSettings
from penstock.kernel.secret import ClusterSecret

async def main(cluster, secret, key, value, ttl):
    known = ClusterSecret(secret) if secret else None
    store = KubernetesStore(open_client(KubernetesSettings()), cluster, secret=known)
    await store.put(key, value.encode(), ttl=float(ttl))
    print("put", flush=True)
    await asyncio.sleep(120)

asyncio.run(main(*sys.argv[1:]))
"""


def through(kubeconfig: Path, port: int, folder: Path) -> Path:
    """Write a kubeconfig that goes by a port of this machine to the same API server."""
    config = yaml.safe_load(kubeconfig.read_text())
    for each in config["clusters"]:
        scheme = each["cluster"]["server"].partition(":")[0]
        each["cluster"] = {"server": f"{scheme}://127.0.0.1:{port}"}
        if scheme == "https":
            each["cluster"]["insecure-skip-tls-verify"] = True
    path = folder / "kubeconfig-by-cable"
    path.write_text(yaml.safe_dump(config))
    return path


class KubernetesHarness:
    """Handles on the store of one cluster; `fail` cuts the cable between them and the API server."""

    has_processes = True

    def __init__(self, cable: Cable, kubeconfig: Path, environment: Any, cluster: str, secret: str = "") -> None:
        self.cable = cable
        self.cluster = cluster
        self._direct, self._environment, self._secret = kubeconfig, environment, secret
        self._stores: list[KubernetesStore] = []
        self._children: list[subprocess.Popen[str]] = []

    def open(self, **more: Any) -> KubernetesStore:
        secret = ClusterSecret(self._secret) if self._secret else None
        store = KubernetesStore(open_client(KubernetesSettings()), self.cluster, secret=secret, **more)
        self._stores.append(store)
        return store

    def spawn_owner(self, key: str, value: str, ttl: float) -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [sys.executable, "-c", OWNER, self.cluster, self._secret, key, value, str(ttl)],
            stdout=subprocess.PIPE,
            text=True,
            env={**self._environment, "KUBECONFIG": str(self._direct)},
        )
        self._children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "put\n"
        return child

    def fail(self) -> None:
        self.cable.refusing = True
        self.cable.cut()

    def mend(self) -> None:
        self.cable.refusing = False

    async def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
        for store in self._stores:
            await store.close()
        await self.cable.close()
