"""Parser names: the tool-call and reasoning formats that Penstock itself parses, and those that belong to engines."""

import re
from typing import NamedTuple

TOOL_PARSERS = ("deepseek_v3", "deepseek_v31", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder")
REASONING_PARSERS = ("deepseek_r1", "mistral", "qwen3", "think")
OWN_PREFIX = "penstock:"
"""Before a name: Penstock parses, although the engine has parsers of its own."""
PAIR_MARK = "..."
"""Between the two tags of a reasoning format without a name."""


class EngineFamily(NamedTuple):
    """A family of models whose text Penstock does not read. ``names``: how its parsers' names begin, anywhere.

    ``vllm``, ``sglang``: what the two flags of its engines take, of tool calls and of reasoning.
    """

    names: str
    vllm: tuple[str, str]
    sglang: tuple[str, str]


FAMILIES = {
    "DeepSeek V3.2": EngineFamily("deepseekv32", ("deepseek_v32", "deepseek_v3"), ("deepseekv32", "deepseek-v3")),
    "GLM": EngineFamily("glm|chatglm", ("glm45", "glm45"), ("glm45", "glm45")),
    "Kimi K2": EngineFamily("kimi|moonshot", ("kimi_k2", "kimi_k2"), ("kimi_k2", "kimi_k2")),
    "MiniMax": EngineFamily("minimax", ("minimax_m2", "minimax_m2"), ("minimax-m2", "minimax")),
    "gpt-oss": EngineFamily("gptoss|openai|harmony", ("openai", "openai_gptoss"), ("gpt-oss", "gpt-oss")),
}
"""Parsers of these belong to their engines; docs/guides/agents.md has the same table with those that we read."""


def own_tool_parser(name: str) -> bool:
    """Return whether Penstock has a tool-call parser of this name."""
    return name.removeprefix(OWN_PREFIX) in TOOL_PARSERS


def own_reasoning_parser(name: str) -> bool:
    """Return whether Penstock has a reasoning parser of this name, or the name is a pair of tags."""
    plain = name.removeprefix(OWN_PREFIX)
    return plain in REASONING_PARSERS or bool(plain.partition(PAIR_MARK)[2])


def family_of(name: str) -> str | None:
    """Return the family of `FAMILIES` that a parser's name means, however it is spelt; None where it is another one."""
    plain = re.sub(r"[^a-z0-9]", "", name.removeprefix(OWN_PREFIX).lower())
    return next((family for family, engine in FAMILIES.items() if re.match(engine.names, plain)), None)


def flags_of(family: str) -> str:
    """Return, as a hint, with which flags each engine parses a family."""
    _, vllm, sglang = FAMILIES[family]
    pair = "--tool-call-parser {} --reasoning-parser {}".format
    return (
        f"start vLLM with --enable-auto-tool-choice {pair(*vllm)}, SGLang with {pair(*sglang)}, llama.cpp with --jinja"
    )
