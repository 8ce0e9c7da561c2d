"""How do the tests ask an OpenAI server, and what do they keep of its answer?"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.vllm.server import MODEL

TIMEOUT = 120.0


@dataclass
class Answer:
    """An answer, streamed or not, in the same terms."""

    status: int
    headers: Mapping[str, str]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    """Whether a stream had its end mark."""
    chunks: int = 0
    raw: Any = None

    @property
    def worker(self) -> str:
        return self.headers["x-penstock-worker"]

    @property
    def expected(self) -> int:
        """Prompt tokens that the router expected in the worker's cache."""
        return int(self.headers["x-penstock-expected-cached-tokens"])

    @property
    def cached(self) -> int:
        """Prompt tokens that the engine says it had in its cache."""
        assert self.usage is not None
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def prompt_tokens(self) -> int:
        assert self.usage is not None
        return int(self.usage["prompt_tokens"])

    @property
    def output_tokens(self) -> int:
        assert self.usage is not None
        return int(self.usage["completion_tokens"])


def completion(prompt: str | list[int], max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """Return the body of a text completion at temperature 0 that goes on to its limit."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def chat(text: str, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat of one message at temperature 0."""
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0, **fields}


def path_of(body: Mapping[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


@asynccontextmanager
async def asking() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT)) as http:
        yield http


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    *,
    stream: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Ask one question and take the whole answer; errors are part of the answer."""
    if stream:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.post(url + path_of(body), json=body, headers=headers) as response:
        answer = Answer(response.status, {name.lower(): value for name, value in response.headers.items()})
        if "text/event-stream" not in response.headers.get("content-type", ""):
            _whole(answer, await response.text())
            return answer
        async for event in events(response):
            take(answer, event)
        return answer


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield the data of each event of a stream."""
    async for line in response.content:
        if line.startswith(b"data:"):
            yield line[5:].decode().strip()


def take(answer: Answer, event: str) -> None:
    """Add one event of a stream to an answer."""
    if event == "[DONE]":
        answer.done = True
        return
    chunk = json.loads(event)
    answer.chunks += 1
    if "error" in chunk:
        answer.error = chunk["error"]
        return
    if chunk.get("usage") is not None:
        answer.usage = chunk["usage"]
    for choice in chunk["choices"]:
        answer.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        answer.token_ids += choice.get("token_ids") or []
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def _whole(answer: Answer, body: str) -> None:
    try:
        found = answer.raw = json.loads(body)
    except ValueError:
        answer.error = {"message": body}
        return
    if answer.status >= 400 or "choices" not in found:
        answer.error = found.get("error", found)
        return
    choice = found["choices"][0]
    answer.text = choice.get("text") or (choice.get("message") or {}).get("content") or ""
    answer.token_ids = choice.get("token_ids") or []
    answer.finish_reason = choice["finish_reason"]
    answer.usage = found["usage"]
