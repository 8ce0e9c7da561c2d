"""Port forward: talks to a frontend of a PenstockCluster through the API server, with a kubeconfig's login.

Each request takes a WebSocket of its own to ``pods/NAME/portforward``: every message starts with the number of its
channel, 0 for data and 1 for errors, and the first one of each channel is the port.
"""

import base64
import http.client
import io
import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from penstock.cli.shared.admin_client import AdminClient, ClusterUnreachable
from penstock.kernel.errors import ConfigError

CHANNELS = "v4.channel.k8s.io"
DATA, ERROR = 0, 1
CHUNK = 64 << 10


class PodClient(AdminClient):
    """The admin routes of one PenstockCluster; the operator put their key into a Secret.

    Args:
        context: of the kubeconfig; None is the current one.
        namespace: None is the context's own.
        name: None is the only one there.
    """

    def __init__(self, context: str | None, namespace: str | None, name: str | None) -> None:
        try:
            from lightkube import Client, KubeConfig
            from lightkube.core.exceptions import ConfigError as LoginError
        except ImportError as error:
            hint = "pip install 'penstock[kubernetes]'"
            raise ConfigError("Kubernetes needs the package lightkube", hint=hint) from error
        try:
            self._api = Client(config=KubeConfig.from_env().get(context), namespace=namespace)
        except (LoginError, OSError) as error:
            hint = "kubectl config get-contexts lists those of your kubeconfig"
            raise ConfigError(f"there is no login at a Kubernetes API server: {error}", hint=hint) from error
        self._port = 0
        pod, key = self._resolved(name)
        self._path = f"/api/v1/namespaces/{self._api.namespace}/pods/{pod}/portforward"
        super().__init__(f"http://{pod}:{self._port}", key)

    def _resolved(self, name: str | None) -> tuple[str, str]:
        """Return a ready frontend's pod, and the admin key."""
        from httpx2 import HTTPError
        from lightkube import ApiError
        from lightkube.resources.core_v1 import Pod, Secret

        from penstock_kubernetes.operator.cluster_crd import cluster_resource
        from penstock_kubernetes.operator.engine_pod import lack_of
        from penstock_kubernetes.operator.object_names import object_name, selector
        from penstock_kubernetes.operator.pod_template import ADMIN_KEY

        namespace = self._api.namespace
        try:
            if name is None:
                names = [each.metadata.name for each in self._api.list(cluster_resource()) if each.metadata]
                if len(names) != 1:
                    there = ", ".join(map(str, names)) or "none"
                    raise ConfigError(f"name one of the PenstockClusters of namespace {namespace}: there is {there}")
                name = str(names[0])
            data = self._api.get(Secret, object_name(name, "secret")).data or {}
            pods = [
                pod.to_dict() for pod in self._api.list(Pod, namespace=namespace, labels={**selector(name, "frontend")})
            ]
        except ApiError as error:
            text = f"PenstockCluster {namespace}/{name or ''} can't be looked up: {error.status.message}"
            raise ClusterUnreachable(text, hint="is it there, and may you read its Secret and its pods?") from error
        except HTTPError as error:
            raise ClusterUnreachable(f"the API server can't be reached: {error}", reason=str(error)) from error
        ready = [pod for pod in pods if lack_of(pod) is None and not pod["metadata"].get("deletionTimestamp")]
        if not ready:
            reasons = "; ".join(f"{pod['metadata']['name']}: {lack_of(pod)}" for pod in pods) or "it has no frontends"
            hint = f"kubectl describe penstock {name} says more"
            raise ClusterUnreachable(f"no frontend of {namespace}/{name} takes requests: {reasons}", hint=hint)
        self._port = int(ready[0]["spec"]["containers"][0]["ports"][0]["containerPort"])
        return str(ready[0]["metadata"]["name"]), base64.b64decode(data.get(ADMIN_KEY, "")).decode()

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Any = None, more: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        headers = {"accept": "application/json", "host": "localhost", "connection": "close", **(more or {})}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        content = b""
        if body is not None:
            content, headers["content-type"] = msgspec.json.encode(body), "application/json"
        headers["content-length"] = str(len(content))
        lines = [f"{method} {path} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items()), "", ""]
        answer = http.client.HTTPResponse(_Received(self._exchanged("\r\n".join(lines).encode() + content)))  # type: ignore[arg-type]
        try:
            answer.begin()
        except http.client.HTTPException as error:
            raise ClusterUnreachable(f"{self.url} broke off its answer", reason=str(error)) from error
        self.date = answer.getheader("date")
        yield answer

    def _exchanged(self, request: bytes) -> bytes:
        """Send a request, and return all that comes back."""
        from httpx2 import HTTPError
        from httpx2.websockets import HTTPXWSException, WebSocketDisconnect

        received, opened = bytearray(), set()
        http_client = self._api._client._client
        try:
            with http_client.websocket(self._path, subprotocols=[CHANNELS], params={"ports": self._port}) as socket:
                for start in range(0, len(request), CHUNK):
                    socket.send_bytes(bytes([DATA]) + request[start : start + CHUNK])
                while not _complete(received):
                    message = socket.receive_bytes(timeout=self.timeout)
                    channel, content = message[0], message[1:]
                    if channel not in opened:
                        opened.add(channel)  # the port, which we know
                    elif channel == ERROR and content:
                        why = content.decode(errors="replace")
                        raise ClusterUnreachable(f"{self.url} can't be reached through the API server: {why}")
                    elif channel == DATA:
                        received += content
        except WebSocketDisconnect:
            pass  # the frontend has closed its end
        except queue.Empty as error:
            raise ClusterUnreachable(f"{self.url} did not answer within {self.timeout:g} s") from error
        except (HTTPXWSException, HTTPError) as error:
            hint = "the right to create pods/portforward is needed"
            raise ClusterUnreachable(
                f"{self.url} can't be reached through the API server: {error}", hint=hint
            ) from error
        return bytes(received)


class _Received:
    """What `http.client` reads an answer from, in place of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _complete(received: bytes | bytearray) -> bool:
    """Return whether an answer that says its length is there; another one ends with the connection."""
    head, end, body = bytes(received).partition(b"\r\n\r\n")
    lengths = [line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return bool(end and lengths and len(body) >= int(lengths[0]))
