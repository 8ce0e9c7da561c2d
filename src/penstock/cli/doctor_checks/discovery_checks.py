"""Doctor's checks of etcd, Kubernetes and NATS, where the config uses them: can they be reached, and accept us."""

import asyncio
import time

from penstock.adapters.kubernetes.discovery_resources import DISCOVERY_LABEL, entry_class
from penstock.adapters.kubernetes.kubernetes_login import open_client
from penstock.adapters.kubernetes.resource_watch import list_all
from penstock.adapters.kubernetes.rights import POD_POOL_RIGHTS, STORE_RIGHTS, missing_rights
from penstock.cli.doctor_checks.finding import Finding
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import PenstockError
from penstock.runtime.backends import etcd_prefix, open_etcd

SLOW = 0.1
"""Seconds for one answer of etcd, above which it is reported: each worker that joins or leaves waits for several."""


def check_discovery(settings: ClusterSettings) -> list[Finding]:
    """Check the services that the settings name."""
    discovery = settings.discovery
    findings = []
    if discovery.store == "etcd":
        findings.append(asyncio.run(_etcd(settings)))
    selectors = [pool for model in settings.models.values() for pool in model.pools.values() if pool.selector]
    if discovery.store == "kubernetes" or selectors:
        findings.append(asyncio.run(_kubernetes(settings, pods=bool(selectors))))
    if discovery.plane == "nats" or discovery.kv_events != "direct":
        findings.append(asyncio.run(_nats(settings, jetstream=discovery.kv_events == "jetstream")))
    return findings


async def _etcd(settings: ClusterSettings) -> Finding:
    where = ", ".join(settings.discovery.etcd.urls)
    try:
        client = open_etcd(settings.discovery.etcd)
        try:
            started = time.monotonic()
            await client.range(etcd_prefix(settings).encode(), values=False)
            took = time.monotonic() - started
        finally:
            await client.close()
    except PenstockError as error:
        return Finding("error", "etcd", error.message, error.hint)
    if took > SLOW:
        hint = "look at its disk and its load; membership changes wait for it"
        return Finding("warning", "etcd", f"{where} answers, but took {took:.2f} s", hint)
    return Finding("ok", "etcd", f"{where} answers")


async def _kubernetes(settings: ClusterSettings, *, pods: bool) -> Finding:
    rights = (STORE_RIGHTS if settings.discovery.store == "kubernetes" else ()) + (POD_POOL_RIGHTS if pods else ())
    try:
        client = open_client(settings.discovery.kubernetes)
        try:
            missing = await missing_rights(client, rights)
            if settings.discovery.store == "kubernetes" and not missing:
                await list_all(client, entry_class(), labels={DISCOVERY_LABEL: settings.name})
        finally:
            await client.close()
    except PenstockError as error:
        return Finding("error", "kubernetes", error.message, error.hint)
    where = f"namespace {client.namespace}"
    if missing:
        hint = f"grant them to this account in {where}, by a Role and a RoleBinding"
        return Finding("error", "kubernetes", f"rights are missing in {where}: {', '.join(missing)}", hint)
    return Finding("ok", "kubernetes", f"the API server answers, and grants every right that is needed in {where}")


async def _nats(settings: ClusterSettings, *, jetstream: bool) -> Finding:
    from nats.errors import Error

    from penstock.adapters.nats_link import TIMEOUT, NatsLink

    nats = settings.discovery.nats
    where = ", ".join(nats.urls)
    try:
        link = NatsLink(nats, "penstock doctor").start()
    except PenstockError as error:
        return Finding("error", "nats", error.message, error.hint)
    try:
        await asyncio.wait_for(link.connected.wait(), TIMEOUT + 1)
        if jetstream and link.client is not None:
            await link.client.jetstream().account_info()
    except TimeoutError:
        return Finding("error", "nats", f"{where} can't be reached: {link.problem}", "see discovery.nats")
    except Error as error:
        hint = "start the servers with --jetstream, or set discovery.kv_events to nats"
        return Finding("error", "nats", f"{where} has no JetStream for us: {error}", hint)
    finally:
        await link.close()
    return Finding("ok", "nats", f"{where} answers")
