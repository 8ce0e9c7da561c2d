"""Response writer of the simulated engine: text, log-probabilities, chunks and whole bodies of both OpenAI routes."""

import time
from collections.abc import Sequence

import msgspec
import xxhash

from penstock.kernel.values import JsonObject, RequestId
from penstock_lab.engine.events import SubmitRequest
from penstock_lab.engine.settings import SimSettings
from penstock_lab.engine.simulated_output import SimulatedOutput
from penstock_lab.sim.live_engine import TokenStream
from penstock_lab.sim.request_reader import GenerationRequest
from penstock_lab.sim.sim_text import SimText


class ResponseChoice:
    """One answer of a request: its stream, and how much of it was written."""

    def __init__(
        self, index: int, prompt: list[int], submit: SubmitRequest, stop: str | int | None, limit: int | None
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.submit = submit
        self.stop = stop
        """What will end the answer early; None where nothing will."""
        self.limit = limit
        """Characters of text before a stop text, which is not sent."""
        self.stream: TokenStream | None = None
        self.sent = 0
        self.characters = 0
        self.begun = False
        self.ended = False

    def tokens(self, upto: int) -> list[int]:
        """Return the first output tokens."""
        if self.stream is None or self.stream.answer is None:
            return []
        return self.stream.answer.upto(upto)


def choices_of(ask: GenerationRequest, id: str, settings: SimSettings, text: SimText) -> list[ResponseChoice]:
    """Return the answers of a request, each ready to be submitted to the engine."""
    out: list[ResponseChoice] = []
    forced = None
    if ask.forced is not None:
        forced = text.encode(ask.forced)
        if text.end is not None:
            forced.append(text.end)
    for prompt in ask.prompts:
        for variant in range(ask.n):
            submit = SubmitRequest(
                id=RequestId(f"{id}-{len(out)}"),
                tokens=prompt,
                max_tokens=ask.output_max,
                min_tokens=ask.min_tokens,
                ignore_eos=ask.ignore_eos,
                priority=ask.priority,
                salt=ask.salt,
                lora=ask.lora,
                media=ask.media,
                output=forced,
                variant=variant + (ask.seed << 8),
            )
            stop: str | int | None = None
            limit: int | None = None
            if ask.stops or ask.stop_tokens:
                submit, stop, limit = _stopped(ask, submit, settings, text)
            out.append(ResponseChoice(len(out), prompt, submit, stop, limit))
    return out


def finish_reason(ask: GenerationRequest, choice: ResponseChoice) -> str:
    """Return the ``finish_reason`` of an answer."""
    done = choice.stream.finished if choice.stream is not None else None
    reason = done.reason if done is not None else "stop"
    return "tool_calls" if ask.tool is not None and reason == "stop" else reason


class ResponseWriter:
    """Makes the bodies of one request's answer."""

    def __init__(self, ask: GenerationRequest, id: str, text: SimText) -> None:
        self._ask = ask
        self._text = text
        chat = ask.kind == "chat"
        self.id = ("chatcmpl-" if chat else "cmpl-") + id
        self._head = {"id": self.id, "created": int(time.time()), "model": ask.model}
        self._chunk = "chat.completion.chunk" if chat else "text_completion"
        self._whole = "chat.completion" if chat else "text_completion"

    def usage(self, choices: Sequence[ResponseChoice], details: bool = True) -> JsonObject:
        """Return the token counts; a prompt with several answers counts once."""
        firsts = choices[:: self._ask.n]
        prompt = sum(len(choice.prompt) for choice in firsts)
        made = sum(choice.sent for choice in choices)
        out: JsonObject = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + made,
            "completion_tokens": made,
        }
        if details:
            cached = sum(choice.stream.cached for choice in firsts if choice.stream is not None)
            out["prompt_tokens_details"] = {"cached_tokens": cached}
        return out

    def chunks(self, choice: ResponseChoice, choices: Sequence[ResponseChoice]) -> list[JsonObject]:
        """Return the chunks for the tokens of a choice that are out and not sent, and mark those as sent."""
        ask, stream = self._ask, choice.stream
        assert stream is not None
        over = stream.finished is not None
        out = stream.finished.tokens if stream.finished is not None else stream.out
        tokens = choice.tokens(out)[choice.sent :]
        if not tokens and not over:
            return []
        words = self._words(choice, tokens)
        start, choice.sent = choice.sent, out
        bodies: list[JsonObject] = []
        reason = finish_reason(ask, choice) if over else None
        if ask.kind == "chat":
            if not choice.begun:
                opening: JsonObject = {"role": "assistant", "content": "" if ask.tool is None else None}
                bodies.append(self._body(choice, {"delta": opening}, None))
                if ask.token_ids:
                    bodies[-1]["prompt_token_ids"] = choice.prompt
            call = self._call(choice, words) if not choice.begun else {"function": {"arguments": words}}
            delta = {"content": words} if ask.tool is None else {"tool_calls": [{"index": 0, **call}]}
            part: JsonObject = {"delta": delta}
        else:
            if ask.echo and not choice.begun:
                words = self._text.decode(choice.prompt) + words
            part = {"text": words}
            if ask.token_ids and not choice.begun:
                part["prompt_token_ids"] = choice.prompt
        part["logprobs"] = self._logprobs(tokens, start, choice.characters - len(words))
        if ask.token_ids:
            part["token_ids"] = tokens
        choice.begun = True
        choice.ended = over
        bodies.append(self._body(choice, part, reason))
        if ask.stream_options.usage_always:
            for body in bodies:
                body["usage"] = self.usage(choices, details=False)
        return bodies

    def usage_chunk(self, choices: Sequence[ResponseChoice]) -> JsonObject:
        """Return the last chunk of a stream whose client requested usage."""
        return {**self._head, "object": self._chunk, "choices": [], "usage": self.usage(choices)}

    def whole(self, choices: Sequence[ResponseChoice]) -> JsonObject:
        """Return the body of an answer that is not streamed."""
        ask = self._ask
        parts = []
        for choice in choices:
            assert choice.stream is not None and choice.stream.finished is not None
            tokens = choice.tokens(choice.stream.finished.tokens)
            choice.sent = len(tokens)
            words = self._words(choice, tokens)
            part: JsonObject = {"index": choice.index}
            if ask.kind == "chat":
                message: JsonObject = {"role": "assistant", "content": words, "tool_calls": []}
                if ask.tool is not None:
                    message |= {"content": None, "tool_calls": [self._call(choice, words)]}
                part["message"] = message
            else:
                part["text"] = (self._text.decode(choice.prompt) if ask.echo else "") + words
            part["logprobs"] = self._logprobs(tokens, 0, 0)
            part["finish_reason"] = finish_reason(ask, choice)
            part["stop_reason"] = choice.stop
            if ask.token_ids:
                part["token_ids"] = tokens
                if ask.kind == "completion":
                    part["prompt_token_ids"] = choice.prompt
            parts.append(part)
        body = {**self._head, "object": self._whole, "choices": parts, "usage": self.usage(choices)}
        if ask.token_ids and ask.kind == "chat":
            body["prompt_token_ids"] = choices[0].prompt
        return body

    def _body(self, choice: ResponseChoice, part: JsonObject, reason: str | None) -> JsonObject:
        entry = {"index": choice.index, "logprobs": None, **part, "finish_reason": reason}
        if reason is not None:
            entry["stop_reason"] = choice.stop
        return {**self._head, "object": self._chunk, "choices": [entry]}

    def _words(self, choice: ResponseChoice, tokens: Sequence[int]) -> str:
        words = "".join(self._text.pieces(tokens))
        start = choice.characters
        choice.characters += len(words)
        return words if choice.limit is None else words[: max(0, choice.limit - start)]

    def _call(self, choice: ResponseChoice, arguments: str) -> JsonObject:
        """Return the tool call that an answer is, with its arguments, or with the first of them."""
        function = {"name": self._ask.tool, "arguments": arguments}
        return {"id": f"call-{self.id}-{choice.index}", "type": "function", "function": function}

    def _logprobs(self, tokens: Sequence[int], start: int, offset: int) -> JsonObject | None:
        """Return the log-probabilities that were asked for; ``offset``: characters before these tokens."""
        if self._ask.logprobs is None:
            return None
        if self._ask.kind == "chat":
            return self._chat_logprobs(tokens, start)
        return self._text_logprobs(tokens, start, offset)

    def _text_logprobs(self, tokens: Sequence[int], start: int, offset: int) -> JsonObject:
        pieces = self._text.pieces(tokens)
        offsets, tops, values = [], [], []
        for place, piece in enumerate(pieces, start):
            offsets.append(offset)
            offset += len(piece)
            values.append(_logprob(tokens[place - start], place, 0))
            tops.append({other: value for other, value, _ in self._top(tokens[place - start], place)})
        return {"text_offset": offsets, "token_logprobs": values, "tokens": pieces, "top_logprobs": tops}

    def _chat_logprobs(self, tokens: Sequence[int], start: int) -> JsonObject:
        content = []
        for place, (token, piece) in enumerate(zip(tokens, self._text.pieces(tokens), strict=True), start):
            top = [
                {"token": other, "logprob": value, "bytes": list(other.encode())}
                for other, value, _ in self._top(token, place)
            ]
            value = _logprob(token, place, 0)
            content.append({"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": top})
        return {"content": content}

    def _logprob_of(self, token: int, place: int) -> float:
        return _logprob(token, place, 0)

    def _top(self, token: int, place: int) -> list[tuple[str, float, int]]:
        """Return made-up alternatives, likeliest first: the token itself, then its neighbours in the vocabulary."""
        out: list[tuple[str, float, int]] = []
        value = 0.0
        for rank in range(self._ask.logprobs or 0):
            other = token + rank
            value = value + _logprob(other, place, rank) if rank else _logprob(token, place, 0)
            out.append((self._text.pieces([other])[0], value, other))
        return out


def _logprob(token: int, place: int, rank: int) -> float:
    digest = xxhash.xxh3_64_intdigest(token.to_bytes(8, "little") + place.to_bytes(8, "little"), rank)
    return -(1 + digest % 1000) / 1000.0


def _stopped(
    ask: GenerationRequest, submit: SubmitRequest, settings: SimSettings, text: SimText
) -> tuple[SubmitRequest, str | int | None, int | None]:
    """Find where a stop text or token ends an answer; all tokens are known beforehand here."""
    answer = SimulatedOutput(submit, settings, text.words, text.end, text.turn)
    tokens = answer.upto(answer.length)
    words = ""
    for count, (token, piece) in enumerate(zip(tokens, text.pieces(tokens), strict=True), 1):
        words += piece
        if count <= ask.min_tokens:
            continue
        if token in ask.stop_tokens:
            return _ending(submit, tokens[:count]), token, None
        fresh = len(words) - len(piece)
        matches = [(place, stop) for stop in ask.stops if (place := words.find(stop, max(0, fresh - len(stop)))) >= 0]
        if matches:
            place, stop = min(matches)
            return _ending(submit, tokens[:count]), stop, place
    return submit, None, None


def _ending(submit: SubmitRequest, tokens: list[int]) -> SubmitRequest:
    return msgspec.structs.replace(submit, output=tokens, min_tokens=0, ignore_eos=True)
