"""Sandbox of a pod: its network and folder, and the environment and volumes of its containers."""

import asyncio
import base64
import os
import re
import shutil
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.cluster_script import ClusterScript, ScriptedImage
from tests.doubles.kubernetes.controllers.cluster_objects import ClusterObjects
from tests.doubles.kubernetes.kubelet.pod_network import PodNetwork

ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
_REFERENCE = re.compile(r"\$(\$)?\(([A-Za-z_][\w.-]*)\)")


class MissingObject(Exception):
    """A ConfigMap, Secret or key that a pod needs is not there (yet)."""


class VolumeMount(NamedTuple):
    """A folder or file of this machine, and where a container has it."""

    source: str
    target: str
    read_only: bool


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with $(NAME) replaced by variables; $$(NAME) stands for itself without one $."""

    def value(match: "re.Match[str]") -> str:
        if match[1]:
            return match[0][1:]
        return variables.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


def command_of(container: JsonObject, image: ScriptedImage, variables: Mapping[str, str]) -> list[str]:
    """Return a container's command with its arguments; empty where neither it nor its image has one."""
    command = list(container.get("command") or image.entrypoint)
    return [expand(word, variables) for word in (*command, *(container.get("args") or ()))] if command else []


class PodEnvironment:
    """What the containers of one pod get of the cluster's objects."""

    def __init__(self, objects: ClusterObjects, pod: JsonObject, folder: Path, address: str) -> None:
        self._objects = objects
        self._pod = pod
        self._folder = folder
        self._address = address
        self._namespace: str = pod["metadata"]["namespace"]

    def variables(self, container: JsonObject, image: ScriptedImage) -> dict[str, str]:
        """Return a container's variables: of the API server, of its image, of envFrom, of env.

        Raises:
            MissingObject: what one of them comes from is not there.
        """
        path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin"])
        variables = {"PATH": path, "HOSTNAME": self._pod["spec"].get("hostname") or self._pod["metadata"]["name"]}
        variables |= {"HOME": "/root", "LANG": "C.UTF-8", **self._api_server(), **image.env}
        for source in container.get("envFrom") or ():
            kind = "ConfigMap" if "configMapRef" in source else "Secret"
            reference = source.get("configMapRef") or source["secretRef"]
            data = self._data(kind, reference["name"], bool(reference.get("optional")))
            prefix = source.get("prefix") or ""
            variables |= {prefix + key: value.decode() for key, value in data.items()}
        for each in container.get("env") or ():
            value = self._value(each["valueFrom"]) if each.get("valueFrom") else each.get("value") or ""
            if value is not None:
                variables[each["name"]] = expand(value, variables)
        return variables

    def _api_server(self) -> dict[str, str]:
        """Return where the API server is; the variables of other Services are those of pods with service links."""
        service = self._objects.get("Service", "default", "kubernetes")
        return (
            {}
            if service is None
            else {
                "KUBERNETES_SERVICE_HOST": service["spec"]["clusterIP"],
                "KUBERNETES_SERVICE_PORT": str(service["spec"]["ports"][0]["port"]),
            }
        )

    def _value(self, source: JsonObject) -> str | None:
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"])
        kind = "ConfigMap" if "configMapKeyRef" in source else "Secret"
        reference = source.get("configMapKeyRef") or source["secretKeyRef"]
        optional = bool(reference.get("optional"))
        data = self._data(kind, reference["name"], optional)
        if reference["key"] not in data:
            if optional:
                return None
            raise MissingObject(f"couldn't find key {reference['key']} in {kind} {self._namespace}/{reference['name']}")
        return data[reference["key"]].decode()

    def _field(self, path: str) -> str:
        """Return a field of the pod as the downward API gives it."""
        if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
            return str((self._pod["metadata"].get(match[1]) or {}).get(match[2], ""))
        fixed = {"status.podIP": self._address, "status.podIPs": self._address, "status.hostIP": "127.0.0.1"}
        if path in fixed:
            return fixed[path]
        part, _, name = path.partition(".")
        return str((self._pod.get(part) or {}).get(name) or "")

    def _data(self, kind: str, name: str, optional: bool) -> dict[str, bytes]:
        item = self._objects.get(kind, self._namespace, name)
        if item is None:
            if optional:
                return {}
            raise MissingObject(f'{kind.lower()} "{name}" not found')
        if kind == "Secret":
            return {key: base64.b64decode(value) for key, value in (item.get("data") or {}).items()}
        return {key: value.encode() for key, value in (item.get("data") or {}).items()}

    # --- volumes ------------------------------------------------------------------------------------------------------

    async def write_volumes(self) -> None:
        """Write the pod's volumes as they are now; call it again when ConfigMaps and Secrets change.

        Raises:
            MissingObject: what one of them comes from is not there.
        """
        for volume in self._pod["spec"].get("volumes") or ():
            folder = self._folder_of(volume)
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder, self._files(volume))
        if self._account_mounted():
            _write(self._folder / "account", {"token": await self._account_token(), **self._account_facts()})

    def _folder_of(self, volume: JsonObject) -> Path:
        return self._folder / "volumes" / str(volume["name"])

    def _files(self, source: JsonObject) -> dict[str, bytes]:
        for field, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
            if reference := source.get(field):
                name = reference.get("name") or reference.get("secretName")
                data = self._data(kind, name, bool(reference.get("optional")))
                items = reference.get("items")
                return {each["path"]: data[each["key"]] for each in items if each["key"] in data} if items else data
        return {}

    async def _account_token(self) -> bytes:
        """Return a token of the pod's service account, made once."""
        made = self._folder / "account" / "token"
        if made.exists():
            return made.read_bytes()
        account = self._pod["spec"].get("serviceAccountName") or "default"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token"
        answer = await self._objects.raw("POST", path, body)
        if answer is None:
            raise MissingObject(f'serviceaccount "{account}" not found')
        return str(answer["status"]["token"]).encode()

    def _account_facts(self) -> dict[str, bytes]:
        root = self._objects.get("ConfigMap", self._namespace, "kube-root-ca.crt")
        authority = ((root or {}).get("data") or {}).get("ca.crt", "")
        if not authority:
            raise MissingObject('configmap "kube-root-ca.crt" has no certificate yet')
        return {"namespace": self._namespace.encode(), "ca.crt": authority.encode()}

    def _account_mounted(self) -> bool:
        spec = self._pod["spec"]
        account = self._objects.get("ServiceAccount", self._namespace, spec.get("serviceAccountName") or "default")
        wanted = spec.get("automountServiceAccountToken", (account or {}).get("automountServiceAccountToken"))
        return wanted is not False

    def mounts(self, container: JsonObject) -> list[VolumeMount]:
        """Return what a container has mounted."""
        volumes = {each["name"]: each for each in self._pod["spec"].get("volumes") or ()}
        mounts = []
        if self._account_mounted():
            mounts.append(VolumeMount(str(self._folder / "account"), ACCOUNT_FOLDER, True))
        for each in container.get("volumeMounts") or ():
            volume = volumes[each["name"]]
            fixed = volume.keys() & {"configMap", "secret"}
            read_only = bool(each.get("readOnly") or fixed)
            mounts.append(VolumeMount(str(self._folder_of(volume)), each["mountPath"], read_only))
        return sorted(mounts, key=lambda mount: mount.target)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files, each at once; those that hold the same already stay as they are."""
    for name, content in files.items():
        path = folder / name
        if path.exists() and path.read_bytes() == content:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_bytes(content)
        new.replace(path)


class PodSandbox:
    """One pod on its node; ``pod`` is the object as the API server last had it."""

    def __init__(
        self, objects: ClusterObjects, pod: JsonObject, script: ClusterScript, folder: Path, network: PodNetwork
    ) -> None:
        metadata = pod["metadata"]
        self.objects = objects
        self.pod = pod
        self.script = script
        self.network = network
        self.uid: str = metadata["uid"]
        self.folder = folder / "pods" / self.uid
        self.logs = folder / "logs" / metadata["namespace"] / metadata["name"]
        self.hosts = self.folder / "hosts"
        self.hostname: str = pod["spec"].get("hostname") or metadata["name"]
        self.address = ""
        self.environment: PodEnvironment
        self.changed = asyncio.Event()
        self.powered = asyncio.Event()
        self.powered.set()
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def speed(self) -> float:
        """How many times as fast pauses pass."""
        return self.script.speed

    @property
    def grace_s(self) -> float:
        """Seconds that its containers have to end."""
        grace = self.pod["metadata"].get("deletionGracePeriodSeconds")
        return float(self.pod["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace)

    @property
    def network_path(self) -> str:
        """Where its network namespace can be opened."""
        return self.network.namespace_of(self.uid)

    async def open(self) -> None:
        """Make its folders and its network; the logs of an earlier pod of its name go."""
        shutil.rmtree(self.logs, ignore_errors=True)
        for folder in (self.folder, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.address = await self.network.attach(self.uid)
        (self.folder / "resolv.conf").write_text("")
        self.hosts.write_text("")
        self.environment = PodEnvironment(self.objects, self.pod, self.folder, self.address)

    async def close(self) -> None:
        """Give its network back."""
        await cancel_all(self._tasks)
        self.network.detach(self.uid)

    def resolver_mounts(self) -> list[VolumeMount]:
        """Return the files by which its containers resolve names: hosts has the cluster's, no server is asked."""
        files = {"/etc/hosts": self.hosts, "/etc/resolv.conf": self.folder / "resolv.conf"}
        return [VolumeMount(str(source), target, False) for target, source in files.items()]

    def write_hosts(self, lines: str) -> None:
        """Write the names that its containers can resolve; in place, because the file is mounted."""
        text = f"127.0.0.1 localhost\n{self.address} {self.hostname}\n{lines}"
        if self.hosts.read_text() != text:
            with self.hosts.open("r+") as file:
                file.write(text)
                file.truncate()

    def report(self) -> None:
        """Have the pod's status written soon."""
        self.changed.set()

    async def event(self, reason: str, message: str, warning: bool = False) -> None:
        """Record an event about the pod, unless its node is off."""
        if self.powered.is_set():
            await self.objects.event(self.pod, reason, message, warning)

    def in_background(self, work: Coroutine[Any, Any, object]) -> None:
        """Do something beside the rest, at most until the sandbox is closed."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
