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

    def __init__(self, objects: ClusterObjects, pod: JsonObject, folder: Path, address: str, claims: Path) -> None:
        self._objects = objects
        self._pod = pod
        self._folder = folder
        self._address = address
        self._claims = claims
        self._namespace: str = pod["metadata"]["namespace"]

    def variables(self, container: JsonObject, image: ScriptedImage) -> dict[str, str]:
        """Return a container's variables: of Services, of its image, of envFrom, of env.

        Raises:
            MissingObject: what one of them comes from is not there.
        """
        path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin"])
        variables = {"PATH": path, "HOSTNAME": self._pod["spec"].get("hostname") or self._pod["metadata"]["name"]}
        variables |= {"HOME": "/root", "LANG": "C.UTF-8", **self._services(), **image.env}
        for source in container.get("envFrom") or ():
            kind = "ConfigMap" if "configMapRef" in source else "Secret"
            reference = source.get("configMapRef") or source["secretRef"]
            data = self._data(kind, reference["name"], bool(reference.get("optional")))
            prefix = source.get("prefix") or ""
            variables |= {prefix + key: value.decode() for key, value in data.items()}
        for each in container.get("env") or ():
            value = self._value(each["valueFrom"], container) if each.get("valueFrom") else each.get("value") or ""
            if value is not None:
                variables[each["name"]] = expand(value, variables)
        return variables

    def _services(self) -> dict[str, str]:
        variables: dict[str, str] = {}
        services = self._objects.all("Service", self._namespace)
        kubernetes = self._objects.get("Service", "default", "kubernetes")
        for service in (*services, *([kubernetes] if kubernetes else [])):
            address, ports = service["spec"].get("clusterIP"), service["spec"].get("ports") or ()
            if address in (None, "", "None") or not ports:
                continue
            name = service["metadata"]["name"].upper().replace("-", "_")
            variables |= {f"{name}_SERVICE_HOST": address, f"{name}_SERVICE_PORT": str(ports[0]["port"])}
            variables[f"{name}_PORT"] = f"tcp://{address}:{ports[0]['port']}"
        return variables if self._pod["spec"].get("enableServiceLinks", True) else _only_kubernetes(variables)

    def _value(self, source: JsonObject, container: JsonObject) -> str | None:
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"])
        if "resourceFieldRef" in source:
            kind, _, name = source["resourceFieldRef"]["resource"].partition(".")
            return str(((container.get("resources") or {}).get(kind) or {}).get(name, "0"))
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
        if match := re.fullmatch(r"metadata\.(labels|annotations)(?:\['(.+)'\])?", path):
            values = self._pod["metadata"].get(match[1]) or {}
            return values.get(match[2], "") if match[2] else "\n".join(f'{k}="{v}"' for k, v in sorted(values.items()))
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
        binary = {key: base64.b64decode(value) for key, value in (item.get("binaryData") or {}).items()}
        return {key: value.encode() for key, value in (item.get("data") or {}).items()} | binary

    # --- volumes ------------------------------------------------------------------------------------------------------

    async def write_volumes(self) -> None:
        """Write the pod's volumes as they are now; call it again when ConfigMaps and Secrets change.

        Raises:
            MissingObject: what one of them comes from is not there.
        """
        for volume in self._pod["spec"].get("volumes") or ():
            folder = self._folder_of(volume)
            folder.mkdir(parents=True, exist_ok=True)
            sources = (volume.get("projected") or {}).get("sources") or [volume]
            files: dict[str, bytes] = {}
            for source in sources:
                files |= await self._files(source)
            _write(folder, files)
        if self._account_mounted():
            _write(self._folder / "account", await self._account({"path": "token"}) | await self._account_facts())

    def _folder_of(self, volume: JsonObject) -> Path:
        if volume.get("hostPath"):
            return Path(volume["hostPath"]["path"])
        if volume.get("persistentVolumeClaim"):
            return self._claims / self._namespace / str(volume["persistentVolumeClaim"]["claimName"])
        return self._folder / "volumes" / str(volume["name"])

    async def _files(self, source: JsonObject) -> dict[str, bytes]:
        for field, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
            if reference := source.get(field):
                name = reference.get("name") or reference.get("secretName")
                data = self._data(kind, name, bool(reference.get("optional")))
                items = reference.get("items")
                return {each["path"]: data[each["key"]] for each in items if each["key"] in data} if items else data
        if fields := (source.get("downwardAPI") or {}).get("items"):
            return {each["path"]: self._field(each["fieldRef"]["fieldPath"]).encode() for each in fields}
        if token := source.get("serviceAccountToken"):
            return await self._account(token)
        return {}

    async def _account(self, token: JsonObject) -> dict[str, bytes]:
        """Return a token of the pod's service account, made once."""
        made = self._folder / "tokens" / token["path"]
        if not made.exists():
            account = self._pod["spec"].get("serviceAccountName") or "default"
            spec = {"audiences": [token["audience"]] if token.get("audience") else []}
            spec["expirationSeconds"] = token.get("expirationSeconds") or 3600  # type: ignore[assignment]
            body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
            path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token"
            answer = await self._objects.raw("POST", path, body)
            if answer is None:
                raise MissingObject(f'serviceaccount "{account}" not found')
            _write(made.parent, {made.name: answer["status"]["token"].encode()})
        return {token["path"]: made.read_bytes()}

    async def _account_facts(self) -> dict[str, bytes]:
        root = self._objects.get("ConfigMap", self._namespace, "kube-root-ca.crt")
        authority = ((root or {}).get("data") or {}).get("ca.crt", "")
        if not authority:
            raise MissingObject('configmap "kube-root-ca.crt" has no certificate yet')
        return {"namespace": self._namespace.encode(), "ca.crt": authority.encode()}

    def _account_mounted(self) -> bool:
        spec = self._pod["spec"]
        account = self._objects.get("ServiceAccount", self._namespace, spec.get("serviceAccountName") or "default")
        wanted = spec.get("automountServiceAccountToken", (account or {}).get("automountServiceAccountToken"))
        containers = (*spec["containers"], *(spec.get("initContainers") or ()))
        by_hand = any(
            each["mountPath"] == ACCOUNT_FOLDER for one in containers for each in one.get("volumeMounts") or ()
        )
        return wanted is not False and not by_hand

    def mounts(self, container: JsonObject, variables: Mapping[str, str]) -> list[VolumeMount]:
        """Return what a container has mounted."""
        volumes = {each["name"]: each for each in self._pod["spec"].get("volumes") or ()}
        mounts = []
        if self._account_mounted():
            mounts.append(VolumeMount(str(self._folder / "account"), ACCOUNT_FOLDER, True))
        for each in container.get("volumeMounts") or ():
            source = self._folder_of(volumes[each["name"]])
            part = each.get("subPath") or expand(each.get("subPathExpr") or "", variables)
            if part and not (source / part).exists():
                (source / part).mkdir(parents=True)
            fixed = volumes[each["name"]].keys() & {"configMap", "secret", "projected", "downwardAPI"}
            mounts.append(VolumeMount(str(source / part), each["mountPath"], bool(each.get("readOnly") or fixed)))
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


def _only_kubernetes(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith("KUBERNETES_")}


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
        self._claims = folder / "claims"
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
        self.environment = PodEnvironment(self.objects, self.pod, self.folder, self.address, self._claims)

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
