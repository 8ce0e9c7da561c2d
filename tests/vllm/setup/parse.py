"""Reads answers with vLLM's own tool-call parsers, which need no model: cases on standard input, results as JSON."""

import json
import sys
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager


class Vocabulary(dict[str, int]):
    """Has every token."""

    def get(self, key: str, default: Any = None) -> int:
        return self.setdefault(key, len(self) + 1)

    def __getitem__(self, key: str) -> int:
        return self.get(key)

    def __contains__(self, key: object) -> bool:
        return True


class Tokenizer:
    """As much of a tokenizer as the parsers look at."""

    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.vocab = Vocabulary()

    def get_vocab(self) -> Vocabulary:
        return self.vocab

    def encode(self, text: str, **options: Any) -> list[int]:
        return [self.vocab.get(text)]

    def decode(self, ids: list[int], **options: Any) -> str:
        names = {number: name for name, number in self.vocab.items()}
        return "".join(names[number] for number in ids)

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.vocab.get(token)


results = []
for name, text, schemas in json.load(sys.stdin):
    tools = [{"type": "function", "function": {"name": tool, "parameters": schemas[tool]}} for tool in schemas]
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=tools)
    parser = ToolParserManager.get_tool_parser(name)(Tokenizer(), request.tools)
    read = parser.extract_tool_calls(text, request)
    results.append([read.content or "", [[c.function.name, json.loads(c.function.arguments)] for c in read.tool_calls]])
print("\n" + json.dumps(results))
