"""The API server's double over HTTP: reads requests, answers with objects, tables, watches and Statuses."""

import asyncio
import logging
import random
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import msgspec
import yaml
from aiohttp import web

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.api.access_rules import (
    ADMIN_TOKEN,
    TOKEN_S,
    AccessRequest,
    AccessRules,
    ApiUser,
)
from tests.doubles.kubernetes.api.api_faults import ApiFault, ApiFaults
from tests.doubles.kubernetes.api.api_requests import MAGIC, ApiPath, flag, read_path, read_protobuf, verb_of
from tests.doubles.kubernetes.api.deletions import Deletions
from tests.doubles.kubernetes.api.object_reads import ObjectReads
from tests.doubles.kubernetes.api.object_writes import SERVICES, ObjectWrites, WriteOptions, scale_of
from tests.doubles.kubernetes.api.pod_connections import forward, logs, pod_address
from tests.doubles.kubernetes.kinds import discovery
from tests.doubles.kubernetes.kinds.resource_kinds import ResourceKind, ResourceKinds
from tests.doubles.kubernetes.objects.api_failures import ApiFailure, bad_request, no_such_path, not_allowed
from tests.doubles.kubernetes.objects.api_store import ApiStore, ObjectKey
from tests.doubles.kubernetes.objects.patches import APPLY_PATCH, merge_patched

NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
BODY_BYTES = 3 << 20
"""The largest body that a real API server takes."""
SHUTDOWN_S = 0.05
"""How long open watches may hold up the end of the server (0 would be for ever)."""
log = logging.getLogger(__name__)


class ApiServer:
    """One API server on loopback: ``async with ApiServer(folder) as server`` writes ``server.kubeconfig``.

    A request that has no token is the administrator's: kubectl and helm send tokens over TLS alone.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        seed: int = 0,
        bookmark_s: float = 5.0,
        services: str = SERVICES,
    ) -> None:
        rng = random.Random(seed)
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self.kinds = ResourceKinds()
        self.store = ApiStore()
        self.faults = ApiFaults(lambda: self.store.version, self._begin)
        self.access = AccessRules(self.store, self.now, rng)
        self.writes = ObjectWrites(self.store, self.kinds, self.now, rng)
        self.reads = ObjectReads(self.store, self.faults, self.now, bookmark_s)
        self.writes.services = services
        self.deletions = Deletions(self.writes)
        self._port = port
        self._runner: web.AppRunner | None = None
        self._place: socket.socket | None = None
        self._outage: asyncio.Task[None] | None = None
        options = WriteOptions("kube-apiserver")
        for name in NAMESPACES:
            self.writes.create(self.kind("", "v1", "namespaces"), "", {"metadata": {"name": name}}, options)
        for plural, item in cluster_admin():
            self.writes.create(self.kind("rbac.authorization.k8s.io", "v1", plural), "", item, options)

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://127.0.0.1:{self._port}"

    def now(self) -> float:
        """Return the server's own time in seconds since 1970."""
        return time.time() + self.faults.skew_s

    async def __aenter__(self) -> "ApiServer":
        self.folder.mkdir(parents=True, exist_ok=True)
        # Bound and never listening, so that no other process is given the port while the server refuses.
        self._place = socket.socket()
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind(("127.0.0.1", self._port))
        self._port = self._place.getsockname()[1]
        await self._listen()
        self.write_kubeconfig(self.kubeconfig, ADMIN_TOKEN)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outage is not None:
            self._outage.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._place is not None:
            self._place.close()

    def write_kubeconfig(self, path: Path, token: str, namespace: str = "default") -> None:
        """Write a kubeconfig for the user of a token."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "double",
            "clusters": [{"name": "double", "cluster": {"server": self.url}}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "double", "context": {"cluster": "double", "user": "user", "namespace": namespace}}],
        }
        path.write_text(yaml.safe_dump(config))

    def kind(self, group: str, version: str, plural: str) -> ResourceKind:
        """Return a kind that is served.

        Raises:
            ApiFailure: 404.
        """
        kind = self.kinds.find(group, version, plural)
        if kind is None:
            raise no_such_path()
        return kind

    async def _listen(self) -> None:
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_route("*", "/faults", self._faults)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()

    def _begin(self, fault: ApiFault) -> None:
        """Carry out a fault that acts at once."""
        match fault.kind:
            case "refuse":
                self._outage = asyncio.create_task(self._refuse(fault.seconds))
            case "forget-history":
                self.store.forget()
            case "drop-watch":
                self.store.wake_all()

    async def _refuse(self, seconds: float) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        await asyncio.sleep(seconds)
        await self._listen()

    async def _faults(self, request: web.Request) -> web.StreamResponse:
        """Begin or clear faults, for tests in other processes."""
        if request.method == "POST":
            try:
                fault = msgspec.json.decode(await request.read(), type=ApiFault)
            except msgspec.ValidationError as error:
                return respond(bad_request(f"this is no fault: {error}").status(), 400)
            self.faults.add(fault)
        elif request.method == "DELETE":
            self.faults.clear()
        return respond({})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = read_path(request.path)
        try:
            user = self.access.user_of(request.headers.get("Authorization", ""))
            if path is None:
                self.access.check_path(user, request.method.lower().replace("head", "get"), request.path)
                return self._unversioned(request)
            return await self._resource(request, user, path)
        except ApiFailure as failure:
            headers = {} if failure.retry_after_s is None else {"Retry-After": str(failure.retry_after_s)}
            return respond(failure.status(), failure.code, headers)
        except (ConnectionResetError, web.HTTPException):
            raise
        except Exception:  # the server outlives a request that it can't carry out, as a real one does
            log.exception("%s %s failed", request.method, request.path)
            return respond(
                ApiFailure(500, "InternalError", "Internal error occurred: see the double's log").status(), 500
            )

    async def _resource(self, request: web.Request, user: ApiUser, path: ApiPath) -> web.StreamResponse:
        verb = verb_of(request.method, path, request.query)
        if failure := self.faults.failure(verb, path):
            raise failure
        resource = f"{path.plural}/{path.subresource}" if path.subresource else path.plural
        self.access.check(user, AccessRequest(verb, path.group, resource, path.namespace, path.name))
        kind = self.kind(path.group, path.version, path.plural)
        if path.subresource and path.subresource not in kind.subresources:
            raise no_such_path()
        lost = self.faults.take("lost-answer", verb, path)
        response = await self._carry_out(request, user, verb, kind, path)
        return broken(request) if lost else response

    async def _carry_out(
        self, request: web.Request, user: ApiUser, verb: str, kind: ResourceKind, path: ApiPath
    ) -> web.StreamResponse:
        key, query = (path.namespace, path.name), request.query
        accept = request.headers.get("Accept", "")
        options = write_options(request, path.subresource)
        match path.subresource, verb:
            case _, "create" if kind.review:
                return respond(self.access.review(await body_of(request), user), 201)
            case (("" | "status"), "get"):
                return respond(self.reads.shown(kind, self.writes.read(kind, key), accept, query))
            case "", "list":
                return respond(self.reads.page(kind, path, accept, query))
            case "", "watch":
                return await self.reads.watch(request, kind, path)
            case "", "create":
                item = await body_of(request)
                item = self.writes.create(kind, path.namespace, item, options)
                return respond(self.reads.shown(kind, item, accept, query), 201)
            case (("" | "status"), ("update" | "patch")):
                item, new = await self._change(request, verb, kind, key, options)
                return respond(self.reads.shown(kind, item, accept, query), 201 if new else 200)
            case "", "delete":
                item, removed = self.deletions.delete(kind, key, await body_of(request), query)
                return respond(deleted_status(kind, item) if removed and kind.resource != "pods" else item)
            case "scale", "get":
                return respond(scale_of(kind, self.writes.read(kind, key)))
            case "scale", ("update" | "patch"):
                scale = await self._patched_scale(request, verb, kind, path)
                return respond(self.writes.rescale(kind, key, scale, options))
            case "token", "create":
                return respond(self._token(await body_of(request), self.writes.read(kind, key)), 201)
            case "binding", "create":
                node = (await body_of(request))["target"]["name"]
                return respond(self._bind(kind, key, node, options), 201)
            case "log", "get":
                return logs(request, self.writes.read(kind, key), self.folder)
            case "portforward", ("get" | "create"):
                return await forward(request, pod_address(self.writes.read(kind, key)))
        raise not_allowed()

    async def _change(
        self, request: web.Request, verb: str, kind: ResourceKind, key: ObjectKey, options: WriteOptions
    ) -> tuple[JsonObject, bool]:
        """Carry out an update, a patch or an apply; return the object and whether it is new."""
        if verb == "update":
            return self.writes.update(kind, key, await body_of(request), options), False
        if request.content_type == APPLY_PATCH:
            if not request.query.get("fieldManager"):
                raise bad_request(
                    "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value: is required for apply patch"
                )
            return self.writes.apply(kind, key, await body_of(request), options)
        return self.writes.patch(kind, key, request.content_type, await request.read(), options), False

    async def _patched_scale(self, request: web.Request, verb: str, kind: ResourceKind, path: ApiPath) -> JsonObject:
        if verb == "update":
            return await body_of(request)
        scale = scale_of(kind, self.writes.read(kind, (path.namespace, path.name)))
        scale["metadata"].pop("resourceVersion")  # a patch that names none builds on any
        merged: JsonObject = merge_patched(scale, await body_of(request))
        return merged

    def _token(self, body: JsonObject, account: JsonObject) -> JsonObject:
        spec = body.get("spec") or {}
        seconds = spec.get("expirationSeconds") or TOKEN_S
        token, expires_s = self.access.issue(account, seconds)
        expiry = self.writes.timestamp(expires_s - self.now())
        head = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "metadata": {}, "spec": spec}
        return head | {"status": {"token": token, "expirationTimestamp": expiry}}

    def _bind(self, kind: ResourceKind, key: tuple[str, str], node: str, options: WriteOptions) -> JsonObject:
        """Give a pod its node, as a scheduler does."""
        pod = self.writes.read(kind, key)
        self.writes.update(kind, key, pod | {"spec": pod["spec"] | {"nodeName": node}}, options)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _unversioned(self, request: web.Request) -> web.StreamResponse:
        match request.path.strip("/").split("/"):
            case ["healthz" | "readyz" | "livez", *_]:
                return web.Response(text="ok")
            case ["version"]:
                return respond(discovery.VERSION)
            case ["api"]:
                return respond(discovery.core_versions(self.url))
            case ["apis"]:
                return respond(discovery.groups(self.kinds))
            case ["api", version]:
                return respond(discovery.resources(self.kinds, "", version))
            case ["apis", group, version]:
                return respond(discovery.resources(self.kinds, group, version))
            case ["openapi", "v3"]:
                return respond(discovery.group_paths(self.kinds))
            case ["openapi", "v3", *path]:
                return respond(discovery.document(self.kinds, "/".join(path)))
        raise no_such_path()


def respond(body: object, code: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return an answer in JSON."""
    all_headers = {"Content-Type": "application/json", **(headers or {})}
    return web.Response(body=msgspec.json.encode(body), status=code, headers=all_headers)


def broken(request: web.Request) -> web.Response:
    """Break the connection, so that no answer arrives."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


async def body_of(request: web.Request) -> JsonObject:
    """Return the object in a request's body, {} where there is none."""
    text = await request.read()
    if text.startswith(MAGIC):
        return read_protobuf(text)
    try:
        body = msgspec.json.decode(text) if text else {}
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the body is not an object")
    return body


def write_options(request: web.Request, subresource: str) -> WriteOptions:
    """Return what a write's query says."""
    query = request.query
    return WriteOptions(
        manager=query.get("fieldManager") or request.headers.get("User-Agent", "unknown").partition("/")[0],
        force=flag(query, "force"),
        dry_run=query.get("dryRun") == "All",
        field_validation=query.get("fieldValidation", ""),
        subresource=subresource,
    )


def deleted_status(kind: ResourceKind, item: JsonObject) -> JsonObject:
    """Return the answer to a delete after which nothing is left."""
    details = {"name": item["metadata"]["name"], "kind": kind.plural, "uid": item["metadata"]["uid"]}
    details |= {"group": kind.group} if kind.group else {}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}


def cluster_admin() -> list[tuple[str, JsonObject]]:
    """Return the role and the binding that every cluster has for its administrators."""
    rules = [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}, {"verbs": ["*"], "nonResourceURLs": ["*"]}]
    subject = {"kind": "Group", "name": "system:masters", "apiGroup": "rbac.authorization.k8s.io"}
    reference = {"kind": "ClusterRole", "name": "cluster-admin", "apiGroup": "rbac.authorization.k8s.io"}
    metadata = {"name": "cluster-admin"}
    binding = {"metadata": metadata, "subjects": [subject], "roleRef": reference}
    return [("clusterroles", {"metadata": metadata, "rules": rules}), ("clusterrolebindings", binding)]


async def make_certificate(certificate: Path, key: Path, names: str = "IP:127.0.0.1,DNS:localhost") -> None:
    """Make a certificate of some names that signs itself, by the openssl command.

    Raises:
        RuntimeError: openssl is missing or fails.
    """
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=kubernetes"
    extra = ("-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(certificate))
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec("openssl", *command.split(), *extra, stdout=quiet, stderr=quiet)
    if await process.wait():
        raise RuntimeError("the openssl command made no certificate: TLS needs openssl 1.1.1 or later")
