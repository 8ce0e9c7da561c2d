"""Double of a whole cluster beside an API server: its controllers, its nodes and its network, in this process."""

import asyncio
import ssl
from ipaddress import ip_network
from pathlib import Path
from urllib.parse import urlsplit

from penstock.adapters.task_cancel import cancel_all
from tests.doubles.kubernetes.api.api_server import make_certificate
from tests.doubles.kubernetes.cluster_script import EVICT, LOST, NETWORK, SIGNAL, ClusterScript
from tests.doubles.kubernetes.controllers.cluster_objects import ClusterObjects
from tests.doubles.kubernetes.controllers.controller_loop import run_controllers
from tests.doubles.kubernetes.kubelet.kubelet import Kubelet
from tests.doubles.kubernetes.kubelet.pod_network import Backend, PodNetwork, ServiceProxy

ROOT = "kube-root-ca.crt"
"""ConfigMap in every namespace with the API server's certificate."""


class ClusterDouble:
    """A cluster that runs pods as processes: ``async with ClusterDouble(kubeconfig, folder, network)``.

    Logs lie in ``folder``/logs/NAMESPACE/POD/CONTAINER.log. All processes end with the context, and with this process
    however it ends. The methods make things fail on purpose; the same annotations do from outside.
    """

    def __init__(self, kubeconfig: Path, folder: Path, network: PodNetwork, script: ClusterScript) -> None:
        self.objects: ClusterObjects
        self._kubeconfig = kubeconfig
        self._folder = folder
        self._network = network
        self._script = script
        self._signals = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "ClusterDouble":
        from lightkube import AsyncClient, KubeConfig

        config = KubeConfig.from_file(self._kubeconfig).get()
        assert config is not None
        client = AsyncClient(config=config, trust_env=False)
        self.objects = await ClusterObjects(client).__aenter__()
        api = urlsplit(config.cluster.server)
        tls = await self._certificate(await self._publish())
        place = Backend(api.hostname or "127.0.0.1", api.port or 443)
        self._proxy = ServiceProxy(self.objects, self._network.services, place, tls)
        kubelet = Kubelet(self.objects, self._script, self._folder, self._network, self._proxy)
        controllers = run_controllers(self.objects, self._script, [self._hand_out_certificate])
        self._tasks = [asyncio.create_task(each) for each in (controllers, kubelet.run())]
        return self

    async def __aexit__(self, *error: object) -> None:
        await cancel_all(self._tasks)
        self._proxy.close()
        await self.objects.__aexit__(*error)

    async def annotate(self, kind: str, namespace: str, name: str, key: str, value: str | None) -> None:
        """Set an annotation of an object, or remove it.

        Raises:
            LookupError: there is no such object.
        """
        item = self.objects.get(kind, namespace, name)
        if item is None:
            raise LookupError(f"there is no {kind} {namespace}/{name}")
        await self.objects.merge(item, {"metadata": {"annotations": {key: value}}})

    async def evict(self, namespace: str, pod: str, message: str = "The node was low on resource: memory.") -> None:
        """Evict a pod as its kubelet does when its node runs short: it fails with the reason Evicted."""
        await self.annotate("Pod", namespace, pod, EVICT, message)

    async def send_signal(self, namespace: str, pod: str, signal: str) -> None:
        """Send a signal ("KILL", "STOP") to all containers of a pod."""
        self._signals += 1
        await self.annotate("Pod", namespace, pod, SIGNAL, f"{signal}:{self._signals}")

    async def cut_network(self, namespace: str, pod: str, *, away: bool = True) -> None:
        """Take a pod's network away, or give it back."""
        await self.annotate("Pod", namespace, pod, NETWORK, "cut" if away else None)

    async def lose_node(self, node: str, how: str | None = "off") -> None:
        """Lose a node: "off" ends its processes, "cut" only its network; None brings it back."""
        await self.annotate("Node", "", node, LOST, how)

    # --- what a cluster has from the start ----------------------------------------------------------------------------

    async def _publish(self) -> str:
        """Make the Service by which pods reach the API server; return its address."""
        address = str(ip_network(self._network.services)[1])
        spec = {"clusterIP": address, "ports": [{"name": "https", "port": 443, "protocol": "TCP"}]}
        metadata = {"name": "kubernetes", "namespace": "default"}
        if self.objects.get("Service", "default", "kubernetes") is None:
            await self.objects.create({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
        return address

    async def _certificate(self, address: str) -> ssl.SSLContext:
        """Make a certificate for that Service: clients in pods speak HTTPS with the API server."""
        folder = self._folder / "authority"
        folder.mkdir(parents=True, exist_ok=True)
        names = f"IP:{address},DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local"
        await make_certificate(folder / "ca.crt", folder / "key.pem", names)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "key.pem")
        return context

    async def _hand_out_certificate(self, objects: ClusterObjects) -> None:
        """Give every namespace the certificate of the API server."""
        authority = (self._folder / "authority" / "ca.crt").read_text()
        for each in objects.all("ConfigMap"):
            if each["metadata"]["name"] == ROOT and each.get("data") != {"ca.crt": authority}:
                await objects.merge(each, {"data": {"ca.crt": authority}})
