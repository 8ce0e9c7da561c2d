"""Describes a running engine server: reads its `WorkerCard` and its health over plain HTTP.

It uses only stock endpoints, those of the engine's dialect; what a server does not report stays None in the card:
unknown is not zero.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from penstock.adapters.engines.dialects.dialect_registry import DIALECTS, dialect_of, recognise
from penstock.adapters.engines.dialects.kv_transfer_protocol import USUAL
from penstock.adapters.engines.http.engine_access import refused
from penstock.adapters.engines.http.engine_call import EngineCalls
from penstock.adapters.engines.http.engine_http import EngineServer, PolledServer
from penstock.adapters.engines.pool_overrides import CHAT_TEMPLATE, REFUSED, TAKEN, UNLISTED, UNTRIED
from penstock.kernel.errors import EngineError
from penstock.kernel.values import JsonObject, WorkerCard, WorkerId

READY_EVERY = 0.25
"""Seconds between checks of a server that is starting."""
_GUESS = ("sim", "openai")
"""Kinds that are no override where a pool names them: each server is asked for its kind."""


async def describe(
    http: aiohttp.ClientSession,
    url: str,
    *,
    worker: WorkerId,
    epoch: int,
    model: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    pool: str = "pools.NAME",
) -> WorkerCard:
    """Read the card of a server.

    Args:
        url: base URL, such as ``http://127.0.0.1:8001``.
        model: name that it must serve; None takes the first that it lists. A server whose list names no model at all,
            or can't be read, is taken at this name, and its card has the label `UNLISTED`.
        overrides: card fields that the operator knows better; None values are ignored. An ``engine`` among them
            selects the dialect.
        pool: dotted name of its pool's settings, for what is said of a refusal.
    Raises:
        EngineError: the server can't be reached, still loads, is not healthy, does not list the requested model among
            those that it lists, or none where none is requested.
    """
    server = EngineServer(http, url)
    mine, adapters, unlisted = await _model_listing(server, model, pool)
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    kind = DIALECTS.get(given.get("engine", ""))
    if kind is None or kind.name in _GUESS:
        dialect, fields = await recognise(server, mine)
        if kind is None or kind.name == "openai":
            given["engine"] = dialect.name
    else:
        fields = await kind.card(server, mine) or {}
    known = {
        "max_model_len": mine.get("max_model_len"),
        **{key: v for key, v in fields.items() if v is not None},
        **given,
    }
    if fields.get("fixed_role"):
        known["role"] = _own_role(server, fields["role"], given.get("role"), pool)
    card = {name: value for name, value in known.items() if value is not None}
    if card.get("role", "aggregated") in ("prefill", "decode") and "handoff" not in card:
        card["handoff"] = USUAL.get(card.get("engine", ""))
    if "labels" in card or unlisted is not None:
        told = {} if unlisted is None else {UNLISTED: unlisted}
        card["labels"] = {**(fields.get("labels") or {}), **(card.get("labels") or {}), **told}
        if card["labels"].get(CHAT_TEMPLATE) == UNTRIED:
            card["labels"][CHAT_TEMPLATE] = await _with_request(server, mine["id"])
    try:
        return msgspec.convert(
            {**card, "id": worker, "epoch": epoch, "model": mine["id"], "url": server.url, "adapters": adapters},
            WorkerCard,
        )
    except msgspec.ValidationError as error:
        raise EngineError(f"{server.url} describes itself in a way that makes no sense: {error}") from error


def _own_role(server: EngineServer, own: str, wanted: str | None, pool: str) -> str:
    """Return the role of a server that can have no other; a pool that names none takes any.

    Raises:
        EngineError: its pool names another one.
    """
    if wanted not in (None, "aggregated", own):
        hint = f"start it for that role, or set {pool}.role to {own}"
        raise EngineError(f"{pool}.role is {wanted}, but {server.url} was started as {own}", hint=hint)
    return own


class ServerHealth(NamedTuple):
    """What a server lacks to be healthy, None where it is; ``silent``: it takes connections, and is too busy to say."""

    lack: str | None
    silent: bool = False


async def health(
    calls: EngineCalls,
    url: str,
    timeout: float,
    model: str,
    pool: str = "pools.NAME",
    *,
    card: WorkerCard | None,
) -> ServerHealth:
    """Ask a server's route of health (where it has one) whether it serves, and its list whether it still has the model.

    Args:
        card: as it was described; None where it is not a worker now. Its kind has the route. A list that never named
            the model is not asked; before there is a card, it counts where it names any.

    A vLLM server answers 200 while it drains, too: its refusals then show that (`Dialect.refusal`).
    """
    server = PolledServer(calls, url, timeout)
    route = dialect_of("openai" if card is None else card.engine).health
    for path in (route, "/v1/models"):
        status = await server.status(path)
        if status is None:
            silent = server.silent
            return ServerHealth(
                f"no answer to its health check within {timeout:g} s" if silent else f"no answer{server.reason}",
                silent,
            )
        if path == route and card is not None and UNLISTED in card.labels and status in (200, 404):
            return ServerHealth(None)
        if path != route and card is None and not models_in(await server.json(path)):
            return ServerHealth(None)  # `describe` says whether its pool's word is enough
        if status != 200 and (path, status) != (route, 404):
            return ServerHealth(f"{path} answers {status}{refused(status, pool)}", silent=status == 429)
    names = [entry["id"] for entry in models_in(await server.json("/v1/models"))]
    return ServerHealth(None if model in names else f"it does not serve {model!r} any more; it lists {names}")


async def lacking(http: aiohttp.ClientSession, url: str, pool: str = "pools.NAME") -> str | None:
    """Return what a starting server still lacks (health, a list of models), or None once it serves."""
    server = EngineServer(http, url)
    status = await server.status("/health")
    if status is None:
        return server.fault or "nobody listens yet"
    if status not in (200, 404):
        return f"/health answers {status}{refused(status, pool)}"
    if why := refused(listed := await server.status("/v1/models"), pool):
        return f"/v1/models answers {listed}{why}"
    listing = await server.object("/v1/models")
    return None if listing.get("data") else "it lists no model"


async def ready(
    http: aiohttp.ClientSession, url: str, timeout: float, *, ended: Callable[[], str | None] = lambda: None
) -> None:
    """Wait until a server that was started serves.

    Args:
        timeout: seconds.
        ended: returns why waiting is over, such as "it ended with status 1"; None while there is hope.
    Raises:
        EngineError: the server did not become ready; the message says what it lacked.
    """
    until = time.monotonic() + timeout
    while (missing := await lacking(http, url)) is not None:
        if (why := ended()) is not None:
            raise EngineError(why)
        if time.monotonic() > until:
            raise EngineError(f"{url} was not ready within {timeout:g} s: {missing}")
        await asyncio.sleep(READY_EVERY)


async def self_benchmark(http: aiohttp.ClientSession, url: str) -> JsonObject | None:
    """Read a worker's self-benchmark: points of prefill and decode in seconds, or None where it has none."""
    metrics = await EngineServer(http, url).object("/get_perf_metrics")
    return metrics if metrics.get("prefill") and metrics.get("decode") else None


async def measured_speed(http: aiohttp.ClientSession, url: str) -> dict[str, float] | None:
    """Read a worker's self-benchmark: prefill and decode lines in seconds, or None where it has none."""
    fit = (await EngineServer(http, url).object("/get_perf_metrics")).get("fit")
    names = ("prefill_intercept", "prefill_slope", "decode_base", "decode_slope")
    if not isinstance(fit, dict) or not all(isinstance(fit.get(name), (int, float)) for name in names):
        return None
    return {name: float(fit[name]) for name in names}


async def _with_request(server: EngineServer, model: str) -> str:
    """Ask a server whether it takes a chat template with a request, by the route that makes tokens of a chat."""
    chat = {
        "model": model,
        "messages": [{"role": "user", "content": "a"}],
        "chat_template": "{{ messages[0].content }}",
    }
    return TAKEN if await server.takes("/tokenize", chat) else REFUSED


async def listed_adapters(http: aiohttp.ClientSession, url: str, model: str) -> tuple[str, ...] | None:
    """Read the names of a model's adapters that a server lists; None where its list can't be read."""
    listing = await EngineServer(http, url).object("/v1/models")
    if not isinstance(listing.get("data"), list):
        return None
    return _adapters_of(model, models_in(listing))


def models_in(listing: Any) -> list[JsonObject]:
    """Return the entries that name a model in a server's answer to ``/v1/models``, whatever it is."""
    entries = listing.get("data") if isinstance(listing, dict) else None
    return [
        entry
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    ]


class _Listed(NamedTuple):
    """A model's entry in a server's list, the names of its adapters, and what is wrong with a list that names none."""

    entry: JsonObject
    adapters: tuple[str, ...] = ()
    unlisted: str | None = None


async def _model_listing(server: EngineServer, model: str | None, pool: str) -> _Listed:
    models = models_in(await server.json("/v1/models"))
    if not models:
        why = await _no_list(server, pool)
        if model is None:
            raise EngineError(f"{server.url}{why}", hint="is it an OpenAI-compatible server?")
        return _Listed({"id": model}, unlisted=why)
    names = [entry["id"] for entry in models]
    if model is not None and model not in names:
        raise EngineError(
            f"{server.url} does not serve {model!r}; it lists {names}", hint="name the model as the server does"
        )
    mine = models[names.index(model)] if model is not None else models[0]
    return _Listed(mine, _adapters_of(mine["id"], models))


async def _no_list(server: EngineServer, pool: str) -> str:
    """Return what is wrong with the list of a server that lists no model, to follow its URL.

    Raises:
        EngineError: the server is not there, is not ready, or does not let us in: that is why.
    """
    status, health = await server.status("/v1/models"), await server.status("/health")
    if health == 503 or (status == 503 and health != 200):
        raise EngineError(f"{server.url} still loads its model, or is ending", hint="it is asked again")
    if status == 429:
        raise EngineError(f"{server.url}/v1/models answers 429", hint="it is asked again")
    if status is None:
        hint = "is it up, is this its address, and does it ask for https or a certificate of ours?"
        raise EngineError(f"{server.url} does not answer{server.reason}", hint=hint)
    if why := refused(status, pool):
        raise EngineError(f"{server.url}/v1/models answers {status}{why}")
    if health not in (200, 404):
        what = f"answers {health}{refused(health, pool)}" if health is not None else f"does not answer{server.reason}"
        raise EngineError(f"{server.url}/health {what}", hint="it is asked again")
    if status != 200:
        return f"/v1/models answers with status {status}"
    return "/v1/models answers without JSON" if await server.json("/v1/models") is None else "/v1/models lists no model"


def _adapters_of(model: str, models: Sequence[JsonObject]) -> tuple[str, ...]:
    """Return the adapters in a server's list that are of a model: not those whose parent is another one of the list."""
    roots = {each["id"]: each.get("root") for each in models if each.get("parent") is None}
    same = {name for name, root in roots.items() if root is not None and root == roots.get(model)} | {model}
    others = roots.keys() - same
    return tuple(
        each["id"]
        for each in models
        if each.get("parent") is not None and each["id"] != model and str(each["parent"]) not in others
    )
