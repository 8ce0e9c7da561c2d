"""The examples for agents: LangChain's tools over an engine that writes Hermes, a session over simulated engines."""

import asyncio
import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.conftest import skip_or_fail
from tests.frontend.stand import stand
from tests.frontend.test_answer_parsing import CARD, writes
from tests.frontend.test_migration import engines

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).resolve().parents[2] / "examples/agents"
CALLS = (
    "<think>Two cities.</think>I look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


async def printed(script: str, *words: str) -> Any:
    """Run an example and return the JSON that it prints."""
    for package in ("langchain_openai", "openai"):
        try:
            importlib.import_module(package)
        except ImportError:
            skip_or_fail(package, "it is not installed; pip install -e '.[clients]'")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / script), *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, problems = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 0, problems.decode()
    return json.loads(out.decode().splitlines()[-1])


async def as_hermes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Write what a Hermes model would: calls first, and the answer when their results are there."""
    results = [message for message in body["messages"] if message["role"] == "tool"]
    calls = [call for message in body["messages"] for call in message.get("tool_calls") or ()]
    assert [result["tool_call_id"] for result in results] == [call["id"] for call in calls]
    cities = ", ".join(json.loads(result["content"])["city"] for result in results)
    return await writes(f"<think>Done.</think>Clear in {cities}." if results else CALLS)(request, body)


@pytest.mark.parametrize("flags", [(), ("--stream",)], ids=["whole", "streamed"])
async def test_a_langchain_agent_calls_its_tool(flags: tuple[str, ...]) -> None:
    async with stand(card=CARD) as s:
        s.engines[0].reply = as_hermes
        found = await printed("weather_agent.py", s.server.url, "m", "What is the weather?", *flags)
        assert found["answer"] == "Clear in Paris, Oslo."
        assert found["calls"] == ['get_weather({"city": "Paris", "days": 2})', 'get_weather({"city": "Oslo"})']
        assert {(record.session, record.program) for record in s.records} == {("weather-1", "weather")}


@pytest.mark.slow
async def test_a_workflow_of_nemo_agent_toolkit_calls_its_tool() -> None:
    nat = os.environ.get("PENSTOCK_NAT") or shutil.which("nat")
    if nat is None:
        skip_or_fail("nat", "NeMo Agent Toolkit is not installed; pip install 'nvidia-nat[langchain]', or PENSTOCK_NAT")

    async def tells_the_time(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        results = [message for message in body["messages"] if message["role"] == "tool"]
        call = '<tool_call>{"name": "clock", "arguments": {"unused": "x"}}</tool_call>'
        return await writes(f"It is {results[0]['content'][:40]}" if results else call)(request, body)

    async with stand(card=CARD) as s:
        s.engines[0].reply = tells_the_time
        process = await asyncio.create_subprocess_exec(
            *(str(nat), "run", "--config_file", str(EXAMPLES / "nat_workflow.yaml"), "--input", "What time is it?"),
            env={**os.environ, "PENSTOCK_URL": s.server.url, "PENSTOCK_MODEL": "m"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 300)  # its import alone takes a minute on a slow machine
        assert process.returncode == 0, out.decode()
        assert len(s.engines[0].bodies) == 2, out.decode()  # the call, and the answer with its result
        assert "It is The current time" in out.decode(), out.decode()


async def test_a_coding_session_finds_its_cache() -> None:
    async with engines(3) as (s, _):
        found = await printed("coding_session.py", s.server.url, "sim", "--agents", "1", "--turns", "7", "--small")
        assert found["requests"] == 7 + 8 and found["hit_rate_later"] > 0.5
        assert {record.program for record in s.records} == {"agent-0"}
        assert {record.session for record in s.records} == {"agent-0/main", "agent-0/sub-6"}
