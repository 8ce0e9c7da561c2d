"""Prompt renderer: asks a server with the engine's own code, by vLLM's render routes, for the tokens of a prompt.

Then template and tokenizer are the engine's, and a prompt's blocks are named as the engine names them, for any model.
What fails or is late costs exactness alone: the prompt is tokenised here instead. Where that server has the derender
routes, too, it puts into words what an engine has generated of those tokens (`frontend.exchange.token_route`).
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.adapters.engines.dialects.scale_out_routes import DERENDER, ROUTE_PATHS, there
from penstock.adapters.engines.http.engine_call import EngineCalls
from penstock.frontend.prompt.request_body import PATHS, Endpoint, Parsed
from penstock.kernel.errors import EngineError
from penstock.kernel.values import JsonObject

TIMEOUT = 2.0
"""Seconds that a prompt waits for its tokens: a long one takes tens of milliseconds."""
WORDS_TIMEOUT = 10.0
"""Seconds that an answer waits for its words: it is longer than a prompt's tokens, and lost without them."""
PAUSE = 5.0
"""Seconds for which a server that failed is not asked, so that a dead one delays one request in so many seconds."""
ENGINE, OFF = "engine", "off"
"""Settings: the model's own engines render; nobody does."""
HEADERS = {"content-type": "application/json"}

_one = msgspec.json.Decoder(dict[str, msgspec.Raw])
_several = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_tokens = msgspec.json.Decoder(list[int])
_answer = msgspec.json.Decoder(dict[str, object])


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt's tokens, and the request for an engine's generate route that a server has made of it.

    Args:
        server: URL of that server.
        derenders: whether it also puts generated tokens into words.
    """

    server: str
    tokens: list[int]
    request: Mapping[str, msgspec.Raw]
    derenders: bool = False

    @property
    def reasons(self) -> bool:
        """Whether the server has a parser for reasoning, which then is in the text of an answer."""
        return bytes(self.request.get("reasoning_parser_kwargs", msgspec.Raw(b"null"))) != b"null"


class PromptRenderer:
    """All render servers of one frontend.

    Args:
        observe: called with the duration of each rendering, in seconds.
    """

    def __init__(
        self, engines: EngineCalls, observe: Callable[[float], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.failures: dict[str, str] = {}
        """Server -> why its last answer was of no use."""
        self._engines, self._observe, self._clock = engines, observe, clock
        self._paused: dict[str, float] = {}
        self._derenders: dict[str, bool] = {}
        """Servers that were asked for their derender route since they last failed."""
        self._turn = 0

    async def rendered(self, parsed: Parsed, urls: Sequence[str], *, probe: bool = False) -> RenderedPrompt | str:
        """Return a prompt as tokens, or why they are to be made here.

        Chats with media are: their answer has all pixels, and their blocks are exact without it.

        Args:
            urls: servers that have the render routes; they take turns.
            probe: ask a server once whether it derenders, too.
        """
        if any(parsed.media):
            return "its prompt is not only text"
        if isinstance(parsed.fields.get("prompt"), list):
            return "its prompt is given as tokens or as several"
        now = self._clock()
        ready = [url for url in urls if self._paused.get(url, now) <= now]
        if not ready:
            return "no render server answers at present"
        self._turn += 1
        url = ready[self._turn % len(ready)]
        try:
            async with asyncio.timeout(TIMEOUT):
                prompt = await self._rendered(url, parsed, probe)
        except (EngineError, msgspec.DecodeError, UnicodeDecodeError, TimeoutError) as error:
            self._failed(url, str(error) or f"no answer within {TIMEOUT:g} s")
            return f"the render server {url} failed"
        self.failures.pop(url, None)
        self._observe(self._clock() - now)
        return prompt

    async def words(self, server: str, endpoint: Endpoint, body: JsonObject) -> dict[str, object]:
        """Return the answer that a derender route makes of generated tokens.

        Raises:
            EngineError: it does not.
        """
        path = f"{PATHS[endpoint]}/derender"
        try:
            async with asyncio.timeout(WORDS_TIMEOUT):
                status, answer = await self._post(server, path, msgspec.json.encode(body))
            if status != 200:
                raise EngineError(f"POST {path} answered {status}: {answer[:200].decode('utf-8', 'replace')}")
            return _answer.decode(answer)
        except (EngineError, msgspec.DecodeError, UnicodeDecodeError, TimeoutError) as error:
            why = str(error) or f"no answer within {WORDS_TIMEOUT:g} s"
            self._failed(server, why)
            raise EngineError(f"the render server {server} put no words to its tokens: {why}") from error

    def notes(self) -> list[str]:
        """Return notes for the health route."""
        return [
            f"the render server {url} fails, so prompts are tokenised here: {why}" for url, why in self.failures.items()
        ]

    def _failed(self, url: str, why: str) -> None:
        self.failures[url] = why
        self._paused[url] = self._clock() + PAUSE
        self._derenders.pop(url, None)  # another version may come up at its place

    async def _rendered(self, url: str, parsed: Parsed, probe: bool) -> RenderedPrompt | str:
        path = f"{PATHS[parsed.endpoint]}/render"
        status, body = await self._post(url, path, parsed.raw)
        if status == 400:
            return "the render server refuses it, which the engine will say itself"
        if status != 200:
            raise EngineError(f"POST {path} answered {status}: {body[:200].decode('utf-8', 'replace')}")
        request = (_several.decode(body) or [{}])[0] if parsed.endpoint == "completions" else _one.decode(body)
        missing = {"token_ids", "model"} - request.keys()
        if missing:
            raise EngineError(f"POST {path} answered without {' and '.join(sorted(missing))}")
        if probe and url not in self._derenders:
            answered, _ = await self._post(url, ROUTE_PATHS[DERENDER], b"{}")
            self._derenders[url] = there(answered)
        return RenderedPrompt(url, _tokens.decode(request["token_ids"]), request, self._derenders.get(url, False))

    async def _post(self, url: str, path: str, body: bytes) -> tuple[int, bytes]:
        call = self._engines.call(url, path, body, HEADERS)
        try:
            await call.begin()
            return call.status, await call.read()
        finally:
            call.close()
