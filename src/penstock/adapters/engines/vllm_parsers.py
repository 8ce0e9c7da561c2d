"""vLLM parsers: which tool-call and reasoning parsers an installed vLLM has, by asking it."""

import json
import shutil
import subprocess
from pathlib import Path

import msgspec

from penstock.config.settings.cluster_settings import PoolSettings
from penstock.config.settings.parser_names import OWN_PREFIX, own_reasoning_parser, own_tool_parser
from penstock.kernel.errors import ConfigError

ASK_TIMEOUT = 120.0
"""Seconds that vLLM may take to import its lists: 25 on two busy cores."""
_QUESTION = """
import json
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
print("\\n" + json.dumps([ToolParserManager.list_registered(), ReasoningParserManager.list_registered()]))
"""


class EngineParsers(msgspec.Struct, frozen=True):
    """Names of an engine's parsers."""

    tools: tuple[str, ...]
    reasoning: tuple[str, ...]


def python_of(program: str) -> str | None:
    """Return the Python that runs a program, from its environment or its first line; None where neither says."""
    path = shutil.which(program)
    if path is None:
        return None
    # Not resolved: the program of a virtual environment may be a link, and its folder is what counts.
    beside = Path(path).absolute().parent / "python"
    if beside.exists():
        return str(beside)
    with Path(path).open("rb") as file:
        first = file.readline(512).decode("utf-8", "replace").strip()
    return first.removeprefix("#!").strip() if first.startswith("#!/") and "python" in first else None


def installed_parsers(program: str) -> EngineParsers | None:
    """Ask a vLLM program's environment for its parsers; None where it does not answer, as an older vLLM."""
    python = python_of(program)
    if python is None:
        return None
    try:
        answer = subprocess.run(
            [*python.split(), "-c", _QUESTION], capture_output=True, text=True, timeout=ASK_TIMEOUT, check=True
        )
        tools, reasoning = json.loads(answer.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return EngineParsers(tuple(sorted(tools)), tuple(sorted(reasoning)))


def check_parsers(pool: PoolSettings, parsers: EngineParsers) -> None:
    """Check the parsers that a pool of vLLM wants.

    Raises:
        ConfigError: that vLLM has none of the name.
    """
    for kind, name, names, own in (
        ("tool-call", pool.tool_parser, parsers.tools, own_tool_parser),
        ("reasoning", pool.reasoning_parser, parsers.reasoning, own_reasoning_parser),
    ):
        if name is not None and not name.startswith(OWN_PREFIX) and name not in names:
            ours = f"; or {OWN_PREFIX}{name}, which Penstock parses" if own(name) else ""
            raise ConfigError(
                f"{pool.program} has no {kind} parser {name!r}", hint=f"its parsers are {', '.join(names)}{ours}"
            )
