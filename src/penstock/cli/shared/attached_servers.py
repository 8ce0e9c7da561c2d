"""Attached servers: OpenAI-compatible servers that run already, as the pools of a config, and how to get into them."""

import asyncio
import functools
import http.client
import os
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from penstock import extension
from penstock.adapters.engines.describe import models_in
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
NAME_IT = "give --model NAME, the name that it takes in requests"
FILE = click.Path(exists=True, dir_okay=False, resolve_path=True)


class ModelUnknown(EngineError):
    """A server answers, and its list names no model."""


class ListedModel(NamedTuple):
    """A model that a server lists. ``aliases``: its other names there; ``folder``: of its tokenizer on this machine."""

    name: str
    aliases: tuple[str, ...] = ()
    folder: str | None = None


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
    """Return the value of ``models`` for some servers, each asked for its models where none is named.

    Args:
        events, replay, stats: ``[URL=]ENDPOINT`` of a server.
        wait: ask until one answers.
        access: what the servers ask for.
    Raises:
        EngineError: none answers, or none lists a model.
    """
    by_model: dict[str, list[str]] = {}
    found: dict[str, ListedModel] = {}
    bases, given = [_base(url) for url in urls], msgspec.to_builtins(access)
    keys = read_access(access, "access")
    named = [(base, _named_model(model)) for base in bases] if model is not None else _models_of(bases, wait, keys)
    for base, each in named:
        if each.folder is not None or each.name not in found:
            found[each.name] = each
        by_model.setdefault(each.name, []).append(base)
    models: JsonObject = {}
    for name, members in by_model.items():
        pool: JsonObject = {
            "engine": engine,
            "urls": members,
            "block_size": block_size,
            "topic": topic,
            "access": given,
        }
        for kind, texts in (("events", events), ("replay", replay), ("stats", stats)):
            pool[kind] = [
                _endpoint_entry(text, members) for text in texts if _meant(text, members, everywhere=len(by_model) == 1)
            ]
        models[name] = _entry_of(found[name], by_model, tokenizer, {"attached": pool})
    return models


def _entry_of(model: ListedModel, models: Collection[str], tokenizer: str | None, pools: JsonObject) -> JsonObject:
    """Return the settings of a model that was found."""
    aliases = [alias for alias in model.aliases if alias not in models]
    return {"tokenizer": tokenizer or model.folder, "aliases": aliases, "pools": pools}


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
    """Return the value of ``models`` for pods; a ready one is asked for its models where none is named.

    Args:
        selector: of labels, or inferencepool/NAME.
        overrides: settings as flags; those of discovery say how to reach the API server.
        access: what the servers ask for.
    """
    found = [_named_model(model)] if model is not None else []
    if not found:
        found = _served(_first_of_pods(selector, overrides), read_access(access, "access"))
    pods: JsonObject = {"engine": engine, "selector": selector, "block_size": block_size, "topic": topic}
    pods["access"] = msgspec.to_builtins(access)
    names = {each.name for each in found}
    return {each.name: _entry_of(each._replace(folder=None), names, tokenizer, {"pods": pods}) for each in found}


def _first_of_pods(selector: str, overrides: Sequence[str]) -> str:
    """Return the URL of a ready pod, to ask it for its model."""
    settings = load(None, [text for text in overrides if text.startswith("discovery.")], os.environ).settings

    async def ready() -> Sequence[Any]:
        source = extension.entry("source", "kubernetes", "selector")(settings.discovery.kubernetes)
        try:
            servers: Sequence[Any] = await source.ready(selector)
            return servers
        finally:
            await source.close()

    servers = asyncio.run(ready())
    if not servers:
        raise EngineError(
            f"no pod with {selector} is ready, so none tells its model", hint="name it with --model, or wait"
        )
    url: str = servers[0].url
    return url


def _models_of(bases: Sequence[str], wait: bool, access: EngineAccess) -> list[tuple[str, ListedModel]]:
    """Ask servers for their models; return each with each of its models.

    One that does not answer is taken for a server of the model that all others have. Where these have several, or one
    answers and names no model, it is left out, and the operator is told.
    """
    while True:
        known: list[tuple[str, ListedModel]] = []
        away: dict[str, EngineError] = {}
        for base in bases:
            try:
                known += [(base, each) for each in _served(base, access)]
            except EngineError as error:
                away[base] = error
        if away and not known and not wait:
            raise next(iter(away.values()))
        if known:
            break
        time.sleep(ASK_EVERY)
    names = [each.name for _, each in known]
    for base, why in away.items():
        if len(set(names)) == 1 and not isinstance(why, ModelUnknown):
            known.append((base, ListedModel(names[0])))
        else:
            click.echo(f"penstock: {base} is left out, since nobody knows which model it serves: {why}", err=True)
    return known


def _named_model(model: str) -> ListedModel:
    """Return a model that the operator names, which Transformers' server knows by its folder."""
    return ListedModel(model, folder=_tokenizer(model))


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _meant(text: str, members: list[str], *, everywhere: bool) -> bool:
    """Return whether an endpoint belongs to a pool: it names one of its servers, or no server at all."""
    return everywhere or _base(text.rpartition("=")[0]) in members


def _endpoint_entry(text: str, members: list[str]) -> str:
    server, equals, endpoint = text.rpartition("=")
    return f"{_base(server)}={endpoint}" if equals else text


def _served(url: str, access: EngineAccess = OPEN) -> list[ListedModel]:
    """Ask a server which models it serves, with the tokenizers in their folders where it runs on this machine.

    LoRA adapters, which have a parent, don't count. Entries with one root are names of one model, as vLLM lists those
    of ``--served-model-name``.
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
        if error.status in (429, 503):
            raise EngineError(f"{url}/v1/models answers {error.status}", hint="it may still load its model") from error
        what = "without a list" if error.status == 200 else f"with status {error.status}"
        raise ModelUnknown(f"{url}/v1/models answers {what}", hint=NAME_IT) from error
    models = [entry for entry in models_in(listing) if entry.get("parent") is None]
    if not models:
        raise ModelUnknown(f"{url}/v1/models lists no model", hint=NAME_IT)
    names: dict[str, list[str]] = {}
    for entry in models:
        root = entry.get("root")
        same = names.setdefault(root if isinstance(root, str) and root else f"\0{entry['id']}", [])
        if entry["id"] not in same:
            same.append(entry["id"])
    # An SGLang, which has one model, gives its name as the root.
    folder = _sglang_tokenizer(client) if models[0].get("owned_by") == "sglang" else None
    return [ListedModel(own[0], tuple(own[1:]), _tokenizer(folder or root)) for root, own in names.items()]


def _tokenizer(folder: str) -> str | None:
    return tokenizer_in(Path(folder)) if folder.startswith("/") else None


def _sglang_tokenizer(client: AdminClient) -> str | None:
    """Return where an SGLang has its tokenizer; None where it does not say."""
    try:
        path = client.get("/server_info", dict).get("tokenizer_path")
    except (ClusterUnreachable, RequestRefused):
        return None
    return path if isinstance(path, str) else None


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
