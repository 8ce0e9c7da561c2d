"""Text of the simulated model: encodes and decodes tokens, and renders its chat template."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.kernel.values import JsonObject
from penstock_lab.sim.sim_tokenizer import DATA_DIR, END, IMAGE, TURN, WORDS, byte_letters


class SimText:
    """The built-in tokenizer, or another one from a folder with ``tokenizer.json``.

    Args:
        template: file with a chat template in place of the folder's.
    """

    def __init__(self, folder: Path = DATA_DIR, template: Path | None = None) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
        own: str | None = config.get("chat_template")
        self._template = own if template is None else template.read_text(encoding="utf-8")
        end = config.get("eos_token") or END
        self.end: int | None = self._tokenizer.token_to_id(end["content"] if isinstance(end, dict) else end)
        self.turn: int | None = self._tokenizer.token_to_id(TURN)
        self.image: int | None = self._tokenizer.token_to_id(IMAGE)
        self._tokens_special = {
            name: value for name in ("bos_token", "eos_token") if isinstance(value := config.get(name), str)
        }
        self.vocabulary: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones; unknown ids become nothing."""
        return str(self._tokenizer.decode([t for t in tokens if t < self.vocabulary], skip_special_tokens=True))

    def chat(self, messages: list[JsonObject], tools: list[Any] | None = None, add_prompt: bool = True) -> str:
        """Return a chat as the text that the model gets.

        Raises:
            ValueError: the template can't render these messages.
        """
        from jinja2 import TemplateError

        try:
            rendered = self._compiled.render(
                messages=messages, tools=tools, add_generation_prompt=add_prompt, **self._tokens_special
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template failed: {error}") from error
        return str(rendered)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token by itself; together they are `decode` where the text is ASCII."""
        table = self._pieces
        return [table.get(token, "") for token in tokens]

    @cached_property
    def words(self) -> list[list[int]]:
        """The words that answers are made of, as token ids; one of nine is a full stop.

        Words of one token each, where the vocabulary has enough of them, so that an answer can be continued anywhere.
        """
        words = [self.encode(f" {word}") for word in WORDS]
        single = [word for word in words if len(word) == 1]
        chosen = single if len(single) >= 64 else words
        return chosen + [self.encode(".")] * (len(chosen) // 8)

    @cached_property
    def _pieces(self) -> dict[int, str]:
        bytes_of = {letter: byte for byte, letter in enumerate(byte_letters())}
        plain = self._tokenizer.get_vocab(with_added_tokens=False)
        special = set(self._tokenizer.get_added_tokens_decoder())
        return {
            id: bytes(bytes_of[letter] for letter in piece if letter in bytes_of).decode(errors="replace")
            for piece, id in plain.items()
            if id not in special
        }

    @cached_property
    def _compiled(self) -> Any:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        template = self._template
        if template is None:
            template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
        return environment.from_string(template)
