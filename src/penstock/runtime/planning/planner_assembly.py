"""Planner assembly: builds the planner, its traffic source and its connector from the settings, all in one place."""

from collections.abc import Sequence
from functools import partial

import msgspec

from penstock import extension
from penstock.adapters.connectors.scale_connector import ScaleConnector
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.adapters.sources.frontend_source import FrontendSource
from penstock.adapters.sources.traffic_source import TrafficSource
from penstock.config.files.plugin_modules import load_plugins
from penstock.config.settings.cluster_settings import ClusterSettings, PoolSettings
from penstock.config.worker_names import pool_prefix
from penstock.kernel.errors import ConfigError
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import Pool, Role
from penstock.planner.planner import Planner
from penstock.planner.policies import PolicyInputs, plugins_of
from penstock.runtime.cluster_state.peer_signature import signed
from penstock.runtime.cluster_state.placement_sync import FRONTENDS, FrontendCard
from penstock.runtime.planning.desired_state_connector import DesiredStateConnector


def build_planner(settings: ClusterSettings, inputs: PolicyInputs | None = None) -> Planner:
    """Return the planner of the settings.

    Args:
        inputs: of `inputs_of`; None reads them.
    Raises:
        ConfigError: the policy can't be built, or a plugin of the operator's can't be loaded.
    """
    planning = settings.planner
    own = load_plugins(planning.plugins)
    return Planner(planning, [*plugins_of(planning, inputs or inputs_of(settings)), *own])


def inputs_of(settings: ClusterSettings) -> PolicyInputs:
    """Return what policies know beside observations: what extensions read or measure of engines beforehand.

    Raises:
        ConfigError: a profile, a timing table or a trace can't be read.
    """
    if not extension.offers("speeds", "pools"):
        return PolicyInputs(slo=settings.slo)
    inputs: PolicyInputs = extension.entry("speeds", "pools")(settings)
    return inputs


def build_source(settings: ClusterSettings, store: Store | None, secret: ClusterSecret | None) -> TrafficSource:
    """Return the source of traffic.

    Raises:
        ConfigError: a file that it needs can't be read.
    """
    planning = settings.planner
    if planning.source == "prometheus":
        from penstock.adapters.sources.prometheus_source import PrometheusSource

        window = planning.prometheus.window or min(60.0, planning.throughput_interval)
        return PrometheusSource(planning.prometheus, models=list(settings.models), window=window)
    if store is None:
        raise ConfigError(
            "planner.source is streams, but no cluster is named whose frontends could be asked",
            hint="give --url of a running cluster, or set planner.source=prometheus",
        )
    return FrontendSource(
        FrontendsOf(store).urls,
        partial(signed, secret),
        models=settings.models,
    )


def build_connector(settings: ClusterSettings, store: Store | None) -> ScaleConnector:
    """Return the connector that scales the pools.

    Raises:
        ConfigError: the settings name no connector.
    """
    planning = settings.planner
    if planning.connector == "webhook":
        from penstock.adapters.connectors.webhook import WebhookConnector

        return WebhookConnector(planning.webhook, pools=pools_of(settings))
    if planning.connector != "process":
        make = extension.entry("connector", planning.connector, "planner.connector")
        connector: ScaleConnector = make(settings, pools_of(settings), partial(by_role, settings))
        return connector
    if store is None:
        raise ConfigError(
            "planner.connector is process, but no cluster is named that could be scaled",
            hint="give --url of a running cluster, or set planner.connector=virtual, webhook or kubernetes",
        )
    gpus = {name: pool.gpus for name, pool in pools_of(settings).items()}
    return DesiredStateConnector(store, patience=settings.router.request_timeout, gpus=gpus)


def by_role(settings: ClusterSettings, model: str) -> dict[Role, int]:
    """Return how many workers of each role a model begins with: prefill and decode, or aggregated.

    Raises:
        ConfigError: the model is not in the config.
    """
    entry = settings.models.get(model)
    if entry is None:
        raise ConfigError(
            f"planner.virtual.model is {model!r}, but the models are {', '.join(settings.models)}",
            hint="name one of them",
        )
    counts: dict[Role, int] = {}
    for pool in entry.pools.values():
        counts[pool.role] = counts.get(pool.role, 0) + pool.size
    mode = settings.planner.mode
    if mode in ("prefill", "decode"):
        return {role: count for role, count in counts.items() if role == mode} or {mode: 1}
    return counts or {"aggregated": 1}


def pools_of(settings: ClusterSettings) -> dict[str, Pool]:
    """Return the pools of a config as they begin, under their names in the cluster."""
    pools = {}
    for model, entry in settings.models.items():
        prefix = pool_prefix(model, len(settings.models))
        for name, pool in entry.pools.items():
            pools[prefix + name] = Pool(model=model, role=pool.role, desired=pool.size, gpus=gpus_of(pool))
    return pools


def gpus_of(pool: PoolSettings) -> int:
    """Return the GPUs of a replica: by its settings, or by its timing model; at least one."""
    simulated = pool.sim.timing.gpus if pool.engine == "sim" and pool.gpus is None else 1
    return max(1, simulated if pool.gpus is None else pool.gpus)


class FrontendsOf:
    """The frontends of a cluster, from its store; while the store can't be read, the last known ones."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: list[str] = []

    async def urls(self) -> Sequence[str]:
        """Return the admin URL of each."""
        try:
            entries = await self._store.list(FRONTENDS)
        except StoreUnavailable:
            return self._known
        cards = []
        for raw in entries.values():
            try:
                cards.append(msgspec.json.decode(raw, type=FrontendCard))
            except msgspec.DecodeError:
                continue  # of a newer release: its peers report its counts
        self._known = [card.admin_url for card in sorted(cards, key=lambda card: card.id)]
        return self._known
