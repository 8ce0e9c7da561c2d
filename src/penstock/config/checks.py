"""Cross-checks of settings: contradictions that a single knob's range can't show, all reported at once."""

import re
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from penstock import extension
from penstock.config.derived.knobs import dotted
from penstock.config.name_checks import FILE, name_complaints
from penstock.config.reading.problems import DEFAULT, Complaint, ConfigProblem, ValueOrigin, listed
from penstock.config.reading.text_tree import TreeNode, node_at
from penstock.config.settings.client_fields import STEERING, strange_fields
from penstock.config.settings.cluster_settings import BUILTIN_TOKENIZER, STARTED, ClusterSettings, PoolSettings
from penstock.config.settings.frontend_settings import ROOT_ROUTES
from penstock.config.settings.parser_names import (
    OWN_PREFIX,
    REASONING_PARSERS,
    TOOL_PARSERS,
    family_of,
    flags_of,
    own_reasoning_parser,
    own_tool_parser,
)
from penstock.config.settings.tenant_settings import hashed
from penstock.config.worker_names import pool_prefix
from penstock.kernel.errors import ConfigError
from penstock.kernel.secret import LENGTH_MIN as SECRET_LENGTH_MIN
from penstock.kernel.values import Pool
from penstock.planner.limits.contradictions import contradictions, of_pools, of_replicas
from penstock.router.selection.router_plugins import RouterPlugins

DEFAULT_MODELS = ClusterSettings().models
LOOPBACK = ("localhost", "::1", "")
_POOL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_MODEL_NAME = re.compile(r"(?!-)[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,256}\Z")

_PASSWORD = "has a user or password in it, which status and logs would show"

ADAPTED = ("sim", "vllm", "sglang", "openai")
"""Kinds of engine that may load LoRA adapters while they run."""
FROM_HERE = "paths count from the current folder"


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
    for rule in (*_RULES, *extension.entries("check").values()):
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
    ]
    for service in ("etcd", "nats"):
        found = getattr(settings.discovery, service)
        for knob in ("ca", "cert", "key", "nkey", "creds"):
            named.append((("discovery", service, knob), getattr(found, knob, None)))
    for model, entry in settings.models.items():
        if entry.tokenizer != BUILTIN_TOKENIZER:
            named.append((("models", model, "tokenizer"), entry.tokenizer))
        named.append((("models", model, "chat_template"), entry.chat_template))
        if entry.system_prompt is not None and entry.system_prompt.startswith(FILE):
            named.append((("models", model, "system_prompt"), entry.system_prompt.removeprefix(FILE)))
        named.append((("models", model, "adapter_folder"), entry.adapter_folder))
        for name, pool in entry.pools.items():
            access = ("models", model, "pools", name, "access")
            named += [
                ((*access, knob), getattr(pool.access, knob)) for knob in ("api_key_file", "ca", "cert", "cert_key")
            ]
            for header, value in pool.access.headers.items():
                named.append(((*access, "headers", header), value[5:] if value.startswith(FILE) else None))
    found = [*_programs(settings)]
    for check in extension.entries("file check").values():
        found += check(settings)
    problems = [ConfigProblem(_where(root, path), dotted(path), message, hint) for path, message, hint in found]
    for path, file in named:
        if file is None:
            continue
        origin = _where(root, path)
        if not Path(file).exists():
            problems.append(ConfigProblem(origin, dotted(path), f"{file} is not there", FROM_HERE))
        elif path[-1] == "tokenizer" and Path(file).is_dir() and not (Path(file) / "tokenizer.json").is_file():
            problems.append(
                ConfigProblem(origin, dotted(path), f"{file} has no tokenizer.json", "name the folder that has it")
            )
    return problems


_PROGRAMS = {
    "vllm": "install vLLM in an environment of its own, and give the path of its vllm program",
    "sglang": "install SGLang in an environment of its own, and give the path of its python",
    "llamacpp": "give the path of llama-server, or of the Python in whose environment llama-cpp-python[server] is",
}


def _programs(settings: ClusterSettings) -> Iterator[Complaint]:
    for model, entry in settings.models.items():
        for name, pool in entry.pools.items():
            if pool.attached or pool.engine not in _PROGRAMS:
                continue
            path = ("models", model, "pools", name)
            if shutil.which(pool.program) is None:
                yield (*path, "command"), f"{pool.program} is not a program that can be started", _PROGRAMS[pool.engine]
            if pool.engine == "llamacpp" and not Path(pool.model_path or "").expanduser().is_file():
                yield (*path, "model_path"), f"there is no file {pool.model_path}", "name the model's GGUF file"


def _model_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    if not settings.models:
        yield ("models",), "there is no model", "add one, or leave the key out for the simulated default"
    ids: dict[str, tuple[str, ...]] = {}
    for model, entry in settings.models.items():
        path = ("models", model)
        if not _MODEL_NAME.match(model):
            yield (
                path,
                f"{model!r} is not a valid name for a model",
                "take 1 to 256 characters without spaces, not '-' first",
            )
        if not entry.pools:
            yield path, "has no pool, so nothing would serve it", "add pools: {main: {replicas: 4}}"
        if entry.render not in (None, "engine", "off") and (fault := _url_fault(entry.render, settings)) is not None:
            yield (*path, "render"), f"{_without_password(entry.render)!r} {fault[0]}", fault[1]
        for name in entry.pools:
            worker = pool_prefix(model, len(settings.models)) + name
            if worker in ids:
                yield (*path, "pools", name), f"its workers would be named like those of {dotted(ids[worker])}", None
            ids[worker] = (*path, "pools", name)
            if not _POOL_NAME.match(name):
                hint = "take up to 64 letters, digits, '_', '.' and '-'; it becomes part of its workers' names"
                yield (*path, "pools", name), f"{name!r} is not a valid name for a pool", hint
    for worker, where in ids.items():
        base, _, number = worker.rpartition("_")
        if number.isdigit() and base in ids:
            hint = "the state file names the replicas of a pool so; take a name that does not end in _ and a number"
            yield where, f"reads like replica {number} of {dotted(ids[base])}", hint


def _adapter_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    owners: dict[str, str] = {}
    for model, entry in settings.models.items():
        path = ("models", model, "adapters")
        if (entry.adapters or entry.adapter_folder is not None) and not any(
            pool.engine in ADAPTED or pool.max_cpu_loras for pool in entry.pools.values()
        ):
            yield path, "no engine of the model's pools loads adapters", f"such are {', '.join(ADAPTED)}"
        for name in entry.adapters:
            if not _MODEL_NAME.match(name):
                yield (
                    (*path, name),
                    f"{name!r} is not a valid name for an adapter",
                    "take 1 to 256 characters without spaces",
                )
            if name in settings.models or name in owners:
                of = "a model" if name in settings.models else f"an adapter of {owners[name]}"
                yield (*path, name), f"{name} is {of} as well", "clients name it where they name a model"
            owners[name] = model
        for name in entry.adapter_workers:
            if name not in entry.adapters and entry.adapter_folder is None:
                hint = f"adapters: {listed(entry.adapters)}" if entry.adapters else "set adapters or adapter_folder"
                yield ("models", model, "adapter_workers"), f"{name!r} is not an adapter of the model", hint


def _block_size_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
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


def _handoff_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
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


def _embedding_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    """Check that what an encode pool leaves is found by the others: the same folder in all pools of a model."""
    for model, entry in settings.models.items():
        folders = {name: pool.embeddings for name, pool in entry.pools.items() if not pool.attached}
        encoders = [name for name, pool in entry.pools.items() if pool.role == "encode" and name in folders]
        for name, folder in folders.items():
            if encoders and folder != folders[encoders[0]]:
                text = f"is {folder}, but pool {encoders[0]} leaves what it encodes in {folders[encoders[0]]}"
                yield ("models", model, "pools", name, "embeddings"), text, "give all pools of the model one folder"


def _roles(path: tuple[str, ...], pool: PoolSettings, roles: set[str]) -> Iterator[Complaint]:
    """Check a pool's role in the flow of stages; ``roles``: those of all pools of its model."""
    if pool.role in ("prefill", "encode") and not roles & {"decode", "aggregated"}:
        yield (*path, "role"), f"is {pool.role}, but no pool of its model answers clients", "add one of role decode"
    if pool.role in ("prefill", "decode") and pool.engine == "llamacpp":
        yield (*path, "role"), f"is {pool.role}, but no hand-off of KV is known of llama.cpp", "leave role out"
    if pool.role == "encode" and not pool.attached and pool.embeddings is None:
        hint = "name a folder there, and the same one in the other pools of the model"
        yield (*path, "embeddings"), "is unset: what this pool encodes would reach no other engine", hint
    if pool.embeddings is not None and not Path(pool.embeddings).is_absolute():
        yield (
            (*path, "embeddings"),
            f"is {pool.embeddings!r}, which is not an absolute path",
            "engines have other folders",
        )
    if pool.engine == "vllm" and not pool.attached and pool.handoff == "bootstrap":
        yield (*path, "handoff"), "is bootstrap, which is SGLang's way; vLLM has completed and push", None


NO_SLEEP = (
    "sleep frees the KV memory that other processes have registered",
    "set sleeping to 0, or role to aggregated, and neither handoff nor cache.host",
)


def _starts(path: tuple[str, ...], pool: PoolSettings) -> Iterator[Complaint]:
    """What makes replicas come sooner, and where it can't be."""
    if pool.share_weights and (pool.attached or pool.engine not in ("sim", "vllm")):
        hint = "only engines of kind vllm and sim that are started here share weights"
        yield (*path, "share_weights"), f"these are {pool.engine} engines that are not started here", hint
    if not pool.sleeping:
        return
    if pool.attached or pool.engine not in ("sim", "vllm"):
        hint = "only engines of kind sim and vllm that are started here sleep"
        yield (*path, "sleeping"), "these engines can't be put to sleep", hint
    elif pool.engine == "vllm" and (pool.role != "aggregated" or pool.handoff is not None):
        yield (*path, "sleeping"), *NO_SLEEP


def _pool_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    # In a cluster of Kubernetes every kind may be a pod of its own, which the operator makes.
    in_pods = ("trtllm",) if settings.discovery.store == "kubernetes" else ()
    for model, entry in settings.models.items():
        seen: dict[str, str] = {}  # a server may have several models, each of which has a pool for it
        for name, pool in entry.pools.items():
            path = ("models", model, "pools", name)
            yield from _starts(path, pool)
            yield from _roles(path, pool, {other.role for other in entry.pools.values()})
            if pool.engine not in STARTED + in_pods and not pool.attached:
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
            for strange in strange_fields(pool.client_fields):
                yield (*path, "client_fields"), f"{strange!r} steers no engine", f"these do: {listed(STEERING)}"
            yield from _access((*path, "access"), pool)
            yield from _endpoints(path, pool)
            yield from _parsers(path, pool)
            if pool.selector is not None:
                yield from _selector_complaints(path, pool)


def _parsers(path: tuple[str, ...], pool: PoolSettings) -> Iterator[Complaint]:
    """Check names that Penstock parses by; those of an engine's own parsers only that engine knows."""
    engines_own = pool.engine in ("vllm", "sglang", "llamacpp") and not pool.attached
    for field, name, known, names in (
        ("tool_parser", pool.tool_parser, own_tool_parser, TOOL_PARSERS),
        ("reasoning_parser", pool.reasoning_parser, own_reasoning_parser, REASONING_PARSERS),
    ):
        if name is not None and not known(name) and (not engines_own or name.startswith(OWN_PREFIX)):
            family = family_of(name)
            if family is not None:
                problem = f"Penstock has no parser {name!r}: that of {family} belongs to the engine"
                yield (*path, field), problem, f"leave {field} out, and {flags_of(family)}"
                continue
            pairs = ", or a pair of tags such as <a>...</a>" if field == "reasoning_parser" else ""
            yield (*path, field), f"Penstock has no parser {name!r}", f"it has {listed(names)}{pairs}"


_SECRET_HEADERS = re.compile(r"auth|key|token|cookie|secret", re.IGNORECASE)
_OUR_HEADERS = ("accept", "connection", "content-length", "content-type", "expect", "host", "te", "transfer-encoding")


def _access(path: tuple[str, ...], pool: PoolSettings) -> Iterator[Complaint]:
    access = pool.access
    if access.api_key_file is not None and access.api_key_env is not None:
        yield (*path, "api_key_env"), "stands beside api_key_file", "set one of the two"
    if access.cert_key is not None and access.cert is None:
        yield (*path, "cert_key"), "stands without cert", "name the certificate, too"
    for header, value in access.headers.items():
        where = (*path, "headers")
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", header) or header.lower() in _OUR_HEADERS:
            yield where, f"{header!r} is not a header that a pool may set", f"leave out {listed(_OUR_HEADERS)}"
        elif not value.isascii() or not value.isprintable():
            yield where, f"the value of {header} is not one line of ASCII", None
        elif _SECRET_HEADERS.search(header) and not value.startswith(("file:", "env:")):
            hint = f"write {header}: file:PATH or env:NAME: settings are kept in run folders"
            yield where, f"the value of {header} stands here, and it looks like a secret", hint
    if "authorization" in {header.lower() for header in access.headers} and (access.api_key_file or access.api_key_env):
        yield (
            (*path, "headers"),
            "Authorization stands beside an API key, which is sent in that header",
            "set one of them",
        )
    if access.any or pool.attached:
        return
    given = [arg for arg in pool.args if re.match(r"--api[-_]key(=|$)", arg)]
    given += [name for name in pool.env if name in ("VLLM_API_KEY", "LLAMA_API_KEY")]
    if given:
        hint = "set access.api_key_file or access.api_key_env: the engine gets it as its own, and Penstock sends it"
        yield path, f"is empty, and {given[0].partition('=')[0]} makes the engines ask for a key", hint


def _endpoints(path: tuple[str, ...], pool: PoolSettings) -> Iterator[Complaint]:
    known = [url.rstrip("/") for url in pool.urls]
    if pool.selector is not None and (pool.events or pool.replay or pool.stats):
        hint = "annotate the pods: penstock.io/kv-events, penstock.io/kv-replay, penstock.io/stats"
        yield (*path, "events"), "of pods can't be known here", hint
        return
    for name in ("events", "replay", "stats"):
        for entry in getattr(pool, name):
            url, equals, endpoint = entry.rpartition("=")
            if equals and url.rstrip("/") not in known:
                yield (*path, name), f"{entry!r} names a server that is not in urls", f"there is {listed(known)}"
            elif not equals and len(known) != 1:
                yield (*path, name), f"{entry!r} does not say whose it is", "write it as URL=ENDPOINT"
            if not re.match(r"@?(tcp|ipc)://.", endpoint):
                yield (*path, name), f"{endpoint!r} is not a ZMQ endpoint", "write it as tcp://HOST:PORT"


def _selector_complaints(path: tuple[str, ...], pool: PoolSettings) -> Iterator[Complaint]:
    selector = pool.selector or ""
    if pool.urls:
        yield (*path, "selector"), "and urls both say which servers there are", "make two pools of them"
    pool_name = r"inferencepool/[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
    if selector.startswith("inferencepool/") and not re.fullmatch(pool_name, selector):
        yield (*path, "selector"), f"{selector!r} names no InferencePool", "write it as inferencepool/NAME"
    elif not re.fullmatch(r"[-A-Za-z0-9_./=!,() ]+", selector):
        hint = "write it as kubectl takes it: app=vllm,tier in (a,b)"
        yield (*path, "selector"), f"{selector!r} is not a label selector", hint


def _without_password(url: str) -> str:
    return re.sub(r"//[^/]*@", "//***@", url)


def _url_fault(url: str, settings: ClusterSettings) -> tuple[str, str | None] | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is not a URL: {error}", None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "is not a URL of a server", "write it as http://HOST:PORT"
    if parts.username is not None or parts.password is not None:
        return _PASSWORD, "put a proxy that knows the password before the server"
    if parts.path.rstrip("/").endswith("/v1"):
        return "ends in /v1", "leave /v1 out; the route is added to it"
    front = settings.frontend
    if port and port in (front.port, front.admin_port) and is_loopback(parts.hostname) and is_loopback(front.host):
        return "is the cluster's own endpoint", "name an engine, or give frontend.port another number"
    return None


def _frontend_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    front, security = settings.frontend, settings.frontend.security
    if front.admin_port and front.admin_port == front.port:
        yield ("frontend", "admin_port"), f"is {front.port}, like frontend.port", "leave it out to share the port"
    if front.processes > 1 and front.port == 0:
        hint = "give frontend.port a number"
        yield ("frontend", "processes"), f"{front.processes} processes can't share a port that the system picks", hint
    if front.processes > 1 and front.admin_port is not None:
        hint = "leave admin_port out and set security.admin_keys"
        yield ("frontend", "admin_port"), f"{front.processes} processes can't share one admin port", hint
    keyed = security.api_keys or security.jwt.issuer or any(t.keys or t.key_files for t in settings.tenants.values())
    if not is_loopback(front.host) and not keyed and not security.insecure:
        yield (
            ("frontend", "host"),
            f"{front.host} is reached by other machines, but there is no API key",
            "set PENSTOCK_FRONTEND__SECURITY__API_KEYS, or frontend.security.insecure: true if you mean it",
        )
    if front.grpc_port is not None and front.grpc_port in (front.port or None, front.admin_port or None):
        yield ("frontend", "grpc_port"), f"is {front.grpc_port}, which HTTP has", "give it a port of its own"
    if front.grpc_port is not None and find_spec("grpc") is None:
        yield ("frontend", "grpc_port"), "needs the package grpcio", "pip install 'penstock[plugins]'"
    if front.otlp_endpoint is not None and "@" in urlsplit(front.otlp_endpoint).netloc:
        yield ("frontend", "otlp_endpoint"), _PASSWORD, "give it by OTEL_EXPORTER_OTLP_HEADERS"
    for key, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if getattr(security, key) is not None and getattr(security, other) is None:
            yield ("frontend", "security", key), f"stands without {other}", "HTTPS needs both"
    for origin in security.cors_origins:
        if not re.fullmatch(r"\*|https?://[^/\s?#@]+", origin):
            hint = "write scheme, host and, where it has one, port: https://app.example.com; or *"
            yield ("frontend", "security", "cors_origins"), f"{origin!r} is not an origin", hint
    for name in ("api_keys", "admin_keys"):
        keys = getattr(security, name)
        if any(not key or not key.isascii() or any(c.isspace() for c in key) for key in keys):
            yield ("frontend", "security", name), "has a key that is empty, has spaces or is not ASCII", None
        if len(set(keys)) != len(keys):
            yield ("frontend", "security", name), "has the same key twice", None
    if both := set(security.api_keys) & set(security.admin_keys):
        hint = "a client's key must not open /admin"
        yield ("frontend", "security", "admin_keys"), f"shares {len(both)} key with api_keys", hint
    routes = [route for route in front.proxied_routes if route not in ROOT_ROUTES]
    wrong = [route for route in routes if not re.fullmatch(r"/v1(/[A-Za-z0-9_.{}-]+)+", route)]
    if wrong:
        hint = "write them as /v1/embeddings"
        yield ("frontend", "proxied_routes"), f"{listed(wrong)} is not a route under /v1", hint


def _tenant_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    token = settings.frontend.security.jwt
    owners = {hashed(key): "frontend.security.api_keys" for key in settings.frontend.security.api_keys}
    owners |= {hashed(key): "frontend.security.admin_keys" for key in settings.frontend.security.admin_keys}
    for name, tenant in settings.tenants.items():
        path = ("tenants", name)
        if not _POOL_NAME.match(name):
            yield path, f"{name!r} is not a valid name for a tenant", "take up to 64 letters, digits, '_', '.' and '-'"
        if not tenant.keys and not tenant.key_files and token.issuer is None:
            yield (
                path,
                "has no key, so nobody is of it",
                "give it keys or key_files, or set frontend.security.jwt.issuer",
            )
        for key in tenant.keys:
            if (owner := owners.setdefault(key, f"tenants.{name}")) != f"tenants.{name}":
                yield (*path, "keys"), f"has a key of {owner}", "a key belongs to one"
    if settings.tenants and (
        unknown := [each for each in settings.router.queue.shares if each not in settings.tenants]
    ):
        yield (
            ("router", "queue", "shares"),
            f"{listed(unknown)} is not a tenant",
            f"tenants: {listed(settings.tenants)}",
        )


def _discovery_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    found = settings.discovery
    if found.host in ("", "0.0.0.0", "::", "*"):
        yield ("discovery", "host"), f"is {found.host!r}, which no other machine can connect to", "name one address"
    if found.store == "kubernetes":
        if find_spec("lightkube") is None:
            hint = "pip install 'penstock[kubernetes]'"
            yield ("discovery", "store"), "is kubernetes, which needs the package lightkube", hint
        if not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", settings.name):
            hint = "take letters, digits, - _ . and at most 63 of them"
            yield ("name",), f"{settings.name!r} can't be a label of Kubernetes, which discovery.store needs", hint
    for service, schemes in (("etcd", ("http", "https")), ("nats", ("nats", "tls"))):
        group = getattr(found, service)
        path = ("discovery", service)
        if not group.urls:
            yield (*path, "urls"), "is empty", f"write it as {schemes[0]}://HOST:PORT"
        for url in group.urls:
            parts = urlsplit(url)
            if parts.scheme not in schemes or not parts.hostname:
                hint = f"write it as {schemes[0]}://HOST:PORT"
                yield (*path, "urls"), f"{_without_password(url)!r} is not a URL of {service}", hint
            if parts.username is not None or parts.password is not None:
                yield (*path, "urls"), f"{_without_password(url)!r} {_PASSWORD}", "give user and password by themselves"
        if (group.user is None) != (group.password is None):
            yield (*path, "user"), "and password come together", None
        if (group.cert is None) != (group.key is None):
            yield (*path, "cert"), "and key come together", None
    for endpoint in found.forwarder:
        if not re.match(r"(tcp|ipc)://.", endpoint):
            yield ("discovery", "forwarder"), f"{endpoint!r} is not a ZMQ endpoint", "write it as tcp://HOST:PORT"


def _secret_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    given = settings.cluster_secret
    if given is None:
        return
    if len(given) < SECRET_LENGTH_MIN:
        hint = "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"
        yield ("cluster_secret",), f"has {len(given)} characters, which is too few to be safe", hint
    if settings.cluster_secret_file is not None:
        yield ("cluster_secret_file",), "stands beside cluster_secret", "give one of them"


def _planner_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    found = list(contradictions(settings.planner))
    models = settings.models
    if settings.planner.enabled:  # a planner elsewhere has other pools
        pools = {
            pool_prefix(model, len(models)) + name: Pool(
                model=model, role=pool.role, gpus=1 if pool.gpus is None else pool.gpus, desired=pool.replicas
            )
            for model, entry in models.items()
            for name, pool in entry.pools.items()
        }
        found += of_replicas(settings.planner, pools)
        if models != DEFAULT_MODELS:  # without models the pools may be another's, whose options were imported
            found += of_pools(settings.planner, pools)
    seen = set()
    for path, message, hint in found:
        if path not in seen:
            yield ("planner", *path), message, hint
        seen.add(path)


def _router_plugin_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    for name, plugin in settings.router.plugins.items():
        try:
            RouterPlugins({name: plugin}, lambda name, text: None)
        except ConfigError as error:
            yield ("router", "plugins", name), error.message.removeprefix(f"router.plugins.{name}: "), error.hint


def _engine_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    for model, entry in settings.models.items():
        for name, pool in entry.pools.items():
            if pool.engine == "sim" and not pool.attached and not extension.offers("engine", "sim"):
                hint = "install the package penstock_lab, which has the simulated engine, or set engine or urls"
                yield ("models", model, "pools", name, "engine"), f"is {pool.engine}, which is not installed", hint


def _block_size(pool: PoolSettings) -> int | None:
    if pool.block_size is not None:
        return pool.block_size
    return getattr(pool.sim, "block_size", None) if pool.engine == "sim" and not pool.attached else None


def _where(root: TreeNode, path: tuple[str, ...]) -> ValueOrigin:
    """Return where a setting was given, or the nearest given place around it."""
    for end in range(len(path), 0, -1):
        node = node_at(root, path[:end])
        if node is not root and node.at is not DEFAULT:
            return node.at
    return root.at if root.at is not DEFAULT else ValueOrigin("default", "config")


_RULES: tuple[Callable[[ClusterSettings], Iterator[Complaint]], ...] = (
    _model_complaints,
    _engine_complaints,
    _pool_complaints,
    _block_size_complaints,
    _adapter_complaints,
    _handoff_complaints,
    _embedding_complaints,
    _frontend_complaints,
    _tenant_complaints,
    _discovery_complaints,
    _secret_complaints,
    _planner_complaints,
    _router_plugin_complaints,
    name_complaints,
)
