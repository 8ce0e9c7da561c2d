"""Sleep mode of engines: vLLM's routes that move weights from GPU to host memory and back, and what that needs."""

import asyncio

import aiohttp

from penstock.kernel.errors import EngineError

SLEEP_FLAG = "--enable-sleep-mode"
SLEEP_ENV = {"VLLM_SERVER_DEV_MODE": "1"}
"""vLLM shows the routes in its development mode only, which shows others as well: the server must not be reachable by
strangers."""
LEVEL = 1
"""Weights stay in host memory. Level 2 drops them, so that waking takes about as long as loading does."""
SLEEP_TIMEOUT = 60.0
"""Seconds: 140 GB at 10 GB/s take 14."""
WAKE_TIMEOUT = 120.0


async def put_to_sleep(http: aiohttp.ClientSession, url: str) -> None:
    """Put an idle engine to sleep.

    Raises:
        EngineError: it has no such route, refuses, takes too long, or does not sleep afterwards.
    """
    await _post(http, f"{url}/sleep?level={LEVEL}", SLEEP_TIMEOUT)
    if not await sleeps(http, url):
        raise EngineError(f"{url}/sleep answered 200, and {url}/is_sleeping does not say that it sleeps")


async def wake(http: aiohttp.ClientSession, url: str) -> None:
    """Wake an engine, and return once it has its weights on its GPUs.

    Raises:
        EngineError: it refuses, takes too long, or still sleeps.
    """
    await _post(http, f"{url}/wake_up", WAKE_TIMEOUT)
    if await sleeps(http, url):
        raise EngineError(f"{url} still sleeps, although /wake_up answered 200")


async def sleeps(http: aiohttp.ClientSession, url: str) -> bool:
    """Return whether an engine sleeps.

    Raises:
        EngineError: it does not tell.
    """
    try:
        async with asyncio.timeout(SLEEP_TIMEOUT), http.get(f"{url}/is_sleeping") as answer:
            body = await answer.json() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise EngineError(f"{url}/is_sleeping does not answer: {error or type(error).__name__}") from error
    asleep = body.get("is_sleeping") if isinstance(body, dict) else None
    if not isinstance(asleep, bool):
        raise EngineError(f"{url}/is_sleeping answers {answer.status}", hint="is it a vLLM server with sleep mode?")
    return asleep


async def _post(http: aiohttp.ClientSession, url: str, timeout: float) -> None:
    try:
        async with asyncio.timeout(timeout), http.post(url) as answer:
            if answer.status != 200:
                text = (await answer.text())[:200]
                raise EngineError(f"{url} answers {answer.status}: {text}")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineError(f"{url} does not answer within {timeout:g} s: {error or type(error).__name__}") from error
