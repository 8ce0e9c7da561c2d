"""A coding agent's session against an OpenAI-shaped server: 30 turns, and three sub-agents on the way.

python coding_session.py URL MODEL [--agents N] prints what its turns cost: the time to first token and the share of the
prompt that came from a cache. Needs the package openai. The agent's tools are played: each turn appends the model's
answer and a file or a log of about 600 tokens, as reading files and running tests does. Every agent is a program; each
of its sub-agents is a session of its own, told by prompt_cache_key and metadata, with no header of Penstock's.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field

from openai import AsyncOpenAI

WORDS = (
    *("def", "return", "import", "class", "self", "value", "error", "test", "line", "file"),
    *("read", "write", "open", "index", "token", "block", "cache", "list"),
)
SYSTEM_WORDS = 1500
TOOL_WORDS = 500
ANSWER_TOKENS = 24
TURNS = 30
SUB_TURNS = 8
SUB_AGENTS_AT = (6, 12, 18)
"""Turns of the main agent at which it starts a sub-agent and waits for it."""


@dataclass
class Costs:
    """What the turns of all agents cost."""

    ttft_first: list[float] = field(default_factory=list)
    ttft_later: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0


async def turn(
    client: AsyncOpenAI, model: str, messages: list[dict[str, str]], session: str, program: str
) -> tuple[str, float, int, int]:
    """Ask once; return the answer, the seconds to its first token, and the prompt's tokens and cached tokens."""
    began, first, text, prompt, cached = time.monotonic(), None, "", 0, 0
    stream = await client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=ANSWER_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        prompt_cache_key=session,
        metadata={"program_id": program},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.monotonic() - began
            text += chunk.choices[0].delta.content
        if chunk.usage is not None:
            prompt = chunk.usage.prompt_tokens
            cached = (chunk.usage.prompt_tokens_details and chunk.usage.prompt_tokens_details.cached_tokens) or 0
    return text, first or time.monotonic() - began, prompt, cached


async def session(
    client: AsyncOpenAI, model: str, costs: Costs, program: str, name: str, turns: int, seed: int
) -> None:
    """Play one agent; the main one starts sub-agents on its way."""
    rng = random.Random(seed)
    shared = random.Random(0)  # all agents of this tool have one system prompt
    messages = [{"role": "system", "content": " ".join(shared.choices(WORDS, k=SYSTEM_WORDS))}]
    for number in range(turns):
        messages.append({"role": "user", "content": f"{name} {number} " + " ".join(rng.choices(WORDS, k=TOOL_WORDS))})
        text, ttft, prompt, cached = await turn(client, model, messages, f"{program}/{name}", program)
        (costs.ttft_later if number else costs.ttft_first).append(ttft)
        if number:
            costs.prompt += prompt
            costs.cached += cached
        messages.append({"role": "assistant", "content": text})
        if name == "main" and number in SUB_AGENTS_AT:
            await session(client, model, costs, program, f"sub-{number}", SUB_TURNS, seed * 100 + number)
        await asyncio.sleep(rng.uniform(0.0, 0.2))  # the tools run


async def run(url: str, model: str, agents: int, turns: int) -> dict[str, float]:
    """Play all agents at once; return their costs."""
    costs = Costs()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:
        await asyncio.gather(
            *(session(client, model, costs, f"agent-{agent}", "main", turns, agent + 1) for agent in range(agents))
        )
    later = sorted(costs.ttft_later)
    return {
        "requests": len(costs.ttft_first) + len(later),
        "ttft_later_p50_ms": round(statistics.median(later) * 1e3, 1),
        "ttft_later_p95_ms": round(later[int(len(later) * 0.95)] * 1e3, 1),
        "hit_rate_later": round(costs.cached / costs.prompt, 4) if costs.prompt else 0.0,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--agents", type=int, default=6)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--small", action="store_true", help="Texts of a tenth of the length.")
    given = parser.parse_args()
    if given.small:
        SYSTEM_WORDS, TOOL_WORDS = SYSTEM_WORDS // 10, TOOL_WORDS // 10
    print(json.dumps(asyncio.run(run(given.url, given.model, given.agents, given.turns))))
