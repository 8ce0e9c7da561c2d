"""The doctor's checks of this machine, the config and the cluster; each yields findings and changes nothing."""

import asyncio
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from penstock import extension
from penstock.adapters.engines.http.engine_access import (
    EngineAccess,
    EngineAccesses,
    engine_session,
    read_access,
    refused,
)
from penstock.adapters.engines.http.engine_http import EngineServer
from penstock.adapters.engines.pool_overrides import WITH_TIERS
from penstock.adapters.listen_address import bind_error
from penstock.adapters.tls import client_context
from penstock.cli.doctor_checks.cache_probe import MetricsReader, engine_metrics, probe
from penstock.cli.doctor_checks.discovery_checks import check_discovery
from penstock.cli.doctor_checks.finding import Finding, Level
from penstock.cli.doctor_checks.open_ports import check_open_ports
from penstock.cli.shared.admin_client import AdminClient, ClusterUnreachable, RequestRefused
from penstock.config.checks import file_problems
from penstock.config.reading.load import load
from penstock.config.reading.problems import ConfigProblems
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend.admin.admin_answers import ClusterStatus
from penstock.kernel.errors import ConfigError, bind_hint
from penstock.kernel.plurals import counted

PYTHON_MIN = (3, 11)
FILES_WARN = 4096
"""Open files below which a few thousand streams do not fit: each holds two sockets."""
DISK_WARN = 1 << 30
DISK_ERROR = 100 << 20
SKEW_WARN = 5.0
"""Seconds; the HTTP Date header has whole seconds, so a smaller skew can't be measured."""
PROBE_TIMEOUT = 60.0
"""Seconds for a prompt of some blocks and one token; a busy engine takes a while."""
ACCESS_TIMEOUT = 2.0
"""Seconds for a server's list of models; one that is slower is not looked at."""
CLOCK_MIN = 1_700_000_000
"""A clock before this (November 2023) was never set."""


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """Whether workers are sent prompts, those of ``unknown`` kind too, and with which key."""

    on: bool = True
    unknown: bool = False
    api_key: str | None = None


def examine(
    config: str | None, url: str, admin_key: str | None, *, url_was_given: bool, probing: ProbeOptions
) -> list[Finding]:
    """Run every check.

    Args:
        config: file to start, or None for the default.
        url_was_given: the operator expects a cluster there, so that its absence is an error.
    """
    settings, findings = check_config(config)
    client = AdminClient(url, admin_key, timeout=5.0)
    status, of_cluster = check_cluster(client, must_run=url_was_given)
    findings = [*check_python(), *check_files_limit(), *check_clock(client), *findings]
    if settings is not None:
        findings += check_start(settings, status is not None)
        findings += check_discovery(settings)
    if status is not None:
        metrics = metrics_reader(settings)
        of_cluster += [*check_status(status), *check_open_ports(status)]
        of_cluster += [*check_caches(client, url, status, probing, metrics)]
    return [*findings, *of_cluster]


def check_python() -> Iterator[Finding]:
    """Check that the interpreter is new enough."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info < PYTHON_MIN:
        yield Finding("error", "python", f"Python {version} is too old", "install Python 3.11 or newer")
    else:
        yield Finding("ok", "python", f"Python {version}")


def check_files_limit() -> Iterator[Finding]:
    """Check that enough sockets fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES_WARN:
        highest = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        yield Finding(
            "warning",
            "open files",
            f"a process may open {soft} files, so about {soft // 2} streams",
            f"'ulimit -n {FILES_WARN}' before the start raises it (the hard limit is {highest})",
        )
    else:
        yield Finding("ok", "open files", "the limit leaves room for thousands of streams")


def check_clock(client: AdminClient) -> Iterator[Finding]:
    """Check that the wall clock is set, and near the cluster's. Call it after a request to the cluster."""
    now = time.time()
    if now < CLOCK_MIN:
        yield Finding("error", "clock", "the clock was never set", "set it: certificates and run folders need it")
        return
    skew = 0.0
    if client.date is not None:
        try:
            skew = abs(now - parsedate_to_datetime(client.date).timestamp())
        except ValueError:
            yield Finding("info", "clock", "the cluster sends a date that can't be read")
            return
    if skew > SKEW_WARN:
        text = "this machine's clock differs from the cluster's by more than 5 s"
        yield Finding("warning", "clock", text, "run a time service on both, or times in logs will not match")
    else:
        yield Finding("ok", "clock", "set" if client.date is None else "agrees with the cluster's")


def check_config(config: str | None) -> tuple[ClusterSettings | None, list[Finding]]:
    """Check that this config could be started."""
    name = config or "the default config"
    try:
        loaded = load(config, (), os.environ)
    except ConfigProblems as error:
        return None, [Finding("error", "config", str(problem), problem.hint) for problem in error.problems]
    settings = loaded.settings
    findings = [
        Finding("error", "tokenizer" if problem.path.endswith("tokenizer") else "config", str(problem), problem.hint)
        for problem in file_problems(settings, loaded.root)
    ]
    blind = [model for model, entry in settings.models.items() if entry.tokenizer is None]
    if blind:
        findings.append(_no_tokenizer(blind))
    return settings, findings or [Finding("ok", "config", f"{name} has no problem")]


def check_start(settings: ClusterSettings, cluster_runs: bool) -> Iterator[Finding]:
    """Check what a start takes of this machine: free ports, a run folder, servers whose names and access are right."""
    yield from check_ports(settings, cluster_runs)
    yield from check_disk(Path(settings.runs.dir))
    yield from check_access(settings)


def check_access(settings: ClusterSettings) -> Iterator[Finding]:
    """Check that the keys of attached servers can be read, their names resolve, and those that answer let us in."""
    for model, entry in settings.models.items():
        for name, pool in entry.pools.items():
            where = f"models.{model}.pools.{name}"
            try:
                access = read_access(pool.access, f"{where}.access")
            except ConfigError as error:
                yield Finding("error", "servers", error.message, error.hint)
                continue
            for url, fault in asyncio.run(_refusals(pool.urls, access, where)).items():
                hint = f"correct {where}.urls or access; docs/guides/engines.md: engines behind a key or TLS"
                yield Finding("error", "servers", f"{url} {fault}", hint)


async def _refusals(urls: Sequence[str], access: EngineAccess, where: str) -> dict[str, str]:
    """Return which servers refuse us, and how; one that does not answer may come later."""
    async with engine_session(lambda url: access) as http:
        servers = [EngineServer(http, url, ACCESS_TIMEOUT) for url in urls]
        statuses = await asyncio.gather(*(server.status("/v1/models") for server in servers))
    found = {}
    for server, status in zip(servers, statuses, strict=True):
        if server.fault is not None or refused(status, where):
            found[server.url] = (
                f"does not answer{server.reason}" if status is None else f"answers {status}{refused(status, where)}"
            )
    return found


def is_running(settings: ClusterSettings) -> bool:
    """Return whether a cluster answers where this config would listen: then its ports are its own."""
    front = settings.frontend
    host = "127.0.0.1" if front.host in ("", "0.0.0.0", "::") else front.host
    scheme = "https" if front.security.tls_cert else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{front.admin_port or front.port}"
    try:
        AdminClient(url, timeout=1.0, tls=client_context(ca=None, verify=False)).get("/admin/status", ClusterStatus)
    except RequestRefused as error:
        return error.status in (401, 403)
    except ClusterUnreachable:
        return False
    return True


def check_ports(settings: ClusterSettings, cluster_runs: bool) -> Iterator[Finding]:
    """Check that the ports are free; a port that the running cluster holds is fine."""
    if cluster_runs:
        return
    host = settings.frontend.host
    for name, port in (
        ("frontend.port", settings.frontend.port),
        ("frontend.admin_port", settings.frontend.admin_port),
    ):
        if not port:
            continue
        error = bind_error(host if name == "frontend.port" else "127.0.0.1", port)
        if error is None:
            yield Finding("ok", "ports", f"{name} {port} is free")
        else:
            yield Finding(
                "error",
                "ports",
                f"{name} {port} on {host}: {error.strerror or error}",
                bind_hint(error, f"choose another: --{name} 0 takes any"),
            )


def check_disk(runs: Path) -> Iterator[Finding]:
    """Check that run folders can be written, and that there is room."""
    folder = runs.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Finding("error", "run folder", f"{folder} can't be written", "set runs.dir to a folder of your own")
        return
    free = shutil.disk_usage(existing).free
    if free < DISK_ERROR:
        yield Finding(
            "error", "run folder", f"less than 100 MiB are free for {runs}", "remove old runs, or set runs.dir"
        )
    elif free < DISK_WARN:
        yield Finding(
            "warning", "run folder", f"less than 1 GiB is free for {runs}", "remove old runs, or set runs.dir"
        )
    else:
        yield Finding("ok", "run folder", f"{runs} can be written and has room")


def check_cluster(client: AdminClient, *, must_run: bool) -> tuple[ClusterStatus | None, list[Finding]]:
    """Check that a cluster answers."""
    try:
        status = client.get("/admin/status", ClusterStatus)
    except ClusterUnreachable as error:
        level: Level = "error" if must_run else "info"
        return None, [Finding(level, "cluster", error.message, error.hint)]
    except RequestRefused as error:
        return None, [Finding("error", "cluster", error.message, error.hint)]
    count = len(status.workers)
    return status, [Finding("ok", "cluster", f"{client.url} answers, with {counted(count, 'worker')}")]


def check_status(status: ClusterStatus) -> Iterator[Finding]:
    """Return the cluster's own findings, and those that follow from its numbers."""
    for finding in status.findings:
        yield Finding(finding.level, "cluster", finding.text, finding.hint)
    for worker in status.workers:
        if worker.breaker != "closed":
            text = f"the breaker of {worker.id} is {worker.breaker} after {worker.failures} failures"
            yield Finding("warning", "workers", text, "its log in the run folder has the reason")
    blind = [model.name for model in status.models if not model.tokenizer]
    if blind and not any("no local tokenizer" in finding.text for finding in status.findings):
        yield _no_tokenizer(blind)
    if not status.findings:
        yield Finding("ok", "cluster", "it has no findings of its own")


def metrics_reader(settings: ClusterSettings | None) -> MetricsReader:
    """Return what reads engines' metrics, with the access of the attached servers whose keys can be read."""
    accesses = EngineAccesses({} if settings is None else settings.models)
    for model, entry in ({} if settings is None else settings.models).items():
        for name, pool in entry.pools.items():
            for server in pool.urls:
                with suppress(ConfigError):  # `check_access` has said it
                    accesses.enter(server, model, name)
    return lambda server: engine_metrics(server, accesses.at(server))


def check_caches(
    client: AdminClient, url: str, status: ClusterStatus, probing: ProbeOptions, metrics: MetricsReader
) -> Iterator[Finding]:
    """Check that each engine's tiers give back what they take, and that our view of its cache is right."""
    for worker in status.workers:
        if worker.engine in WITH_TIERS:
            for name in extension.names("engine check"):
                yield from extension.entry("engine check", name)(worker.id, metrics(worker.url))
    if not probing.on:
        return
    where = url
    try:
        AdminClient(url, probing.api_key, timeout=5.0).get("/v1/models", dict)
    except (RequestRefused, ClusterUnreachable) as error:
        if isinstance(error, RequestRefused) and error.status == 404:  # /admin has a port of its own, and this is it
            where = status.endpoint or url
    keyed = AdminClient(where, probing.api_key, timeout=PROBE_TIMEOUT)
    yield from probe(client, keyed, status, unknown=probing.unknown, metrics=metrics)


def _no_tokenizer(models: list[str]) -> Finding:
    return Finding(
        "warning",
        "tokenizer",
        f"{', '.join(models)} without a local tokenizer: prompts are routed by hashed text blocks",
        "set models.NAME.tokenizer to the model's folder, and KV events can be matched",
    )
