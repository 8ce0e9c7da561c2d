"""How does a request's prompt become blocks for routing? Off the event loop, in a bounded pool of threads."""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.frontend.body import Endpoint, Parsed, parse
from penstock.frontend.errors import rejected
from penstock.frontend.template import SECONDS, TemplateFailed, TemplateSlow, plain_text
from penstock.frontend.tokens import PromptTokenizer
from penstock.kernel.errors import OverloadedError
from penstock.kernel.hashing import BYTES_PER_TOKEN, block_hashes, text_hashes

INLINE_MAX = 2_000
"""Bytes of a body that is prepared on the event loop at once: about 0.3 ms, less than the way to a thread and back."""
INLINE_SECONDS = 0.05
"""How long a chat template may hold the event loop."""
PARSE_INLINE_MAX = 64 * 1024
"""Bytes of a body that is parsed on the event loop: about 0.3 ms."""

T = TypeVar("T")
Observe = Callable[[str, float], None]
"""Takes a stage's name (``template``, ``tokenize``) and its seconds."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What routing knows of a prompt. ``isl``: tokens of all its texts; ``blocks``: of the first one.

    ``estimated``: the model has no tokenizer here; the blocks name text and ``isl`` is bytes divided by 4.
    """

    isl: int
    blocks: list[int]
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Hashing:
    """What besides the tokens decides the blocks."""

    block_size: int
    text_block_bytes: int
    adapter: str | None = None
    salt: str | None = None
    media: tuple[bytes, ...] = ()


class Prompts:
    """Prepares prompts.

    Args:
        threads: that work at the same time.
        queue_max: prompts that may wait for one; the next is refused.
        observe: told how long each stage took.
    """

    def __init__(self, threads: int, queue_max: int, observe: Observe) -> None:
        self.pending = 0
        self.template_failures = 0
        """Chats that our copy of the template refused; they were routed by their plain text."""
        self._most = threads + queue_max
        self._observe = observe
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    async def prepare(
        self, parsed: Parsed, tokenizer: PromptTokenizer | None, hashing: Hashing, token_data: list[int] | None = None
    ) -> Prompt:
        """Turn a request into its prompt's blocks.

        Raises:
            ClientError: 400: a token id is out of range.
            OverloadedError: too many prompts are waiting for a thread.
        """
        if len(parsed.raw) <= INLINE_MAX:
            try:
                return self.prepare_now(parsed, tokenizer, hashing, token_data, INLINE_SECONDS)
            except TemplateSlow:
                pass  # a template may be slow with little text; in a thread it holds up only its own model
        return await self._in_thread(self.prepare_now, parsed, tokenizer, hashing, token_data)

    async def parse(self, endpoint: Endpoint, body: bytes) -> Parsed:
        """Read a body; a large one (some ms of JSON) off the event loop.

        Raises:
            ClientError: 400: it is no request of this endpoint.
            OverloadedError: too many prompts are waiting for a thread.
        """
        return parse(endpoint, body) if len(body) <= PARSE_INLINE_MAX else await self._in_thread(parse, endpoint, body)

    def prepare_now(
        self,
        parsed: Parsed,
        tokenizer: PromptTokenizer | None,
        hashing: Hashing,
        token_data: list[int] | None = None,
        seconds: float | None = None,
    ) -> Prompt:
        """Do the same in the caller's thread.

        Args:
            seconds: that a chat template may take; None is `SECONDS`.
        Raises:
            TemplateSlow: it takes longer than that, which is less than `SECONDS`.
        """
        if token_data:
            return _of_tokens([token_data], hashing, "nvext.token_data")
        if parsed.endpoint == "completions":
            return self._completion(parsed.fields.get("prompt"), tokenizer, hashing)
        return self._chat(parsed.fields, tokenizer, hashing, SECONDS if seconds is None else seconds)

    def close(self) -> None:
        """End the threads; prompts that wait are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        if self.pending >= self._most:
            raise OverloadedError(f"{self.pending} prompts are waiting to be tokenised", retry_after=1.0)
        self.pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)
        finally:
            self.pending -= 1

    def _completion(self, prompt: Any, tokenizer: PromptTokenizer | None, hashing: Hashing) -> Prompt:
        if prompt is None:  # embeddings given as a prompt: nothing that we could hash
            return Prompt(0, [], estimated=True)
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            return _of_tokens([prompt], hashing, "prompt")
        if isinstance(prompt, list) and isinstance(prompt[0], list):
            return _of_tokens(prompt, hashing, "prompt")
        texts = [prompt] if isinstance(prompt, str) else prompt
        return self._of_texts(texts, tokenizer, hashing, special=True)

    def _chat(
        self, fields: dict[str, Any], tokenizer: PromptTokenizer | None, hashing: Hashing, seconds: float
    ) -> Prompt:
        messages = fields["messages"]
        tools = None if fields.get("tool_choice") == "none" else fields.get("tools")
        if tokenizer is None:
            return _of_text(plain_text(messages, tools), hashing)
        if tokenizer.template is None or tokenizer.template.given_up:
            return self._of_texts([plain_text(messages, tools)], tokenizer, hashing, special=True)
        started = time.perf_counter()
        try:
            text = tokenizer.template.render(
                messages,
                tools=tools,
                add_generation_prompt=fields.get("add_generation_prompt") is not False
                and not fields.get("continue_final_message"),
                continue_final_message=bool(fields.get("continue_final_message")),
                kwargs=fields.get("chat_template_kwargs"),
                seconds=seconds,
            )
        except TemplateFailed as error:
            if isinstance(error, TemplateSlow) and seconds < SECONDS:
                raise
            # Whether the chat is acceptable is the engine's to say; here only routing by prefix is lost.
            self.template_failures += 1
            return self._of_texts([plain_text(messages, tools)], tokenizer, hashing, special=False)
        self._observe("template", time.perf_counter() - started)
        return self._of_texts([text], tokenizer, hashing, special=bool(fields.get("add_special_tokens")))

    def _of_texts(
        self, texts: Sequence[str], tokenizer: PromptTokenizer | None, hashing: Hashing, *, special: bool
    ) -> Prompt:
        if tokenizer is None:
            first = _of_text(texts[0], hashing)
            rest = sum(_estimate(text) for text in texts[1:])
            return Prompt(first.isl + rest, first.blocks, estimated=True)
        started = time.perf_counter()
        tokens = [tokenizer.encode(text, special=special) for text in texts]
        self._observe("tokenize", time.perf_counter() - started)
        return _of_tokens(tokens, hashing, "prompt")


def _of_tokens(prompts: Sequence[Sequence[int]], hashing: Hashing, param: str) -> Prompt:
    first = prompts[0]
    try:
        words = first if isinstance(first, array) else array("I", first)
    except (OverflowError, TypeError):
        raise rejected("a token id must be a whole number 0..4294967295", param) from None
    blocks = block_hashes(words, hashing.block_size, lora=hashing.adapter, salt=hashing.salt, multimodal=hashing.media)
    return Prompt(sum(len(tokens) for tokens in prompts), list(blocks))


def _of_text(text: str, hashing: Hashing) -> Prompt:
    blocks = text_hashes(
        text, hashing.text_block_bytes, lora=hashing.adapter, salt=hashing.salt, multimodal=hashing.media
    )
    return Prompt(_estimate(text), list(blocks), estimated=True)


def _estimate(text: str) -> int:
    return max(1, len(text) // BYTES_PER_TOKEN) if text else 0
