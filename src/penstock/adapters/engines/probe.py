"""Probe of an engine: requests one token for a prompt shorter than any block, to see whether it still makes tokens."""

import asyncio
from typing import Literal

import aiohttp
import msgspec

from penstock.adapters.engines.dialects.dialect import samples
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.http.engine_call import EngineCalls
from penstock.adapters.engines.http.engine_http import EngineServer
from penstock.kernel.errors import EngineError
from penstock.kernel.values import WorkerCard
from penstock.router.stage_graph import needs_pair

PROMPT = "Hi"
"""Short enough that no engine keeps it in its cache."""
ANSWER_MAX = 64 << 10
OTHERS = 1.0
"""Seconds in which an engine with other clients makes at least one token."""

Verdict = Literal["alive", "busy", "unfit", "missed"]
"""alive: it made a token; busy: it answers, and has no room; unfit: it refuses such a request; missed: no token."""


async def step(calls: EngineCalls, card: WorkerCard, request: str) -> None:
    """Make an engine take one step, so that it publishes the KV events that wait for one.

    Raises:
        EngineError: it did not.
    """
    headers = {"content-type": "application/json", **dialect_of(card.engine).headers(request)}
    call = calls.call(card.url, "/v1/completions", msgspec.json.encode(_body(card)), headers)
    try:
        await call.begin()
        body = await call.read()
        if call.status != 200:
            raise EngineError(f"{card.id} answered {call.status}: {body[:200].decode('utf-8', 'replace')}")
    finally:
        call.close()


async def one_token(http: aiohttp.ClientSession, card: WorkerCard, timeout: float, request: str) -> tuple[Verdict, str]:
    """Request one token from an engine.

    Args:
        timeout: seconds for the whole answer.
        request: id of the request, for the engine's log.
    Returns: the verdict, and what was observed in a few words.
    """
    dialect = dialect_of(card.engine)
    body = _body(card)
    try:
        async with asyncio.timeout(timeout):
            async with http.post(
                f"{card.url}/v1/completions", json=body, headers=dialect.headers(request), allow_redirects=False
            ) as answer:
                status, content = answer.status, await answer.content.read(ANSWER_MAX)
    except TimeoutError:
        if await _makes_others(http, card):
            return "busy", f"no token within {timeout:g} s, but others get theirs"
        return "missed", f"no token within {timeout:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return "missed", f"no answer: {type(error).__name__}: {error}"
    if status >= 400:
        text = " ".join(content[:300].decode("utf-8", "replace").split())
        kind = dialect.refusal(status, text)
        verdict: Verdict = {"client": "unfit", "busy": "busy"}.get(kind, "missed")  # type: ignore[assignment]
        return verdict, f"it answered {status}: {text or 'nothing'}"
    reasons = _finish_reasons(content)
    if not reasons:
        return "missed", "it answered without a choice"
    if any(reason in dialect.gave_up for reason in reasons):
        return "missed", f"it gave the request up with the finish reason {reasons[0]}"
    return "alive", "it made a token"


def _body(card: WorkerCard) -> dict[str, object]:
    alone = dialect_of(card.engine).probe_fields if needs_pair(card) else {}
    return {"model": card.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, **alone}


async def _makes_others(http: aiohttp.ClientSession, card: WorkerCard) -> bool:
    """Return whether an engine makes tokens for other clients meanwhile, by its own counter."""
    name = dialect_of(card.engine).counters.generation_tokens
    if name is None:
        return False
    counts = []
    for wait in (0.0, OTHERS):
        await asyncio.sleep(wait)
        page = await EngineServer(http, card.url).text("/metrics")
        counts.append(None if page is None else samples(page).get(name))
    first, second = counts
    return first is not None and second is not None and second > first


class _ProbeChoice(msgspec.Struct):
    finish_reason: str | None = None


class _ProbeAnswer(msgspec.Struct):
    choices: list[_ProbeChoice] = []


def _finish_reasons(body: bytes) -> list[str | None]:
    try:
        return [choice.finish_reason for choice in msgspec.json.decode(body, type=_ProbeAnswer).choices]
    except msgspec.DecodeError:
        return []
