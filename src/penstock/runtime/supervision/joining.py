"""`penstock join`: adds engines of this machine to a cluster that runs already."""

import asyncio
import json
import os
import secrets
import ssl
import urllib.error
import urllib.request
from pathlib import Path

from penstock.adapters.connectors.state_file import StateFile, passing_namespace
from penstock.adapters.task_cancel import cancel_all
from penstock.config.cluster_secret_file import secret_text, stored_secret
from penstock.config.reading.load import resolved_yaml
from penstock.config.settings.cluster_settings import ClusterSettings, PoolSettings
from penstock.kernel.errors import ConfigError, PenstockError
from penstock.kernel.plurals import counted
from penstock.kernel.secret import ClusterSecret
from penstock.runtime.backends import open_relays, open_store
from penstock.runtime.cluster_state.membership import RevokedLeases
from penstock.runtime.records.run_folder import RunFolder
from penstock.runtime.supervision.engine_fleet import EngineFleet
from penstock.runtime.supervision.reconciler import Reconciler
from penstock.runtime.supervision.terminal import Say, on_signals


def join(
    cluster: str,
    pool: PoolSettings,
    model: str,
    settings: ClusterSettings,
    tls: ssl.SSLContext | None = None,
    *,
    name: str = "joined",
    say: Say = print,
) -> int:
    """Add engines of this machine to a running cluster until Ctrl-C.

    Args:
        cluster: the frontend's URL, or the cluster's run folder; used only where the store is sqlite.
        settings: where the cluster keeps its membership, and on which address these engines listen.
    Raises:
        ConfigError: there is no cluster, or it keeps its membership where this process can't reach it.
    """
    if settings.discovery.store == "sqlite":
        folder = _run_folder_of(cluster, tls)
        secret = stored_secret(folder)
    else:
        if settings.cluster_secret is None and settings.cluster_secret_file is None:
            raise ConfigError(
                "the cluster's secret is not given, so nothing of ours would be believed",
                hint="set PENSTOCK_CLUSTER_SECRET, or cluster_secret_file, as on the cluster's own machine",
            )
        folder = RunFolder.create(settings.runs.dir, "join", config=resolved_yaml(settings)).path
        secret = secret_text(settings)
    return asyncio.run(_join_cluster(folder, secret, pool, model, settings, name, say))


async def _join_cluster(
    folder: Path,
    secret: str | None,
    pool: PoolSettings,
    model: str,
    settings: ClusterSettings,
    name: str,
    say: Say,
) -> int:
    stopping, hurry = asyncio.Event(), asyncio.Event()
    on_signals(stopping, hurry)
    ttl = settings.discovery.ttl
    revoked = RevokedLeases()
    cluster_secret = None if secret is None else ClusterSecret(secret)
    store = open_store(settings, folder, cluster_secret, revoked=revoked.add)
    token = secrets.token_hex(4)
    state = StateFile.open(folder / "state", passing_namespace(name, token))
    state.own(folder)
    host = settings.discovery.host
    logs = folder / "logs"
    relays = open_relays(settings, cluster_secret)
    fleet = EngineFleet(
        store,
        settings.supervise,
        state,
        logs=logs,
        ttl=ttl,
        secret=secret,
        host=host,
        relays=relays,
        kubernetes=settings.discovery.kubernetes,
    )
    fleet.crashes.noted = lambda crash: say(f"{crash.name} {crash.reason}; it is started again")
    operating: list[asyncio.Task[None]] = []
    status = 0
    try:
        ids = fleet.add_pool(model, name, pool, prefix=f"{token}-")
        await fleet.start()
        operating = [
            asyncio.create_task(Reconciler(store, fleet, ttl=ttl).run(), name="operator"),
            asyncio.create_task(revoked.run(store), name="revoked"),
        ]
        ready = asyncio.create_task(fleet.ready())
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if ready.done():
            ready.result()
            say(f"Joined with {counted(len(ids), 'worker')} of {model}: {', '.join(ids)}. Ctrl-C takes them out.")
            await stopping.wait()
    except PenstockError as error:
        say(f"penstock: {error}")
        status = 1
    finally:
        await cancel_all(operating)
        await fleet.stop(at_once=hurry.is_set())
        state.close()
        await store.close()
    return status


def _run_folder_of(cluster: str, tls: ssl.SSLContext | None) -> Path:
    if not cluster.startswith(("http://", "https://")):
        folder = Path(cluster)
        if not (folder / "discovery").is_dir():
            raise ConfigError(
                f"{folder} is not a run folder of a live cluster", hint="penstock status shows the folder"
            )
        return folder
    request = urllib.request.Request(f"{cluster.rstrip('/')}/admin/status")
    admin = os.environ.get("PENSTOCK_ADMIN_KEY")
    if admin:
        request.add_header("authorization", f"Bearer {admin}")
    try:
        with urllib.request.urlopen(request, timeout=5.0, context=tls) as answer:
            folder = Path(json.load(answer)["run"])
    except (urllib.error.URLError, OSError, ValueError, KeyError) as error:
        refused = isinstance(error, urllib.error.HTTPError) and error.code in (401, 403)
        hint = "give the right key with PENSTOCK_ADMIN_KEY" if refused else "penstock up starts one"
        raise ConfigError(f"no cluster answers at {cluster}: {error}", hint=hint) from error
    if not (folder / "discovery").is_dir():
        raise ConfigError(
            f"the cluster at {cluster} keeps its membership in {folder}, which is not on this machine",
            hint="a cluster of several machines keeps it in an etcd: see discovery.store",
        )
    return folder
