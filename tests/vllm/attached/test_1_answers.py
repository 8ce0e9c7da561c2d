"""Does a client get through Penstock what vLLM itself says? Temperature 0, one request at a time."""

from typing import Any

import pytest

from penstock_lab.traffic.prompt_maker import words
from tests.live.cluster import Served
from tests.vllm.asking import Answer, ask, asking, chat, completion
from tests.vllm.attached.conftest import WORKERS
from tests.vllm.server import BLOCK, VllmServer

Servers = tuple[VllmServer, VllmServer]

QUESTIONS: dict[str, dict[str, Any]] = {
    "a short chat": chat("Hello there", 24),
    "a chat that may end by itself": chat("And now?", 200),
    "a long chat": chat(words(400, seed=1), 24, ignore_eos=True),
    "a chat with a system prompt": {
        **chat("Go on", 16),
        "messages": [
            {"role": "system", "content": "You are brief. Ünïcödé 漢字 😀"},
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Two"},
            {"role": "user", "content": [{"type": "text", "text": "Three"}]},
        ],
    },
    "a text": completion("Once upon a time", 32),
    "a long text": completion(words(600, seed=2), 8),
    "token ids": completion(list(range(300, 300 + 3 * BLOCK)), 12, return_token_ids=True),
    "a stop text": completion("Tell me", 120, stop=["e "], ignore_eos=False),
    "no end token": completion("To the end", 300, ignore_eos=False),
}


@pytest.mark.parametrize("name", QUESTIONS)
async def test_a_whole_answer_is_the_one_that_vllm_gives(servers: Servers, front: Served, name: str) -> None:
    body = QUESTIONS[name]
    async with asking() as http:
        servers[0].clear()
        own = await ask(http, servers[0].url, body)
        servers[0].clear()
        ours = await ask(http, front.url, body, headers={"x-penstock-worker": WORKERS[0]})
    assert own.status == ours.status == 200, (own.error, ours.error)
    assert alike(own.raw) == alike(ours.raw)
    assert ours.headers["x-penstock-request-id"] in ours.raw["id"]


@pytest.mark.parametrize("name", QUESTIONS)
async def test_a_streamed_answer_is_the_one_that_vllm_gives(servers: Servers, front: Served, name: str) -> None:
    body = QUESTIONS[name]
    async with asking() as http:
        servers[0].clear()
        own = await ask(http, servers[0].url, body, stream=True)
        servers[0].clear()
        ours = await ask(http, front.url, body, stream=True, headers={"x-penstock-worker": WORKERS[0]})
        servers[0].clear()
        whole = await ask(http, front.url, body, headers={"x-penstock-worker": WORKERS[0]})
    assert own.status == ours.status == 200, (own.error, ours.error)
    assert own.done and ours.done and own.error is None and ours.error is None
    assert said(own) == said(ours) == said(whole)
    assert own.usage == ours.usage


async def test_a_stream_without_usage_has_none_though_we_ask_the_engine_for_it(front: Served) -> None:
    async with asking() as http:
        answer = await ask(http, front.url, {**completion("Count nothing", 6), "stream": True})
    assert answer.done and answer.usage is None and answer.text
    explained = front.get(f"/admin/explain/{answer.headers['x-penstock-request-id']}")[1]
    assert explained["request"]["osl"] == 6, "the router knows the true count all the same"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (completion([7] * 2100, 1), 400),  # longer than the model takes
        (completion("x", 1, temperature=-1), 400),
        (completion("x", 1, n=2), 400),  # two answers at temperature 0 would be the same one
        ({**completion("x", 1), "model": "no-such-adapter"}, 404),
    ],
)
async def test_a_refusal_has_the_status_and_the_reason_that_vllm_gives(
    servers: Servers, front: Served, body: dict[str, Any], status: int
) -> None:
    async with asking() as http:
        own = await ask(http, servers[0].url, body)
        ours = await ask(http, front.url, body)
    assert own.status == ours.status == status
    assert own.error is not None and ours.error is not None and ours.error["message"]


def alike(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without what differs from one time to the next."""
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


def said(answer: Answer) -> tuple[Any, ...]:
    return answer.text, answer.finish_reason, answer.token_ids, answer.prompt_tokens, answer.output_tokens
