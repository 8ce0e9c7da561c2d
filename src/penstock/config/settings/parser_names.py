"""Parser names: the tool-call and reasoning formats that Penstock itself parses."""

TOOL_PARSERS = ("deepseek_v3", "deepseek_v31", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder")
REASONING_PARSERS = ("deepseek_r1", "mistral", "qwen3", "think")
OWN_PREFIX = "penstock:"
"""Before a name: Penstock parses, although the engine has parsers of its own."""
PAIR_MARK = "..."
"""Between the two tags of a reasoning format without a name."""


def own_tool_parser(name: str) -> bool:
    """Return whether Penstock has a tool-call parser of this name."""
    return name.removeprefix(OWN_PREFIX) in TOOL_PARSERS


def own_reasoning_parser(name: str) -> bool:
    """Return whether Penstock has a reasoning parser of this name, or the name is a pair of tags."""
    plain = name.removeprefix(OWN_PREFIX)
    return plain in REASONING_PARSERS or bool(plain.partition(PAIR_MARK)[2])
