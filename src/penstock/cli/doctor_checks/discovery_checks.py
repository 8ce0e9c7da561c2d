"""Doctor's checks of etcd, Kubernetes and NATS, where the config uses them: can they be reached, and accept us."""

import asyncio
import time

from penstock import extension
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
        check = extension.entry("doctor check", "kubernetes", "discovery.store")
        findings.append(asyncio.run(check(settings, pods=bool(selectors))))
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
