"""What does a running server say of itself? Reads a `WorkerCard` over plain HTTP, from stock endpoints only.

Asked are /v1/models, /metrics (cache_config_info) and /kv_event_sources, as vLLM serves them; what a server does
not have stays None in the card: unknown is not zero.
"""

import re
from typing import Any

import aiohttp
import msgspec

from penstock.kernel.errors import EngineError
from penstock.kernel.values import WorkerCard, WorkerId

TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


async def describe(
    http: aiohttp.ClientSession,
    url: str,
    *,
    worker: WorkerId,
    epoch: int,
    model: str | None = None,
    overrides: dict[str, Any] | None = None,
) -> WorkerCard:
    """Ask a server what it is.

    Args:
        url: base URL, such as ``http://127.0.0.1:8001``.
        model: name that it must serve; None takes the first that it lists.
        overrides: card fields that the operator knows better; None values are ignored.
    Raises:
        EngineError: it can't be reached, lists no model, or not the one wanted.
    """
    url = url.rstrip("/")
    listing = await _json(http, f"{url}/v1/models")
    if listing is None:
        raise EngineError(f"{url}/v1/models does not answer", hint="is it an OpenAI-compatible server, and up?")
    entries = listing.get("data") if isinstance(listing, dict) else None
    models = [entry for entry in entries or [] if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    names = [entry["id"] for entry in models]
    if not names or (model is not None and model not in names):
        wanted = "a model" if model is None else repr(model)
        raise EngineError(f"{url} does not serve {wanted}; it lists {names}", hint="name the model as the server does")
    mine = models[names.index(model)] if model is not None else models[0]
    known: dict[str, Any] = {"max_len": mine.get("max_model_len")}
    adapters = tuple(e["id"] for e in models if e.get("parent") is not None and e["id"] != mine["id"])
    metrics = await _text(http, f"{url}/metrics")
    if metrics is not None and (found := _CACHE_CONFIG.search(metrics)):
        labels = dict(_LABEL.findall(found.group(1)))
        known["block_size"] = _number(labels.get("block_size"))
        known["kv_blocks"] = _number(labels.get("num_gpu_blocks"))
        known["engine"] = "vllm"
    ranks = _event_sources(await _json(http, f"{url}/kv_event_sources"))
    if ranks:
        known["ranks"] = len(ranks)
        known["events"] = tuple(rank["endpoint"] for rank in ranks)
        known["replay"] = tuple(rank["replay_endpoint"] for rank in ranks if rank.get("replay_endpoint"))
        known["topic"] = ranks[0].get("topic") or ""
        known["hash_scheme"] = ranks[0].get("hash_scheme")
    known.update({key: value for key, value in (overrides or {}).items() if value is not None})
    card = {key: value for key, value in known.items() if value is not None}
    try:
        return msgspec.convert(
            {**card, "id": worker, "epoch": epoch, "model": mine["id"], "url": url, "adapters": adapters},
            WorkerCard,
        )
    except msgspec.ValidationError as error:
        raise EngineError(f"{url} describes itself in a way that makes no sense: {error}") from error


async def healthy(http: aiohttp.ClientSession, url: str) -> bool:
    """Tell whether a server's /health (or, where it has none, /v1/models) answers 200."""
    for path in ("/health", "/v1/models"):
        status = await _status(http, url.rstrip("/") + path)
        if status != 404:
            return status == 200
    return False


async def measured_speed(http: aiohttp.ClientSession, url: str) -> dict[str, float] | None:
    """Read a worker's self-benchmark: prefill and decode lines in seconds, or None where it has none."""
    found = await _json(http, f"{url.rstrip('/')}/get_perf_metrics")
    fit = found.get("fit") if isinstance(found, dict) else None
    names = ("prefill_intercept", "prefill_slope", "decode_base", "decode_slope")
    if not isinstance(fit, dict) or not all(isinstance(fit.get(name), (int, float)) for name in names):
        return None
    return {name: float(fit[name]) for name in names}


def _event_sources(found: Any) -> list[dict[str, Any]]:
    """Return the KV event sources by rank; none where the answer has another shape (some servers answer anything)."""
    if not isinstance(found, dict) or not all(str(key).isdigit() for key in found):
        return []
    ranks = [found[key] for key in sorted(found, key=int)]
    whole = all(isinstance(rank, dict) and isinstance(rank.get("endpoint"), str) for rank in ranks)
    return ranks if whole else []


async def _status(http: aiohttp.ClientSession, url: str) -> int | None:
    try:
        async with http.get(url, timeout=TIMEOUT) as answer:
            return answer.status
    except (aiohttp.ClientError, TimeoutError):
        return None


async def _text(http: aiohttp.ClientSession, url: str) -> str | None:
    try:
        async with http.get(url, timeout=TIMEOUT) as answer:
            return await answer.text() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
        return None


async def _json(http: aiohttp.ClientSession, url: str) -> Any:
    text = await _text(http, url)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
