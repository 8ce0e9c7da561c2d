"""Cross-checks of settings: contradictions that a single knob's range can't show, all reported at once."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from penstock.config.derived.knobs import dotted
from penstock.config.files.profile_folder import read_profile
from penstock.config.files.profile_manifest import check_profile
from penstock.config.files.timing_files import timing_files
from penstock.config.reading.problems import DEFAULT, ConfigProblem, ValueOrigin, listed
from penstock.config.reading.text_tree import TreeNode, node_at
from penstock.config.settings.cluster_settings import BUILTIN_TOKENIZER, STARTED, ClusterSettings, PoolSettings
from penstock.config.worker_names import pool_prefix
from penstock.engine.settings import checked, checked_monotone
from penstock.engine.timing.gpus import GPUS
from penstock.kernel.errors import ConfigError
from penstock.kernel.secret import LENGTH_MIN as SECRET_LENGTH_MIN
from penstock.planner.limits.contradictions import contradictions

LOOPBACK = ("localhost", "::1", "")
_POOL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_MODEL_NAME = re.compile(r"(?!-)[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,256}\Z")

_PASSWORD = "has a user or password in it, which status and logs would show"

TIERED = ("sim", "vllm")
"""Kinds of engine whose KV goes to tiers."""

Complaint = tuple[tuple[str, ...], str, str | None]
"""Path, message, hint."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    return host in LOOPBACK or host.startswith("127.")


def cross_checks(settings: ClusterSettings, root: TreeNode, known_bad: set[str]) -> list[ConfigProblem]:
    """Return the contradictions; settings already known to be wrong are skipped.

    Args:
        root: the tree of the given values, for their positions.
        known_bad: dotted names that have a problem of their own.
    """
    problems = []
    for rule in _RULES:
        for path, message, hint in rule(settings):
            name = dotted(path)
            if any(bad == name or bad.startswith(f"{name}.") or name.startswith(f"{bad}.") for bad in known_bad if bad):
                continue
            problems.append(ConfigProblem(_where(root, path), name, message, hint))
    return problems


def file_problems(settings: ClusterSettings, root: TreeNode) -> list[ConfigProblem]:
    """Return the files that the settings name and this machine lacks: certificates, tokenizers, tables, profiles.

    Args:
        root: the tree of the given values, for their positions.
    """
    named: list[tuple[tuple[str, ...], str | None]] = [
        (("frontend", "security", "tls_cert"), settings.frontend.security.tls_cert),
        (("frontend", "security", "tls_key"), settings.frontend.security.tls_key),
        (("cluster_secret_file",), settings.cluster_secret_file),
        (("planner", "classic", "forecast", "warm_up_trace"), settings.planner.classic.forecast.warm_up_trace),
    ]
    for service in ("etcd", "nats"):
        found = getattr(settings.discovery, service)
        for knob in ("ca", "cert", "key", "nkey", "creds"):
            named.append((("discovery", service, knob), getattr(found, knob, None)))
    for model, entry in settings.models.items():
        if entry.tokenizer != BUILTIN_TOKENIZER:
            named.append((("models", model, "tokenizer"), entry.tokenizer))
        for name, pool in entry.pools.items():
            if pool.engine == "sim" and not pool.urls:
                timing = ("models", model, "pools", name, "sim", "timing")
                named += [((*timing, knob), file) for knob, file in timing_files(pool.sim.timing).items()]
    problems = [
        ConfigProblem(_where(root, path), dotted(path), message, hint)
        for path, message, hint in (*_programs(settings), *_profiles(settings))
    ]
    for path, file in named:
        if file is None:
            continue
        origin = _where(root, path)
        if not Path(file).exists():
            hint = "paths count from the current folder"
            if path[-1] == "gpu":
                hint = f"a GPU is one of {', '.join(GPUS)}, or a YAML file; {hint}"
            problems.append(ConfigProblem(origin, dotted(path), f"{file} is not there", hint))
        elif path[-1] == "tokenizer" and Path(file).is_dir() and not (Path(file) / "tokenizer.json").is_file():
            problems.append(
                ConfigProblem(origin, dotted(path), f"{file} has no tokenizer.json", "name the folder that has it")
            )
    return problems


def _profiles(settings: ClusterSettings) -> Iterator[Complaint]:
    folder = settings.planner.classic.profile
    if folder is not None:
        try:
            read_profile(folder)
        except ConfigError as error:
            yield ("planner", "classic", "profile"), error.message, error.hint
    for model, entry in settings.models.items():
        for name, pool in entry.pools.items():
            timing = pool.sim.timing
            if timing.kind != "table" or timing.profile is None or not Path(timing.profile).is_dir():
                continue
            try:
                check_profile(timing.profile, timing.model or model, None if pool.engine == "sim" else pool.engine)
            except ConfigError as error:
                yield ("models", model, "pools", name, "sim", "timing", "profile"), error.message, error.hint


_PROGRAMS = {
    "vllm": "install vLLM in an environment of its own, and give the path of its vllm program",
    "llamacpp": "give the path of llama-server, or of the Python in whose environment llama-cpp-python[server] is",
}


def _programs(settings: ClusterSettings) -> Iterator[Complaint]:
    for model, entry in settings.models.items():
        for name, pool in entry.pools.items():
            if pool.urls or pool.engine not in _PROGRAMS:
                continue
            path = ("models", model, "pools", name)
            if shutil.which(pool.program) is None:
                yield (*path, "command"), f"{pool.program} is no program that can be started", _PROGRAMS[pool.engine]
            if pool.engine == "llamacpp" and not Path(pool.model_path or "").expanduser().is_file():
                yield (*path, "model_path"), f"there is no file {pool.model_path}", "name the model's GGUF file"


def _models(settings: ClusterSettings) -> Iterator[Complaint]:
    if not settings.models:
        yield ("models",), "there is no model", "add one, or leave the key out for the simulated default"
    ids: dict[str, tuple[str, ...]] = {}
    for model, entry in settings.models.items():
        path = ("models", model)
        if not _MODEL_NAME.match(model):
            yield path, f"{model!r} is no name for a model", "take 1 to 256 characters without spaces, not '-' first"
        if not entry.pools:
            yield path, "has no pool, so nothing would serve it", "add pools: {main: {replicas: 4}}"
        for name in entry.pools:
            worker = pool_prefix(model, len(settings.models)) + name
            if worker in ids:
                yield (*path, "pools", name), f"its workers would be named like those of {dotted(ids[worker])}", None
            ids[worker] = (*path, "pools", name)
            if not _POOL_NAME.match(name):
                hint = "take up to 64 letters, digits, '_', '.' and '-'; it becomes part of its workers' names"
                yield (*path, "pools", name), f"{name!r} is no name for a pool", hint
    for worker, where in ids.items():
        base, _, number = worker.rpartition("_")
        if number.isdigit() and base in ids:
            hint = "the state file names the replicas of a pool so; take a name that does not end in _ and a number"
            yield where, f"reads like replica {number} of {dotted(ids[base])}", hint


def _block_sizes(settings: ClusterSettings) -> Iterator[Complaint]:
    for model, entry in settings.models.items():
        sizes: dict[int, str] = {}
        for name, pool in entry.pools.items():
            size = _block_size(pool)
            if size is None:
                continue
            sizes.setdefault(size, name)
            if len(sizes) > 1:
                first, other = next(iter(sizes.items()))
                at = ("sim", "block_size") if pool.block_size is None else ("block_size",)
                yield (
                    ("models", model, "pools", name, *at),
                    f"is {size}, but pool {other} of the same model has {first}",
                    "one model has one block size, or no prefix would match across its pools",
                )
                break


def _handoffs(settings: ClusterSettings) -> Iterator[Complaint]:
    """Check that prefill and decode pools of a model agree on their hand-off; otherwise KV can't be transferred."""
    for model, entry in settings.models.items():
        for knob in ("handoff", "layout"):
            told = {
                name: value
                for name, pool in entry.pools.items()
                if pool.role in ("prefill", "decode") and (value := getattr(pool, knob)) is not None
            }
            first = next(iter(told.items()), None)
            for name, value in told.items():
                if first is not None and value != first[1]:
                    yield (
                        ("models", model, "pools", name, knob),
                        f"is {value}, but pool {first[0]} of the same model has {first[1]}",
                        "what one of them writes the other has to read",
                    )


def _roles(path: tuple[str, ...], pool: PoolSettings, roles: set[str]) -> Iterator[Complaint]:
    """Check a pool's role in the flow of stages; ``roles``: those of all pools of its model."""
    if pool.role in ("prefill", "encode") and not roles & {"decode", "aggregated"}:
        yield (*path, "role"), f"is {pool.role}, but no pool of its model answers clients", "add one of role decode"
    if pool.role in ("prefill", "decode") and pool.engine == "llamacpp":
        yield (*path, "role"), f"is {pool.role}, but no hand-off of KV is known of llama.cpp", "leave role out"
    if pool.engine == "vllm" and not pool.urls and pool.handoff == "bootstrap":
        yield (*path, "handoff"), "is bootstrap, which is SGLang's way; vLLM has completed and push", None


def _caches(settings: ClusterSettings) -> Iterator[Complaint]:
    """Check that every tier of a pool has what it needs: an engine that uses it, host memory above it, and a place."""
    for model, entry in settings.models.items():
        for name, pool in entry.pools.items():
            path, cache = ("models", model, "pools", name, "cache"), pool.cache
            if cache.host and (pool.urls or pool.engine not in TIERED):
                hint = f"only engines of kind {listed(TIERED)} that are started here have tiers"
                yield (*path, "host"), "these engines would have no tiers", hint
            if not cache.host and (cache.disk or cache.disk_dirs or cache.object_url or cache.peers):
                yield (*path, "host"), "is 0, and all blocks pass through host memory", "give it some, such as 8GiB"
            elif bool(cache.disk) != bool(cache.disk_dirs):
                yield (*path, "disk"), "and disk_dirs need each other: how much, and where", "set both, or neither"


def _pools(settings: ClusterSettings) -> Iterator[Complaint]:
    seen: dict[str, str] = {}
    for model, entry in settings.models.items():
        for name, pool in entry.pools.items():
            path = ("models", model, "pools", name)
            yield from _roles(path, pool, {other.role for other in entry.pools.values()})
            if pool.engine not in STARTED and not pool.urls:
                hint = (
                    f"start the servers yourself and list their URLs; only {listed(STARTED)} engines are started here"
                )
                yield (*path, "urls"), f"engine {pool.engine} needs urls", hint
            for url in pool.urls:
                fault = _url_fault(url, settings)
                if fault is not None:
                    yield (*path, "urls"), f"{_without_password(url)!r} {fault[0]}", fault[1]
                key = url.rstrip("/")
                if key in seen:
                    yield (*path, "urls"), f"{url!r} stands in pool {seen[key]} already", "name each server once"
                seen[key] = dotted(path)
            for label in ("tp_size", "pp_size"):
                size = pool.labels.get(label, "1")
                if not size.isdecimal() or not int(size):
                    hint = "over how many GPUs each engine spreads its tensors, or its layers: 1 or more"
                    yield (*path, "labels"), f"{label} is {size!r}", hint
            yield from _endpoints(path, pool)
            if pool.engine == "sim" and not pool.urls:
                yield from _sim(path, pool)


def _endpoints(path: tuple[str, ...], pool: PoolSettings) -> Iterator[Complaint]:
    known = [url.rstrip("/") for url in pool.urls]
    for name in ("events", "replay", "stats"):
        for entry in getattr(pool, name):
            url, equals, endpoint = entry.rpartition("=")
            if equals and url.rstrip("/") not in known:
                yield (*path, name), f"{entry!r} names a server that is not in urls", f"there is {listed(known)}"
            elif not equals and len(known) != 1:
                yield (*path, name), f"{entry!r} does not say whose it is", "write it as URL=ENDPOINT"
            if not re.match(r"@?(tcp|ipc)://.", endpoint):
                yield (*path, name), f"{endpoint!r} is no ZMQ endpoint", "write it as tcp://HOST:PORT"


def _sim(path: tuple[str, ...], pool: PoolSettings) -> Iterator[Complaint]:
    for check in (lambda: checked(pool.sim), lambda: checked_monotone(pool.sim.timing)):
        try:
            check()
        except ConfigError as error:
            yield (*path, "sim"), error.message, error.hint
    if pool.block_size is not None and pool.block_size != pool.sim.block_size:
        hint = "leave block_size out: the engine tells it"
        yield (*path, "block_size"), f"is {pool.block_size}, but sim.block_size is {pool.sim.block_size}", hint


def _without_password(url: str) -> str:
    return re.sub(r"//[^/]*@", "//***@", url)


def _url_fault(url: str, settings: ClusterSettings) -> tuple[str, str | None] | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no URL: {error}", None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "is no URL of a server", "write it as http://HOST:PORT"
    if parts.username is not None or parts.password is not None:
        return _PASSWORD, "put a proxy that knows the password before the server"
    if parts.path.rstrip("/").endswith("/v1"):
        return "ends in /v1", "leave /v1 out; the route is added to it"
    front = settings.frontend
    if port and port in (front.port, front.admin_port) and is_loopback(parts.hostname) and is_loopback(front.host):
        return "is the cluster's own endpoint", "name an engine, or give frontend.port another number"
    return None


def _frontend(settings: ClusterSettings) -> Iterator[Complaint]:
    front, security = settings.frontend, settings.frontend.security
    if front.admin_port and front.admin_port == front.port:
        yield ("frontend", "admin_port"), f"is {front.port}, like frontend.port", "leave it out to share the port"
    if front.processes > 1 and front.port == 0:
        hint = "give frontend.port a number"
        yield ("frontend", "processes"), f"{front.processes} processes can't share a port that the system picks", hint
    if front.processes > 1 and front.admin_port is not None:
        hint = "leave admin_port out and set security.admin_keys"
        yield ("frontend", "admin_port"), f"{front.processes} processes can't share one admin port", hint
    if not is_loopback(front.host) and not security.api_keys and not security.insecure:
        yield (
            ("frontend", "host"),
            f"{front.host} is reached by other machines, but there is no API key",
            "set PENSTOCK_FRONTEND__SECURITY__API_KEYS, or frontend.security.insecure: true if you mean it",
        )
    if front.otlp_endpoint is not None and "@" in urlsplit(front.otlp_endpoint).netloc:
        yield ("frontend", "otlp_endpoint"), _PASSWORD, "give it by OTEL_EXPORTER_OTLP_HEADERS"
    for key, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if getattr(security, key) is not None and getattr(security, other) is None:
            yield ("frontend", "security", key), f"stands without {other}", "HTTPS needs both"
    for name in ("api_keys", "admin_keys"):
        keys = getattr(security, name)
        if any(not key or not key.isascii() or any(c.isspace() for c in key) for key in keys):
            yield ("frontend", "security", name), "has a key that is empty, has spaces or is not ASCII", None
        if len(set(keys)) != len(keys):
            yield ("frontend", "security", name), "has the same key twice", None
    if both := set(security.api_keys) & set(security.admin_keys):
        hint = "a client's key must not open /admin"
        yield ("frontend", "security", "admin_keys"), f"shares {len(both)} key with api_keys", hint
    wrong = [route for route in front.proxied_routes if not re.fullmatch(r"/v1(/[A-Za-z0-9_.{}-]+)+", route)]
    if wrong:
        hint = "write them as /v1/embeddings"
        yield ("frontend", "proxied_routes"), f"{listed(wrong)} is no route under /v1", hint


def _discovery(settings: ClusterSettings) -> Iterator[Complaint]:
    found = settings.discovery
    if found.host in ("", "0.0.0.0", "::", "*"):
        yield ("discovery", "host"), f"is {found.host!r}, which no other machine can connect to", "name one address"
    for service, schemes in (("etcd", ("http", "https")), ("nats", ("nats", "tls"))):
        group = getattr(found, service)
        path = ("discovery", service)
        if not group.urls:
            yield (*path, "urls"), "is empty", f"write it as {schemes[0]}://HOST:PORT"
        for url in group.urls:
            parts = urlsplit(url)
            if parts.scheme not in schemes or not parts.hostname:
                hint = f"write it as {schemes[0]}://HOST:PORT"
                yield (*path, "urls"), f"{_without_password(url)!r} is no URL of {service}", hint
            if parts.username is not None or parts.password is not None:
                yield (*path, "urls"), f"{_without_password(url)!r} {_PASSWORD}", "give user and password by themselves"
        if (group.user is None) != (group.password is None):
            yield (*path, "user"), "and password come together", None
        if (group.cert is None) != (group.key is None):
            yield (*path, "cert"), "and key come together", None
    for endpoint in found.forwarder:
        if not re.match(r"(tcp|ipc)://.", endpoint):
            yield ("discovery", "forwarder"), f"{endpoint!r} is no ZMQ endpoint", "write it as tcp://HOST:PORT"


def _secret(settings: ClusterSettings) -> Iterator[Complaint]:
    given = settings.cluster_secret
    if given is None:
        return
    if len(given) < SECRET_LENGTH_MIN:
        hint = "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"
        yield ("cluster_secret",), f"has {len(given)} characters, which is too few to be safe", hint
    if settings.cluster_secret_file is not None:
        yield ("cluster_secret_file",), "stands beside cluster_secret", "give one of them"


def _planner(settings: ClusterSettings) -> Iterator[Complaint]:
    for path, message, hint in contradictions(settings.planner):
        yield ("planner", *path), message, hint


def _block_size(pool: PoolSettings) -> int | None:
    if pool.block_size is not None:
        return pool.block_size
    return pool.sim.block_size if pool.engine == "sim" and not pool.urls else None


def _where(root: TreeNode, path: tuple[str, ...]) -> ValueOrigin:
    """Return where a setting was given, or the nearest given place around it."""
    for end in range(len(path), 0, -1):
        node = node_at(root, path[:end])
        if node is not root and node.at is not DEFAULT:
            return node.at
    return root.at if root.at is not DEFAULT else ValueOrigin("default", "config")


_RULES: tuple[Callable[[ClusterSettings], Iterator[Complaint]], ...] = (
    _models,
    _pools,
    _block_sizes,
    _handoffs,
    _caches,
    _frontend,
    _discovery,
    _secret,
    _planner,
)
