"""Prompt hashing: turns a request's prompt into blocks for routing, in a bounded pool of threads."""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from penstock.frontend.http.error_responses import rejected
from penstock.frontend.prompt.chat_template import MARK, SECONDS, TemplateFailed, TemplateSlow, plain_text
from penstock.frontend.prompt.known_hashes import KnownHashes
from penstock.frontend.prompt.prompt_tokenizer import PromptTokenizer, TooMuchToEncode
from penstock.frontend.prompt.request_body import Endpoint, Parsed, media_of, parse
from penstock.kernel.errors import OverloadedError
from penstock.kernel.hashing import BYTES_PER_TOKEN, MediaSpan, block_hashes, text_hashes
from penstock.kernel.values import JsonObject, Prompt
from penstock.router.kv_index.image_placeholders import Image
from penstock.router.requests.refusals import TOKENIZER_BUSY

INLINE_MAX = 16 * 1024
"""Bytes of a body whose prompt is prepared on the event loop where little of it is to be tokenised: about 0.1 ms."""
FRESH_INLINE_MAX = 2_000
"""Characters that are tokenised on the event loop: about 0.3 ms, not much more than the way to a thread and back."""
INLINE_SECONDS = 0.05
"""How long a chat template may block the event loop."""
PARSE_INLINE_MAX = 64 * 1024
"""Bytes of a body that is parsed on the event loop: about 0.1 ms."""

T = TypeVar("T")
Observe = Callable[[str, float], None]
"""Takes a stage's name (``template``, ``tokenize``) and its seconds."""


class PromptMedia(NamedTuple):
    """An image of a prompt. ``id``: distinguishes it from others; ``image``: the engines' tokens in its place."""

    id: str | None
    image: Image | None


@dataclass(frozen=True, slots=True)
class BlockHashing:
    """What decides the blocks besides the tokens."""

    block_size: int
    text_block_bytes: int
    adapter: str | None = None
    salt: str | None = None
    media: tuple[PromptMedia, ...] = ()
    """Images and other media of a chat, in order."""
    placeholders: frozenset[int] = frozenset()
    """Tokens that stand for them in a template's text..."""
    usual: int = 0
    """... and how many of them an image usually takes."""


class PromptHasher:
    """Prepares prompts.

    Args:
        threads: number of threads that work at the same time.
        queue_max: prompts that may wait for one; the next is refused.
        observe: called with the duration of each stage.
    """

    def __init__(self, threads: int, queue_max: int, observe: Observe) -> None:
        self.pending = 0
        self.template_failures = 0
        """Chats that our copy of the template refused; they were routed by their plain text."""
        self._most = threads + queue_max
        self._observe = observe
        self._known = KnownHashes()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    async def prepare(
        self,
        parsed: Parsed,
        tokenizer: PromptTokenizer | None,
        hashing: BlockHashing,
        token_data: list[int] | None = None,
    ) -> Prompt:
        """Return the blocks of a request's prompt.

        Raises:
            ClientError: 400: a token id is out of range.
            OverloadedError: too many prompts are waiting for a thread.
        """
        if len(parsed.raw) <= INLINE_MAX:
            try:
                return self.prepare_now(parsed, tokenizer, hashing, token_data, inline=True)
            except (TemplateSlow, TooMuchToEncode):
                pass  # a template may be slow with little text; in a thread it delays only its own model
        return await self.in_thread(self.prepare_now, parsed, tokenizer, hashing, token_data)

    async def parse(self, endpoint: Endpoint, body: bytes, fields: JsonObject | None = None) -> Parsed:
        """Read a body; a large one (some ms of JSON) off the event loop. ``fields``: it is decoded already.

        Raises:
            ClientError: 400: it is no request of this endpoint.
            OverloadedError: too many prompts are waiting for a thread.
        """
        if fields is not None or len(body) <= PARSE_INLINE_MAX:
            return parse(endpoint, body, fields)
        return await self.in_thread(parse, endpoint, body)

    def prepare_now(
        self,
        parsed: Parsed,
        tokenizer: PromptTokenizer | None,
        hashing: BlockHashing,
        token_data: list[int] | None = None,
        *,
        inline: bool = False,
    ) -> Prompt:
        """Do the same in the caller's thread.

        Args:
            inline: that thread is the event loop's, which must not be held up.
        Raises:
            TemplateSlow, TooMuchToEncode: it would be.
        """
        if token_data:
            return self._of_tokens([token_data], hashing, "nvext.token_data")
        if parsed.endpoint == "completions":
            return self._completion(parsed.fields.get("prompt"), tokenizer, hashing, inline)
        return self._chat(parsed.fields, tokenizer, hashing, inline)

    def close(self) -> None:
        """End the threads; prompts that wait are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do work on a prompt off the event loop.

        Raises:
            OverloadedError: too many prompts are waiting for a thread.
        """
        if self.pending >= self._most:
            text = f"{self.pending} prompts are waiting to be tokenised"
            raise OverloadedError(text, retry_after=1.0, code=TOKENIZER_BUSY)
        self.pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)
        finally:
            self.pending -= 1

    def _completion(
        self, prompt: Any, tokenizer: PromptTokenizer | None, hashing: BlockHashing, inline: bool
    ) -> Prompt:
        if prompt is None:  # embeddings given as a prompt: nothing to hash
            return Prompt(0, [], estimated=True)
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            return self._of_tokens([prompt], hashing, "prompt")
        if isinstance(prompt, list) and isinstance(prompt[0], list):
            return self._of_tokens(prompt, hashing, "prompt")
        texts = [prompt] if isinstance(prompt, str) else prompt
        return self._of_texts(texts, tokenizer, hashing, special=True, inline=inline)

    def _chat(
        self, fields: JsonObject, tokenizer: PromptTokenizer | None, hashing: BlockHashing, inline: bool
    ) -> Prompt:
        messages = fields["messages"]
        tools = None if fields.get("tool_choice") == "none" else fields.get("tools")
        if tokenizer is None:
            return _of_text(plain_text(messages, tools), hashing)
        template = tokenizer.template
        if template is None or template.given_up:
            return self._of_texts([plain_text(messages, tools)], tokenizer, hashing, special=True, inline=inline)
        started = time.perf_counter()
        seconds = INLINE_SECONDS if inline else SECONDS
        render = partial(
            template.render,
            messages,
            tools=tools,
            add_generation_prompt=fields.get("add_generation_prompt") is not False
            and not fields.get("continue_final_message"),
            continue_final_message=bool(fields.get("continue_final_message")),
            kwargs=fields.get("chat_template_kwargs"),
            seconds=seconds,
        )
        try:
            if hashing.media and hashing.placeholders and template.takes_parts:
                special = bool(fields.get("add_special_tokens"))
                tokens = tokenizer.encode(render(), special=special, fresh_max=FRESH_INLINE_MAX if inline else None)
                written = [template.written(part, seconds) for part in media_of(fields)]
                prompt = _with_images(tokens, hashing, [tokenizer.encode(text, special=False) for text in written])
                if prompt is not None:
                    self._observe("template", time.perf_counter() - started)
                    return prompt
            text = render(mark=bool(hashing.media))
        except TemplateFailed as error:
            if isinstance(error, TemplateSlow) and inline:
                raise
            # The engine decides whether the chat is acceptable; here only routing by prefix is lost.
            self.template_failures += 1
            return self._of_texts([plain_text(messages, tools)], tokenizer, hashing, special=False, inline=inline)
        self._observe("template", time.perf_counter() - started)
        special = bool(fields.get("add_special_tokens"))
        return self._of_texts([text], tokenizer, hashing, special=special, inline=inline)

    def _of_texts(
        self,
        texts: Sequence[str],
        tokenizer: PromptTokenizer | None,
        hashing: BlockHashing,
        *,
        special: bool,
        inline: bool,
    ) -> Prompt:
        if tokenizer is None:
            first = _of_text(texts[0], hashing)
            rest = sum(_estimate(text) for text in texts[1:])
            return Prompt(first.isl + rest, first.blocks, estimated=True)
        started = time.perf_counter()
        fresh_max = FRESH_INLINE_MAX // len(texts) if inline else None
        # The tokens that an engine puts in the place of an image are unknown: only the text before it can match.
        before, mark, after = texts[0].partition(MARK) if hashing.media else (texts[0], "", "")
        tokens = [tokenizer.encode(text, special=special, fresh_max=fresh_max) for text in (before, *texts[1:])]
        beyond = 0
        if mark:
            tail = tokenizer.encode(after.replace(MARK, ""), special=False, fresh_max=fresh_max)
            beyond = len(tail) + _taken(hashing)
        self._observe("tokenize", time.perf_counter() - started)
        hashed = self._of_tokens(tokens, hashing, "prompt")
        return Prompt(hashed.isl + beyond, hashed.blocks)

    def _of_tokens(self, prompts: Sequence[Sequence[int]], hashing: BlockHashing, param: str) -> Prompt:
        first = prompts[0]
        try:
            words = first if isinstance(first, array) else array("I", first)
        except (OverflowError, TypeError):
            raise rejected("a token id must be a whole number 0..4294967295", param) from None
        blocks = self._known.block_hashes(words, hashing.block_size, lora=hashing.adapter, salt=hashing.salt)
        return Prompt(sum(len(tokens) for tokens in prompts), blocks)


def _with_images(tokens: "array[int]", hashing: BlockHashing, written: "Sequence[array[int]]") -> Prompt | None:
    """Return a chat's prompt with the engines' tokens in the place of its images, as far as known.

    None where it can't be told where the template has put each image.
    """
    places = _written_places(tokens, hashing, written)
    if places is None:
        places = [(at, at + 1) for at, token in enumerate(tokens) if token in hashing.placeholders]
    if len(places) != len(hashing.media):
        return None
    words = array("I")
    spans: list[MediaSpan] = []
    last = 0
    for (start, end), (id, image) in zip(places, hashing.media, strict=True):
        words.extend(tokens[last:start])
        last = end
        if id is None or image is None:
            break
        spans.append(MediaSpan(id, len(words), image.length))
        words.extend(image.tokens)
    else:
        words.extend(tokens[last:])
    blocks = block_hashes(words, hashing.block_size, lora=hashing.adapter, salt=hashing.salt, media=spans)
    return Prompt(len(tokens) - sum(end - start for start, end in places) + _taken(hashing), list(blocks))


def _written_places(
    tokens: "array[int]", hashing: BlockHashing, written: "Sequence[array[int]]"
) -> list[tuple[int, int]] | None:
    """Return which tokens of a template's text an engine replaces by each image; None where that can't be told.

    A template may write one token and the engine put others there (Gemma 3, Ovis), or write marks around a placeholder.
    Such marks are replaced, too, where they stand between a video's frames again (Qwen3-VL), and else stay (Qwen2-VL).

    Args:
        written: what the template writes for each image.
    """
    found = {mark: _occurrences(tokens, mark) for mark in map(tuple, written)}
    if any(len(places) != sum(tuple(each) == mark for each in written) for mark, places in found.items()):
        return None  # it numbers its images, or a text looks like one
    remaining = {mark: iter(places) for mark, places in found.items()}
    spans = []
    for mark, (_, image) in zip(map(tuple, written), hashing.media, strict=True):
        at = next(remaining[mark])
        inner = next((place for place, token in enumerate(mark) if token in hashing.placeholders), None)
        if inner is None or (image is not None and image.vocabulary.issuperset(mark)):
            spans.append((at, at + len(mark)))
        else:
            spans.append((at + inner, at + inner + 1))
    return spans


def _occurrences(tokens: "array[int]", mark: tuple[int, ...]) -> list[int]:
    """Return where some tokens stand among others, from the left and without overlaps."""
    places: list[int] = []
    wanted, at = array("I", mark), 0
    while mark:
        try:
            at = tokens.index(mark[0], at)
        except ValueError:
            break
        if tokens[at : at + len(mark)] == wanted:
            places.append(at)
            at += len(mark)
        else:
            at += 1
    return places


def _taken(hashing: BlockHashing) -> int:
    """Return about how many tokens the images of a prompt take: unknown images count as the usual number."""
    return sum(hashing.usual if image is None else image.length for _, image in hashing.media)


def _of_text(text: str, hashing: BlockHashing) -> Prompt:
    blocks = text_hashes(text, hashing.text_block_bytes, lora=hashing.adapter, salt=hashing.salt)
    return Prompt(_estimate(text), list(blocks), estimated=True)


def _estimate(text: str) -> int:
    return max(1, len(text) // BYTES_PER_TOKEN) if text else 0
