"""Managed cluster: one PenstockCluster, whose objects are applied, whose engines the fleet machine runs as pods.

What is desired of it is in the store, as for any cluster, and outlives the operator. Whatever the operator can do at
once when a spec changes it does; for the rest it takes its engines over anew, as after a restart of its own.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.adapters.connectors.engine_process import LaunchSpec
from penstock.adapters.engines.pool_overrides import with_template
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.adapters.task_cancel import cancel_all
from penstock.config.live_knobs import SettingChange, differences, live_knobs, live_values
from penstock.config.reading.load import resolved_yaml
from penstock.config.settings.cluster_settings import ClusterSettings, PoolSettings
from penstock.config.worker_names import pool_prefix
from penstock.fleet.gpu_allocator import GpuAllocator
from penstock.kernel.errors import ConfigError, PenstockError
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import JsonObject
from penstock.runtime.backends import open_relays, open_store
from penstock.runtime.cluster_state.current_settings import CurrentSettings, desire_settings
from penstock.runtime.cluster_state.desired_state import (
    DESIRED,
    PLANNER,
    RESTART,
    SETTINGS,
    PoolSpec,
    RestartSpec,
    SettingSpec,
    decode,
    decode_all,
    put,
)
from penstock.runtime.cluster_state.membership import RevokedLeases
from penstock.runtime.cluster_state.store_watch import RETRY, follow
from penstock.runtime.planning.planner_report import PlannerReport, PlannerStatus
from penstock.runtime.records.run_folder import RunFolder
from penstock.runtime.supervision.engine_fleet import GPU_ENGINES, EngineFleet, EngineHost, Launcher
from penstock.runtime.supervision.reconciler import Reconciler
from penstock_kubernetes.api.api_client import ask
from penstock_kubernetes.operator import object_names as names
from penstock_kubernetes.operator.cluster_crd import cluster_resource
from penstock_kubernetes.operator.cluster_entries import own_entries
from penstock_kubernetes.operator.cluster_spec import ClusterSpec, engine_pools, read_spec
from penstock_kubernetes.operator.engine_group import check_hosts
from penstock_kubernetes.operator.frontend_rollout import FrontendRollout
from penstock_kubernetes.operator.owned_objects import (
    apply_objects,
    cluster_objects,
    delete_planner,
    secret_env,
    secret_texts,
)
from penstock_kubernetes.operator.planned_spec import HELD_BACK, waits_for_approval, with_plan
from penstock_kubernetes.operator.pod_runner import PodPlan, PodRunner
from penstock_kubernetes.operator.pod_template import engine_pod
from penstock_kubernetes.operator.resource_status import ClusterNotice, PoolView, event_object, events_of, status_of
from penstock_kubernetes.pod_launch import pod_launch

if TYPE_CHECKING:
    from lightkube import AsyncClient

log = logging.getLogger("penstock.operator")

BY = "PenstockCluster"
"""``by`` of what a changed spec desires."""
TICKETS = 4096
"""GPUs of a cluster without a limit of its own: whether a node has them is up to Kubernetes' scheduler."""
STATUS_EVERY = 1.0
REASON_ROUNDS = 3
"""Looks for which a status waits for the planner's reason: its order comes before its report."""
APPLY_EVERY = 30.0
"""Seconds after which the objects are applied again: what somebody deleted comes back."""
RETRY_MAX = 30.0
ADOPTION = 10.0
"""Seconds that engines which were taken over get to be probed, before the status says that they do not serve."""


class OperatorSettings(NamedTuple):
    """``context``: of the kubeconfig; ``image``: for our own processes; ``runs``: folder of the run folders."""

    context: str | None
    image: str
    runs: Path


class _Changed(Exception):
    """The spec changed in a way that the engines are taken over anew for."""


class ManagedCluster:
    """One PenstockCluster; `run` until it is cancelled, and tell it of each new version with `use`."""

    def __init__(self, client: "AsyncClient", resource: JsonObject, settings: OperatorSettings) -> None:
        self.resource = resource
        self.client = client
        self.settings = settings
        self.changed = asyncio.Event()
        self.observed = 0
        """Generation of the spec that was taken last."""
        self.plan: JsonObject = (resource.get("status") or {}).get("plan") or {}
        """Of the spec's request: its digest, and the config that it came to."""
        self.folder = RunFolder.create(settings.runs, "operator").path

    @property
    def key(self) -> names.ClusterKey:
        metadata = self.resource["metadata"]
        return names.ClusterKey((metadata["namespace"], metadata["name"]))

    def use(self, resource: JsonObject) -> None:
        """Take a newer version; only a changed spec matters, not our own status."""
        changed = resource["metadata"].get("generation") != self.resource["metadata"].get("generation")
        self.resource = resource
        if changed:
            self.changed.set()

    async def run(self) -> None:
        """Work until cancelled: the pods then stay, for the next operator."""
        wait = RETRY
        while True:
            self.changed.clear()
            try:
                await self._supervise()
            except _Changed:
                wait = RETRY
                continue
            except PenstockError as error:
                log.error("cluster %s: %s", self.key, error)
                await self.refuse(str(error))
            except Exception as error:  # supervision boundary: one cluster's trouble is not another's
                log.exception("cluster %s failed by a bug of ours", self.key)
                await self.refuse(f"a bug of ours: {error}")
            try:
                await asyncio.wait_for(self.changed.wait(), wait)
                wait = RETRY
            except TimeoutError:
                wait = min(RETRY_MAX, 2 * wait)

    # --- one version of the spec --------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        resource = self.resource
        spec = await self.read(resource)
        settings = await self._with_secrets(spec.settings)
        (self.folder / "config.yaml").write_text(resolved_yaml(settings))
        await self.apply(spec)
        secret = None if settings.cluster_secret is None else ClusterSecret(settings.cluster_secret)
        revoked = RevokedLeases()
        store = open_store(settings, self.folder, secret, revoked=revoked.add)
        self.observed = resource["metadata"].get("generation", 0)
        try:
            await _Supervision(self, spec, settings, store, secret, revoked).run()
        finally:
            await store.close()

    async def read(self, resource: JsonObject) -> ClusterSpec:
        """Read a version of the spec, and plan what it requests.

        Raises:
            ConfigError: it is not right, can't be planned, or is not to be applied.
        """
        whole, self.plan = await with_plan(self.client, resource, self.plan, self.folder)
        if waits_for_approval(resource):
            raise ConfigError(HELD_BACK)
        return read_spec(whole, self.folder)

    async def _with_secrets(self, settings: ClusterSettings) -> ClusterSettings:
        texts = await secret_texts(self.client, self.resource)
        frontend, discovery = settings.frontend, settings.discovery
        security = msgspec.structs.replace(frontend.security, admin_keys=(texts.admin,))
        login = msgspec.structs.replace(discovery.kubernetes, context=self.settings.context)
        return msgspec.structs.replace(
            settings,
            cluster_secret=texts.cluster,
            frontend=msgspec.structs.replace(frontend, security=security),
            discovery=msgspec.structs.replace(discovery, kubernetes=login),
        )

    async def apply(self, spec: ClusterSpec) -> None:
        await apply_objects(self.client, cluster_objects(self.resource, spec, self.settings.image))
        if not spec.settings.planner.enabled:
            await delete_planner(self.client, self.resource)

    # --- status -------------------------------------------------------------------------------------------------------

    async def write_status(self, status: JsonObject) -> None:
        """Write a status that differs, and Events for what changed.

        Raises:
            StoreUnavailable: the API server can't be written.
        """
        before = self.resource.get("status") or {}
        if self.plan or "plan" in before:
            status = {**status, "plan": self.plan or None}
        if {key: value for key, value in before.items() if key in status} == status and ("attainment" in before) == (
            "attainment" in status
        ):
            return
        from lightkube import ApiError
        from lightkube.types import PatchType

        kind = cluster_resource().Status
        patch = {"status": {"attainment": None, **status}}
        try:
            await ask(
                lambda: self.client.patch(
                    kind, self.key.name, patch, namespace=self.key.namespace, patch_type=PatchType.MERGE
                )
            )
            self.resource = {**self.resource, "status": status}
        except ApiError as error:
            log.warning("the status of %s is refused: %s", self.key, error)
            return
        for notice in events_of(before, status):
            await self.tell(notice)

    async def tell(self, notice: ClusterNotice) -> None:
        """Write an Event; one that can't be written is in the log."""
        from lightkube import ApiError
        from lightkube.resources.core_v1 import Event

        log.info("%s: %s", self.key, notice.message)
        event = names.model_of(Event, event_object(self.resource, notice))
        try:
            await ask(lambda: self.client.create(event))
        except (ApiError, StoreUnavailable) as error:
            log.warning("an Event can't be written: %s", error)

    async def refuse(self, problem: str) -> None:
        """Say in the status why nothing can be done; the engines go on as they are."""
        before = self.resource.get("status") or {}
        status = status_of(self.resource, {}, frontends=(0, 0), attainment=None, problem=problem)
        degraded = [each for each in status["conditions"] if each["type"] == "Degraded"]
        others = [each for each in before.get("conditions") or [] if each["type"] != "Degraded"]
        known = {name: value for name, value in before.items() if name != "conditions"}
        shown = {"replicas": 0, "ready": 0, "pools": [], **known, "conditions": [*others, *degraded]}
        try:
            await self.write_status({**shown, "observedGeneration": status["observedGeneration"]})
        except StoreUnavailable as unavailable:
            log.warning("the status of %s can't be written: %s", self.key, unavailable)


class _Supervision:
    """The engines of one version of a spec, until it changes."""

    def __init__(
        self,
        owner: ManagedCluster,
        spec: ClusterSpec,
        settings: ClusterSettings,
        store: Store,
        secret: ClusterSecret | None,
        revoked: RevokedLeases,
    ) -> None:
        self.owner = owner
        self.spec = spec
        self.settings = settings
        self.store = store
        self.secret = secret
        self.revoked = revoked
        self.problem: str | None = None
        """Why the newest spec is not taken."""
        self.pool_specs: dict[str, PoolSpec] = {}
        self.planner = PlannerStatus(store, lambda: False)
        self.rollout = FrontendRollout(
            owner.client,
            owner.resource,
            settings.supervise.drain_timeout + (settings.supervise.start_timeout or 600.0),
        )

    async def run(self) -> None:
        settings, resource = self.settings, self.owner.resource
        desired = await self._desired()
        grouped = any(hosts > 1 for hosts in self.spec.kubernetes.hosts.values())
        runner = PodRunner(self.owner.client, settings.supervise, resource, desired, grouped=grouped)
        limit = self.spec.kubernetes.gpus
        source = "no limit is set" if limit is None else "spec.kubernetes.gpus"
        gpus = GpuAllocator.over(range(TICKETS if limit is None else limit), source)
        keyed = any(pool.access.any for entry in settings.models.values() for pool in entry.pools.values())
        named = self.spec.kubernetes.secrets if keyed else None
        access_env = await secret_env(self.owner.client, resource["metadata"]["namespace"], named)
        fleet = EngineFleet(
            self.store,
            settings.supervise,
            None,
            logs=self.owner.folder / "logs",
            ttl=settings.discovery.ttl,
            secret=settings.cluster_secret,
            relays=open_relays(settings, self.secret),
            journal=self.owner.folder / "journal" if settings.runs.journal else None,
            kubernetes=settings.discovery.kubernetes,
            elsewhere=EngineHost(runner, gpus, self._launcher, self.spec.kubernetes.strategy),
            access_env=access_env,
        )
        fleet.frontends = self.rollout
        tuning = CurrentSettings(self.store, settings, lambda new, changes, by: fleet.use(new.supervise))
        try:
            await fleet.open()
            models = settings.models
            for model, entry in models.items():
                prefix = pool_prefix(model, len(models))
                for name, pool in entry.pools.items():
                    pool = with_template(_counted(pool), entry.chat_template)
                    runner.plans[prefix + name] = self._plan(name, pool)
                    fleet.add_pool(model, name, pool, prefix=prefix)
            await fleet.recall()
            await self._drop_done_restart(runner)
            await self._refresh_settings()
            if runner.outdated:
                log.info("%s: pods of an older template are replaced: %s", self.owner.key, ", ".join(runner.outdated))
            await fleet.start()
            ttl = settings.discovery.ttl
            await _until_one_ends(
                Reconciler(self.store, fleet, ttl=ttl, frontends=self.rollout).run(),
                tuning.run(),
                self.revoked.run(self.store),
                self._follow_spec(tuning),
                self._keep_applied(),
                self._report(fleet),
                self._follow_desired(),
                self.planner.run(),
            )
        finally:
            await fleet.leave()
            await runner.close(0.0)

    # --- what is desired ----------------------------------------------------------------------------------------------

    async def _desired(self) -> dict[str, int]:
        """Return the desired replicas in the store, after what the spec changed while no operator looked."""
        rows = (self.owner.resource.get("status") or {}).get("pools") or []
        await self._desire_replicas({row["name"]: row.get("configured") for row in rows})
        specs = decode_all(PoolSpec, await self.store.list(DESIRED), DESIRED)
        return {pool: spec.replicas for pool, spec in specs.items()}

    async def _desire_replicas(self, before: Mapping[str, int | None]) -> None:
        """Let replicas that changed in the spec count as an operator's word: the newest one counts."""
        for name, replicas in _spec_replicas(self.settings).items():
            if before.get(name) not in (None, replicas):
                await put(self.store, DESIRED + name, PoolSpec(replicas=replicas, by=BY))
                await self.owner.tell(_changed(f"pool {name}: {before[name]} -> {replicas} replicas"))

    async def _drop_done_restart(self, runner: PodRunner) -> None:
        """Delete a desired restart that is over: every pod is younger than it."""
        raw = (await self.store.list(RESTART)).get(RESTART)
        spec = None if raw is None else decode(RestartSpec, raw)
        if spec is not None and spec.at < runner.oldest:
            await self.store.delete(RESTART)

    async def _refresh_settings(self) -> None:
        """Let what an older spec desired of live knobs give way to this one, which may have come while none looked."""
        values = live_values(self.settings)
        for key, spec in decode_all(SettingSpec, await self.store.list(SETTINGS), SETTINGS).items():
            if spec.by == BY and key in values and values[key] != spec.value:
                await desire_settings(self.store, [SettingChange(key, spec.value, values[key])], BY)

    async def _follow_spec(self, tuning: CurrentSettings) -> None:
        """Take each changed spec: live knobs, replicas and frontends at once, anything else by starting anew."""
        while True:
            await self.owner.changed.wait()
            self.owner.changed.clear()
            resource = self.owner.resource
            try:
                new = await self.owner.read(resource)
            except PenstockError as error:
                self.problem = str(error)
                continue
            self.problem = None
            old, self_settings = self.spec, self.settings
            live = live_knobs(self_settings)
            changes = differences(old.settings, new.settings)
            others = [c.key for c in changes if c.key not in live and not _easy(c.key)]
            before = _spec_replicas(self_settings)
            self.spec, self.settings = new, msgspec.structs.replace(self_settings, models=new.settings.models)
            await self._desire_replicas(before)
            tuned = [change for change in changes if change.key in live]
            await desire_settings(self.store, tuned, BY)
            for change in tuned:
                await self.owner.tell(_changed(f"{change.key}: {change.old} -> {change.new}"))
            if others or new.kubernetes != old.kubernetes:
                await self.owner.tell(_changed(f"changed: {', '.join(others) or 'spec.kubernetes'}"))
                raise _Changed
            await self.owner.apply(new)
            self.owner.observed = resource["metadata"].get("generation", 0)

    async def _keep_applied(self) -> None:
        while True:
            await asyncio.sleep(APPLY_EVERY)
            try:
                await self.owner.apply(self.spec)
                if self.settings.discovery.store == "kubernetes":
                    await own_entries(self.owner.client, self.owner.resource)
            except StoreUnavailable as error:
                log.warning("the objects of %s can't be applied: %s", self.owner.key, error)

    # --- status -------------------------------------------------------------------------------------------------------

    async def _report(self, fleet: EngineFleet) -> None:
        """Keep the status up to date; an API server that is away costs only that."""
        await _looked_at(fleet)
        waited = 0
        counts: dict[str, int] = {}
        while True:
            for crash in list(fleet.crashes.crashes.values()):
                if counts.get(crash.name) != crash.count:  # a status that is written once a second may miss its reason
                    counts[crash.name] = crash.count
                    await self.owner.tell(ClusterNotice("Warning", "Crashed", f"{crash.name} {crash.reason}"))
            waited = waited + 1 if self._unexplained() else 0
            if 0 < waited <= REASON_ROUNDS:
                await asyncio.sleep(STATUS_EVERY)
                continue
            try:
                # A rolling restart has one replica more for a while, which nobody desired.
                pools = {
                    name: msgspec.structs.replace(status.pool, desired=status.pool.desired - fleet.surge(name))
                    for name, status in fleet.reports().items()
                }
                report = self.planner.report
                configured = _spec_replicas(self.settings)
                views = {
                    name: PoolView(
                        pool,
                        configured.get(name, pool.desired),
                        _reason_for_replicas(self.pool_specs.get(name), report),
                    )
                    for name, pool in pools.items()
                }
                status = status_of(
                    self.owner.resource,
                    views,
                    frontends=await self.rollout.ready(),
                    attainment=None if report is None else report.attainment,
                    generation=self.owner.observed,
                    problem=self.problem,
                    scaled=self.spec.scaled,
                )
                await self.owner.write_status(status)
            except PenstockError as error:
                log.warning("the status of %s can't be written: %s", self.owner.key, error)
                await asyncio.sleep(RETRY)
            await asyncio.sleep(STATUS_EVERY)

    def _unexplained(self) -> bool:
        """Return whether the planner has ordered something that its last report does not know."""
        report = self.planner.report
        known = {} if report is None else {name: tick.target for name, tick in report.pools.items()}
        return any(spec.by == PLANNER and known.get(pool) != spec.replicas for pool, spec in self.pool_specs.items())

    async def _follow_desired(self) -> None:
        """Know who desired a pool's replicas, for the reason in the status."""

        async def changed(key: str, raw: bytes) -> None:
            if (spec := decode(PoolSpec, raw)) is not None:
                self.pool_specs[key.removeprefix(DESIRED)] = spec

        async def deleted(key: str) -> None:
            self.pool_specs.pop(key.removeprefix(DESIRED), None)

        await follow(
            self.store,
            DESIRED,
            known=lambda: [DESIRED + pool for pool in self.pool_specs],
            put=changed,
            deleted=deleted,
            frozen=lambda error: None,
        )

    # --- pods ---------------------------------------------------------------------------------------------------------

    def _plan(self, name: str, pool: PoolSettings) -> PodPlan:
        cluster, gpus = self.owner.key.name, pool.gpus or 0

        hosts = self.spec.kubernetes.hosts.get(name, 1)
        if hosts > 1:
            check_hosts(pool.engine, hosts, gpus)

        def template(launch: LaunchSpec) -> JsonObject:
            return engine_pod(cluster, self.spec, name, pool, launch, gpus, self.owner.settings.image)

        return PodPlan(gpus, template, pool.engine, hosts)

    def _launcher(self, model: str, name: str, pool: PoolSettings) -> Launcher:
        return lambda worker, port, gpus: pod_launch(worker, model, pool, pool.gpus or 0)


async def _looked_at(fleet: EngineFleet) -> None:
    """Wait a moment until engines that were taken over have been probed: until then none is known to serve."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ADOPTION):
            async for _ in fleet.driver.changes():
                lives = fleet.driver.fleet.state.lives
                if all(lives[worker].served for worker in fleet.recalled & lives.keys()):
                    return


def _counted(pool: PoolSettings) -> PoolSettings:
    """Return a pool with the number of GPUs that each of its engines gets."""
    gpus = int(pool.engine in GPU_ENGINES) if pool.gpus is None else pool.gpus
    return msgspec.structs.replace(pool, gpus=gpus)


def _spec_replicas(settings: ClusterSettings) -> dict[str, int]:
    """Return pool -> replicas in the spec."""
    return {full: settings.models[model].pools[name].replicas for full, (model, name) in engine_pools(settings).items()}


def _changed(message: str) -> ClusterNotice:
    return ClusterNotice("Normal", "SpecChanged", message)


def _easy(key: str) -> bool:
    """Return whether a changed knob needs no restart: replicas, and the number of frontends."""
    return key == "frontend.processes" or (key.startswith("models.") and key.endswith(".replicas"))


def _reason_for_replicas(spec: PoolSpec | None, report: PlannerReport | None) -> str:
    """Return why a pool has the replicas that it has."""
    if spec is None:
        return "as in its spec"
    if spec.by == PLANNER and report is not None and report.why:
        return f"by the planner: {report.why}"
    return f"by {spec.by or 'an operator'}"


async def _until_one_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Run together until one fails; then the others are cancelled, and its error is raised."""
    tasks: Sequence[asyncio.Task[None]] = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel_all(tasks)
