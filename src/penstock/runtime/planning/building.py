"""Who plans, where does it look and whom does it tell? The one place where each is made of the settings."""

from collections.abc import Sequence
from functools import partial

import msgspec

from penstock.adapters.connectors.scaling_seam import PoolFound, ScaleConnector
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.adapters.sources.reading import Source
from penstock.adapters.sources.streams import StreamsSource
from penstock.config.cluster import ClusterSettings, PoolSettings
from penstock.config.names import pool_prefix
from penstock.config.planner_plugins import load_plugins
from penstock.kernel.errors import ConfigError
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import Role
from penstock.planner.planner import Planner
from penstock.planner.policies import plugins_of
from penstock.runtime.peer_signature import signed
from penstock.runtime.peers import FRONTENDS, FrontendCard
from penstock.runtime.planning.inputs import inputs_of
from penstock.runtime.planning.wishing import WishConnector


def build_planner(settings: ClusterSettings) -> Planner:
    """Return the planner that the settings ask for.

    Raises:
        ConfigError: the policy can't be had, or a plugin of the operator's can't be loaded.
    """
    planning = settings.planning
    own = load_plugins(planning.plugins)
    return Planner(planning, [*plugins_of(planning, inputs_of(settings)), *own])


def build_source(settings: ClusterSettings, store: Store | None, secret: ClusterSecret | None) -> Source:
    """Return where traffic is read.

    Raises:
        ConfigError: a file that it needs can't be read.
    """
    planning = settings.planning
    if planning.source == "prometheus":
        from penstock.adapters.sources.prometheus import PrometheusSource

        window = planning.prometheus.window or min(60.0, planning.throughput_interval)
        return PrometheusSource(
            planning.prometheus, models=list(settings.models), window=window, stale_after=planning.stale_after
        )
    if store is None:
        raise ConfigError(
            "planner.source is streams, but no cluster is named whose frontends could be asked",
            hint="give --url of a running cluster, or set planner.source=prometheus",
        )
    return StreamsSource(
        FrontendsOf(store).urls,
        partial(signed, secret),
        stale_after=planning.stale_after,
        models=settings.models,
    )


def build_connector(settings: ClusterSettings, store: Store | None) -> ScaleConnector:
    """Return whoever carries scalings out.

    Raises:
        ConfigError: it is not said who that is.
    """
    planning = settings.planning
    if planning.connector == "virtual":
        from penstock.adapters.connectors.virtual import VirtualConnector
        from penstock.runtime.opening import open_etcd
        from penstock.runtime.planning.virtual import keys_of

        keys = keys_of(open_etcd(settings.discovery.etcd), planning.virtual.namespace)
        model = only_model(settings)
        return VirtualConnector(keys, planning.virtual, model=model, pools=by_role(settings, model))
    if planning.connector == "webhook":
        from penstock.adapters.connectors.webhook import WebhookConnector

        return WebhookConnector(planning.webhook, pools=pools_of(settings))
    if store is None:
        raise ConfigError(
            "planner.connector is process, but no cluster is named that could be scaled",
            hint="give --url of a running cluster, or set planner.connector=virtual or webhook",
        )
    gpus = {name: pool.gpus for name, pool in pools_of(settings).items()}
    return WishConnector(store, patience=settings.router.request_timeout, gpus=gpus)


def only_model(settings: ClusterSettings) -> str:
    """Return the model whose workers somebody else scales.

    Raises:
        ConfigError: there are several.
    """
    named = settings.planner.virtual.model
    if named is not None:
        return named
    if len(settings.models) == 1:
        return next(iter(settings.models))
    raise ConfigError(
        f"the config has {len(settings.models)} models: {', '.join(settings.models)}",
        hint="say with planner.virtual.model which of them is scaled",
    )


def by_role(settings: ClusterSettings, model: str) -> dict[Role, int]:
    """Return how many workers of each role a model begins with: prefill and decode, or those that do both.

    Raises:
        ConfigError: the model is not in the config.
    """
    entry = settings.models.get(model)
    if entry is None:
        raise ConfigError(
            f"planner.virtual.model is {model!r}, but the models are {', '.join(settings.models)}",
            hint="name one of them",
        )
    found: dict[Role, int] = {}
    for pool in entry.pools.values():
        found[pool.role] = found.get(pool.role, 0) + (len(pool.urls) or pool.replicas)
    mode = settings.planner.mode
    if mode in ("prefill", "decode"):
        return {role: count for role, count in found.items() if role == mode} or {mode: 1}
    return found or {"aggregated": 1}


def pools_of(settings: ClusterSettings) -> dict[str, PoolFound]:
    """Return the pools of a config as they begin, under the names that the cluster gives them."""
    found = {}
    for model, entry in settings.models.items():
        prefix = pool_prefix(model, len(settings.models))
        for name, pool in entry.pools.items():
            found[prefix + name] = PoolFound(
                model=model, role=pool.role, desired=len(pool.urls) or pool.replicas, gpus=gpus_of(pool)
            )
    return found


def gpus_of(pool: PoolSettings) -> int:
    """Return the GPUs of a replica: what is given to it, or what its timing model is of; at least one."""
    timing = pool.sim.timing
    simulated = max(timing.tensor_parallel, timing.expert_parallel) if pool.engine == "sim" else 1
    return max(1, simulated if pool.gpus is None else pool.gpus)


class FrontendsOf:
    """The frontends of a cluster by its store; a store that can't be read leaves those that were known."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: list[str] = []

    async def urls(self) -> Sequence[str]:
        """Return the admin URL of each."""
        try:
            found = await self._store.list(FRONTENDS)
        except StoreUnavailable:
            return self._known
        cards = []
        for raw in found.values():
            try:
                cards.append(msgspec.json.decode(raw, type=FrontendCard))
            except msgspec.DecodeError:
                continue  # of a newer release: the others know its counts, as its peers
        self._known = [card.admin_url for card in sorted(cards, key=lambda card: card.id)]
        return self._known
