"""Does the real Codex CLI, with its default settings, work to its end with a scripted engine behind Penstock?"""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.conftest import skip_or_fail
from tests.frontend.scripted_answers import script
from tests.frontend.stand import stand

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/vendor-clients.md"
pytestmark = pytest.mark.slow


def program() -> str:
    """Return the path of Codex, or skip."""
    found = shutil.which(os.environ.get("PENSTOCK_CODEX") or "codex")
    if found is None:
        skip_or_fail("codex", "there is no such command; npm install @openai/codex, or PENSTOCK_CODEX")
    return str(found)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


async def run_codex(folder: Path, url: str, prompt: str) -> tuple[list[dict[str, Any]], str]:
    """Let Codex work in a folder; return its events and what it says beside them."""
    home = folder / "home"
    home.mkdir()
    config = (
        PAGE.read_text().split("```toml\n")[1].split("```")[0]
    )  # as the page has it, with another address and model
    (home / "config.toml").write_text(config.replace("http://127.0.0.1:8000", url).replace('"sim"', '"m"'))
    process = await asyncio.create_subprocess_exec(
        *(program(), "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        prompt,
        cwd=folder,
        # Its other services are not reached: all traffic stays on this machine.
        env={"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home), "PENSTOCK_API_KEY": "any"}
        | {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, problems = await asyncio.wait_for(process.communicate(), 200)
    finally:
        if process.returncode is None:
            process.kill()
    return [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")], problems.decode()


async def test_it_calls_three_tools_and_ends(tmp_path: Path) -> None:
    turns = [
        script("I write it.", thinking="hm", calls=[call("exec_command", cmd="echo 42 > answer.txt")]),
        script(calls=[call("exec_command", cmd="cat answer.txt")]),
        script(calls=[call("multi_agent_v1__close_agent", target="nobody")]),
        script("The answer is 42."),
    ]

    async def speaks(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert {tool["type"] for tool in body["tools"]} == {"function"}
        results = [message for message in body["messages"] if message["role"] == "tool"]
        return await turns[len(results)](request, body)

    async with stand() as s:
        s.engines[0].reply = speaks
        events, problems = await run_codex(tmp_path, s.server.url, "Write 42 into answer.txt, and read it.")
        items = [event["item"] for event in events if event["type"] == "item.completed"]
        assert items and items[-1].get("text") == "The answer is 42.", (events, problems)
        assert (tmp_path / "answer.txt").read_text() == "42\n"
        assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["input_tokens"] > 0
        whole = json.loads(s.engines[0].bodies[-1])
        spoken = [message for message in whole["messages"] if message["role"] == "assistant"]
        assert [turn["tool_calls"][0]["function"]["name"] for turn in spoken] == [
            *("exec_command", "exec_command", "multi_agent_v1__close_agent")
        ]
        results = [message["content"] for message in whole["messages"] if message["role"] == "tool"]
        assert "42" in results[1] and "unsupported" not in results[2], results
        assert {name for record in s.records for name in record.ignored_hints} >= {"tools.web_search"}
