"""Probes a server before it is loaded: its models, and its engine's block size where it reports one."""

import asyncio
from typing import Any

import aiohttp
import msgspec

from penstock.adapters.engines.describe import models_in
from penstock.kernel.errors import ConfigError, EngineError
from penstock.report.bench.bench_options import BenchOptions

PROBE_TIMEOUT = 30.0


async def ask(http: aiohttp.ClientSession, options: BenchOptions) -> tuple[str, int | None]:
    """Return the model to request, and the block size if it was given or the server reports it.

    Raises:
        EngineError: the server can't be reached, or has no list of models and none was chosen.
        ConfigError: it serves no such model, or several where none was chosen.
    """
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    answer = await _get(http, f"{options.base}/v1/models", headers)
    if isinstance(answer, str):
        refused = answer.startswith(("HTTP 401", "HTTP 403"))
        if refused or options.model is None or not answer.startswith("HTTP "):
            hint = "give the right key with --api-key" if refused else "is the server up, and is the URL right?"
            raise EngineError(f"{options.base}/v1/models: {answer}", hint=hint)
        answer = {}
    names = [entry["id"] for entry in models_in(answer)]
    model = options.model
    if model is None:
        if len(names) != 1:
            raise ConfigError(f"the server serves {', '.join(names) or 'no model'}", hint="choose one with --model")
        model = names[0]
    elif names and model not in names:
        raise ConfigError(f"the server does not serve {model!r}", hint=f"it serves {', '.join(names)}")
    if options.block_size is not None:
        return model, options.block_size
    status = await _get(http, f"{options.base}/admin/status", headers)
    if not isinstance(status, str):
        for entry in status.get("models", []):
            if isinstance(entry, dict) and entry.get("name") == model and isinstance(entry.get("block_size"), int):
                return model, entry["block_size"]
    return model, None


async def _get(http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> dict[str, Any] | str:
    """Return the JSON object at a URL, or a sentence on why there is none."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT), http.get(url, headers=headers) as response:
            body = await response.read()
            if response.status != 200:
                return f"HTTP {response.status}: {body[:200].decode('utf-8', 'replace')}"
            value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        return f"HTTP 200 without JSON: {error}"
    except TimeoutError:
        return f"no answer within {PROBE_TIMEOUT:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return value if isinstance(value, dict) else "HTTP 200 without a JSON object"
