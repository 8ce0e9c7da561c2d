"""Do the real Codex CLI and Claude Code, with their default settings, work to their end with a scripted engine?"""

import asyncio
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.conftest import skip_or_fail
from tests.frontend.scripted_answers import script
from tests.frontend.stand import Reply, stand

GUIDES = Path(__file__).resolve().parents[2] / "docs/guides"
"""Their pages have the settings with which the agents run here."""
NUMBERS = itertools.count()
pytestmark = pytest.mark.slow


def program(name: str, package: str) -> str:
    """Return the path of an agent's program, or skip."""
    found = shutil.which(os.environ.get(f"PENSTOCK_{name.upper()}") or name)
    if found is None:
        skip_or_fail(name, f"there is no such command; npm install {package}, or PENSTOCK_{name.upper()}")
    return str(found)


def pasted(page: str, kind: str, url: str) -> str:
    """Return the first block of a kind of a page, with our address and model in place of its own."""
    block = (GUIDES / page).read_text().split(f"```{kind}\n")[1].split("```")[0]
    assert "http://127.0.0.1:8000" in block and "sim" in block
    return re.sub(r"\bsim\b", "m", block.replace("http://127.0.0.1:8000", url))


def call(name: str, **arguments: Any) -> dict[str, Any]:
    id = f"call_{next(NUMBERS)}"  # Claude Code drops a call whose id it has seen
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def turns(*replies: Reply) -> Reply:
    """Answer by how many results of tools there are, at a template that takes one system message."""

    async def speaks(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        roles = [message["role"] for message in body["messages"]]
        assert {tool["type"] for tool in body.get("tools", ())} <= {"function"} and "system" not in roles[1:]
        return await replies[roles.count("tool")](request, body)

    return speaks


async def output_of(folder: Path, *command: str, **environment: str) -> list[Any]:
    """Let an agent work in a folder; return the JSON lines that it prints."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        # The vendors' other services are not reached: all traffic stays on this machine.
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **environment}
        | {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, problems = await asyncio.wait_for(process.communicate(), 200)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, (out.decode(), problems.decode())
    return [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]


async def test_codex_calls_three_tools_and_ends(tmp_path: Path) -> None:
    codex = program("codex", "@openai/codex")
    async with stand() as s:
        s.engines[0].reply = turns(
            script("I write it.", thinking="hm", calls=[call("exec_command", cmd="echo 42 > answer.txt")]),
            script(calls=[call("exec_command", cmd="cat answer.txt")]),
            script(calls=[call("multi_agent_v1__close_agent", target="nobody")]),
            script("The answer is 42."),
        )
        (tmp_path / "config.toml").write_text(pasted("codex.md", "toml", s.server.url))
        events = await output_of(
            tmp_path,
            *(codex, "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            "Write 42 into answer.txt, and read it.",
            CODEX_HOME=str(tmp_path),
            PENSTOCK_API_KEY="any",
        )
        items = [event["item"] for event in events if event["type"] == "item.completed"]
        assert items[-1].get("text") == "The answer is 42.", events
        assert (tmp_path / "answer.txt").read_text() == "42\n"
        assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["input_tokens"] > 0
        whole = max(map(json.loads, s.engines[0].bodies), key=lambda body: len(body["messages"]))
        spoken = [message for message in whole["messages"] if message["role"] == "assistant"]
        assert [turn["tool_calls"][0]["function"]["name"] for turn in spoken] == [
            *("exec_command", "exec_command", "multi_agent_v1__close_agent")
        ]
        results = [message["content"] for message in whole["messages"] if message["role"] == "tool"]
        assert "42" in results[1] and "unsupported" not in results[2], results
        assert {name for record in s.records for name in record.ignored_hints} >= {"tools.web_search"}
        assert len({record.session for record in s.records}) == 1


async def test_claude_code_calls_three_tools_and_ends(tmp_path: Path) -> None:
    claude = program("claude", "@anthropic-ai/claude-code")
    async with stand() as s:
        s.engines[0].reply = turns(
            script("I write it.", thinking="hm", calls=[call("Bash", command="echo 42 > answer.txt", description="w")]),
            script(calls=[call("Bash", command="cat answer.txt", description="r")]),
            script(calls=[call("Read", file_path=str(tmp_path / "answer.txt"))]),
            script("The answer is 42."),
        )
        settings = re.findall(r"^export (\w+)=(.*)$", pasted("claude-code.md", "bash", s.server.url), re.MULTILINE)
        assert len(settings) == 5
        (answer,) = await output_of(
            tmp_path,
            *(claude, "-p", "--output-format", "json", "--dangerously-skip-permissions"),
            "Write 42 into answer.txt, and read it.",
            **dict(settings),
            IS_SANDBOX="1",  # its flag that skips permissions is for containers, where root runs it too
        )
        assert answer["result"] == "The answer is 42." and answer["num_turns"] == 4, answer
        assert (tmp_path / "answer.txt").read_text() == "42\n"
        whole = max(map(json.loads, s.engines[0].bodies), key=lambda body: len(body["messages"]))
        results = [message["content"] for message in whole["messages"] if message["role"] == "tool"]
        assert len(results) == 3 and all("42" in result for result in results[1:])
        assert {record.session for record in s.records} == {answer["session_id"]}
