"""Attached servers: OpenAI-compatible servers that run already, as the pools of a config, and how to get into them."""

import asyncio
import functools
import http.client
import os
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from penstock.adapters.engines.http.engine_access import OPEN, EngineAccess, read_access, refused
from penstock.cli.shared.admin_client import AdminClient, ClusterUnreachable, RequestRefused
from penstock.cli.shared.checkpoint import tokenizer_in
from penstock.config.reading.load import load
from penstock.config.settings.pool_access_settings import PoolAccessSettings
from penstock.kernel.errors import EngineError
from penstock.kernel.values import JsonObject

ASK_EVERY = 1.0
"""Seconds between two rounds of questions where no server answers yet."""
KINDS = ("openai", "vllm", "sglang", "trtllm", "llamacpp", "sim")
FILE = click.Path(exists=True, dir_okay=False, resolve_path=True)


def attached_models(
    urls: Sequence[str],
    *,
    model: str | None = None,
    engine: str = "openai",
    tokenizer: str | None = None,
    block_size: int | None = None,
    topic: str | None = None,
    events: Sequence[str] = (),
    replay: Sequence[str] = (),
    stats: Sequence[str] = (),
    wait: bool = False,
    access: PoolAccessSettings = PoolAccessSettings(),
) -> JsonObject:
    """Return the value of ``models`` for some servers, each asked for its model where none is named.

    Args:
        events, replay, stats: ``[URL=]ENDPOINT`` of a server.
        wait: ask until one answers.
        access: what the servers ask for.
    Raises:
        EngineError: none answers.
    """
    by_model: dict[str, list[str]] = {}
    folders: dict[str, str] = {}
    bases, given = [_base(url) for url in urls], msgspec.to_builtins(access)
    keys = read_access(access, "access")
    for base, name, root in _models_of(bases, wait, keys) if model is None else [(base, model, None) for base in bases]:
        if root is not None:
            folders.setdefault(name, root)
        by_model.setdefault(name, []).append(base)
    models: JsonObject = {}
    for name, members in by_model.items():
        pool: JsonObject = {
            "engine": engine,
            "urls": members,
            "block_size": block_size,
            "topic": topic,
            "access": given,
        }
        for kind, given in (("events", events), ("replay", replay), ("stats", stats)):
            pool[kind] = [
                _entry(text, members) for text in given if _meant(text, members, everywhere=len(by_model) == 1)
            ]
        models[name] = {"tokenizer": tokenizer or folders.get(name), "pools": {"attached": pool}}
    return models


def models_of_pods(
    selector: str,
    overrides: Sequence[str],
    *,
    model: str | None = None,
    engine: str = "openai",
    tokenizer: str | None = None,
    block_size: int | None = None,
    topic: str | None = None,
    access: PoolAccessSettings = PoolAccessSettings(),
) -> JsonObject:
    """Return the value of ``models`` for pods; a ready one is asked for its model where none is named.

    Args:
        selector: of labels, or inferencepool/NAME.
        overrides: settings as flags; those of discovery say how to reach the API server.
        access: what the servers ask for.
    """
    name = (
        model if model is not None else _model_of(_first_of_pods(selector, overrides), read_access(access, "access"))[0]
    )
    pods: JsonObject = {"engine": engine, "selector": selector, "block_size": block_size, "topic": topic}
    pods["access"] = msgspec.to_builtins(access)
    return {name: {"tokenizer": tokenizer, "pools": {"pods": pods}}}


def _first_of_pods(selector: str, overrides: Sequence[str]) -> str:
    """Return the URL of a ready pod, to ask it for its model."""
    from penstock.runtime.supervision.pod_pool import ready_servers

    settings = load(None, [text for text in overrides if text.startswith("discovery.")], os.environ).settings
    servers = asyncio.run(ready_servers(settings.discovery.kubernetes, selector))
    if not servers:
        raise EngineError(
            f"no pod with {selector} is ready, so none tells its model", hint="name it with --model, or wait"
        )
    return servers[0].url


def _models_of(bases: Sequence[str], wait: bool, access: EngineAccess) -> list[tuple[str, str, str | None]]:
    """Ask servers for their models; return (server, model, tokenizer's folder).

    One that does not answer is taken for a server of the model that all others have; where these have several, it is
    left out, and the operator is told.
    """
    while True:
        known: list[tuple[str, str, str | None]] = []
        away: dict[str, EngineError] = {}
        for base in bases:
            try:
                known.append((base, *_model_of(base, access)))
            except EngineError as error:
                away[base] = error
        if away and not known and not wait:
            raise next(iter(away.values()))
        if known:
            break
        time.sleep(ASK_EVERY)
    names = {name for _, name, _ in known}
    if len(names) == 1:
        return [*known, *((base, known[0][1], None) for base in away)]
    for base, why in away.items():
        click.echo(f"penstock: {base} is left out, since nobody knows which model it serves: {why}", err=True)
    return known


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _meant(text: str, members: list[str], *, everywhere: bool) -> bool:
    """Return whether an endpoint belongs to a pool: it names one of its servers, or no server at all."""
    return everywhere or _base(text.rpartition("=")[0]) in members


def _entry(text: str, members: list[str]) -> str:
    server, equals, endpoint = text.rpartition("=")
    return f"{_base(server)}={endpoint}" if equals else text


def _model_of(url: str, access: EngineAccess = OPEN) -> tuple[str, str | None]:
    """Ask a server which model it serves, and take the tokenizer in its folder where the server runs on this machine.

    LoRA adapters, which have a parent, don't count.
    """
    client = AdminClient(url, timeout=5.0, tls=access.tls, headers=access.headers)
    try:
        listing = client.get("/v1/models", dict)
    except ClusterUnreachable as error:
        hint = "start the server, or name its --model"
        if isinstance(error.__cause__, ssl.SSLError | http.client.BadStatusLine):
            hint = (
                "write http:// or https:// as it speaks; --cacert FILE names certificates to trust, --cert one of ours"
            )
        raise EngineError(f"no model list comes from {url}/v1/models: {error.reason}", hint=hint) from error
    except RequestRefused as error:
        if why := refused(error.status, "pools.attached"):
            hint = "--api-key-file FILE or --api-key-env NAME gives a key, --header 'NAME: VALUE' another header"
            raise EngineError(f"{url}/v1/models answers {error.status}{why}", hint=hint) from error
        hint = "is it an OpenAI-compatible server?"
        raise EngineError(f"{url}/v1/models answers {error.status}: {error.message}", hint=hint) from error
    models = [e for e in listing.get("data", []) if isinstance(e, dict) and "id" in e and e.get("parent") is None]
    if not models:
        raise EngineError(f"{url} lists no model", hint="has it loaded one? name it with --model")
    root = models[0].get("root")
    if models[0].get("owned_by") == "sglang":  # whose root is the model's name
        root = _sglang_tokenizer(client)
    folder = tokenizer_in(Path(root)) if isinstance(root, str) and root.startswith("/") else None
    return str(models[0]["id"]), folder


def _sglang_tokenizer(client: AdminClient) -> object:
    """Return where an SGLang has its tokenizer; None where it does not say."""
    try:
        return client.get("/server_info", dict).get("tokenizer_path")
    except (ClusterUnreachable, RequestRefused):
        return None


def access_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add options as curl has them for a key, headers and certificates; the command gets them as ``access``."""

    @functools.wraps(command)
    def with_access(*, header: tuple[str, ...], **others: Any) -> int:
        given = {name: others.pop(name) for name in ("api_key_file", "api_key_env", "ca", "cert", "cert_key")}
        headers = {}
        for text in header:
            name, colon, value = text.partition(":")
            value = value.strip()
            if not colon or not value:
                raise click.UsageError(f"--header {name!r}: write it as 'NAME: VALUE'")
            headers[name.strip()] = f"file:{Path(value[5:]).absolute()}" if value.startswith("file:") else value
        return command(access=PoolAccessSettings(headers=headers, **given), **others)

    options: Callable[..., int] = with_access
    for name, settings in (
        ("--api-key-file", {"type": FILE, "help": "File with the API key that the servers ask for."}),
        ("--api-key-env", {"metavar": "NAME", "help": "Name of the environment variable that has that key."}),
        (
            "--header",
            {"multiple": True, "metavar": "'NAME: VALUE'", "help": "Header; VALUE may be file:PATH, env:NAME."},
        ),
        ("--cacert", {"type": FILE, "help": "Certificates that sign the servers'; unset trusts the system's."}),
        ("--cert", {"type": FILE, "help": "Own certificate, for servers that ask for one."}),
        ("--cert-key", {"type": FILE, "help": "Its private key, where that is in another file."}),
    ):
        words = (name, "ca") if name == "--cacert" else (name,)
        options = click.option(*words, **settings)(options)  # type: ignore[arg-type]
    return options
