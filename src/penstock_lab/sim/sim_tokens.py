"""Token routes of the simulated engine: render, generate and derender, with the shapes of vLLM 0.32 as far as used.

A prompt of text only; of ``sampling_params`` what the simulated model knows; words for whole answers alone.
"""

import time
from collections.abc import Sequence
from typing import Any

from penstock.kernel.errors import ClientError
from penstock.kernel.values import JsonObject
from penstock_lab.sim.request_reader import GenerationRequest, Kind, RequestReader, options_of
from penstock_lab.sim.response_writer import ResponseChoice, ResponseWriter
from penstock_lab.sim.sim_text import SimText

_SAMPLED = ("max_tokens", "min_tokens", "ignore_eos", "n", "stop", "stop_token_ids", "seed", "logprobs")
_PASSED = ("model", "stream", "stream_options", "priority", "cache_salt")


def rendered(reader: RequestReader, kind: Kind, body: JsonObject, request: str) -> list[JsonObject]:
    """Return the requests for the generate route that a completion is, one for each of its prompts.

    Raises:
        ClientError: it can't be served.
    """
    ask = reader.read(kind, body)
    if ask.media:
        raise ClientError("The simulated engine renders prompts of text only.", param="messages")
    sampling: JsonObject = {name: body[name] for name in _SAMPLED if body.get(name) is not None}
    sampling |= {"max_tokens": ask.output_max, "logprobs": ask.logprobs}
    if ask.forced is not None:
        sampling["structured_outputs"] = {"choice": [ask.forced]}
    head = {name: body.get(name) for name in _PASSED} | {"model": ask.model, "stream": ask.stream}
    head["stream_options"] = head["stream_options"] if ask.stream else None
    return [
        {"request_id": request, "token_ids": tokens, "features": None, "sampling_params": sampling, **head}
        for tokens in ask.prompts
    ]


def generating(body: JsonObject) -> JsonObject:
    """Return a body of the generate route as that of a text completion.

    Raises:
        ClientError: it has no token ids.
    """
    tokens, sampling = body.get("token_ids"), body.get("sampling_params")
    if not isinstance(tokens, list) or not tokens or not isinstance(sampling, dict):
        raise ClientError("token_ids and sampling_params are required.", param="token_ids")
    own = {name: sampling[name] for name in _SAMPLED if sampling.get(name) is not None}
    passed = {name: body[name] for name in (*_PASSED, "kv_transfer_params") if body.get(name) is not None}
    return {"prompt": tokens, "return_token_ids": True, **own, **passed}


def forced(body: JsonObject) -> str | None:
    """Return the one text that structured outputs leave to an answer, or None."""
    outputs = (body.get("sampling_params") or {}).get("structured_outputs") or {}
    (text,) = outputs.get("choice") or (None,)
    return text


class TokenWriter(ResponseWriter):
    """Makes the bodies of the generate route."""

    def __init__(self, ask: GenerationRequest, id: str, text: SimText, body: JsonObject) -> None:
        super().__init__(ask, id, text)
        self._mode = body.get("output_mode", "tokens")
        self._shows_prompt = bool(body.get("return_token_ids"))
        self._request = f"generate-tokens-{id}"

    def chunks(self, choice: ResponseChoice, choices: Sequence[ResponseChoice]) -> list[JsonObject]:
        return [self._shaped(body) for body in super().chunks(choice, choices)]

    def usage_chunk(self, choices: Sequence[ResponseChoice]) -> JsonObject:
        return self._shaped(super().usage_chunk(choices))

    def whole(self, choices: Sequence[ResponseChoice]) -> JsonObject:
        return self._shaped(super().whole(choices))

    def _shaped(self, body: JsonObject) -> JsonObject:
        """Return a text completion's body, or chunk, as one of the generate route."""
        out: JsonObject = {"request_id": self._request, "output_mode": self._mode, "usage": body.get("usage")}
        names = ["index", "token_ids", "logprobs", "finish_reason", "stop_reason"]
        names += ["text"] if self._mode == "text" else []
        out["choices"] = [{name: choice.get(name) for name in names} for choice in body["choices"]]
        for choice in body["choices"]:
            if self._shows_prompt and "prompt_token_ids" in choice:
                out["prompt_token_ids"] = choice["prompt_token_ids"]
        return out

    def _logprobs(self, tokens: Sequence[int], start: int, offset: int) -> JsonObject | None:
        if self._ask.logprobs is None:
            return None
        if self._mode == "text":
            return self._chat_logprobs(tokens, start)
        content = []
        for place, token in enumerate(tokens, start):
            tops = [{"token_id": other, "logprob": value} for _, value, other in self._top(token, place)]
            content.append({"token_id": token, "logprob": self._logprob_of(token, place), "top_logprobs": tops})
        return {"content": content}


def derendered(text: SimText, kind: Kind, body: JsonObject, model: str) -> JsonObject:
    """Return the completion that whole answers of the generate route are.

    Raises:
        ClientError: they have no tokens, or are a stream's part.
    """
    if body.get("stream"):
        raise ClientError("The simulated engine puts whole answers into words only.", param="stream")
    answers: Any = [body.get("generate_response")] if kind == "chat" else body.get("generate_responses")
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        raise ClientError("A generate response is required.", param="generate_response")
    if kind == "chat":
        options_of(body.get("chat_request") or {})
    choices: list[JsonObject] = []
    for answer in answers:
        for choice in answer["choices"]:
            if not choice.get("token_ids"):
                raise ClientError(f"choice {choice.get('index')} has empty or null token_ids")
            words = "".join(text.pieces(choice["token_ids"]))
            message = {"message": {"role": "assistant", "content": words, "tool_calls": []}}
            content = _worded(text, (choice.get("logprobs") or {}).get("content"))
            logprobs = content if kind == "chat" else _flat(content)
            part = {"index": len(choices), **(message if kind == "chat" else {"text": words}), "logprobs": logprobs}
            choices.append({**part, **{name: choice.get(name) for name in ("finish_reason", "stop_reason")}})
    made = sum(len(choice["token_ids"]) for answer in answers for choice in answer["choices"])
    usage = {"prompt_tokens": 0, "completion_tokens": made, "total_tokens": made}
    shape = {"chat": "chat.completion", "completion": "text_completion"}[kind]
    head = {"id": answers[0].get("request_id"), "object": shape, "created": int(time.time()), "model": model}
    return {**head, "choices": choices, "usage": usage}


def _worded(text: SimText, content: Sequence[JsonObject] | None) -> JsonObject | None:
    """Return log-probabilities of token ids as those of a chat."""
    if content is None:
        return None

    def entry(given: JsonObject) -> JsonObject:
        (piece,) = text.pieces([given["token_id"]])
        return {"token": piece, "logprob": given["logprob"], "bytes": list(piece.encode())}

    tops = [[entry(top) for top in each["top_logprobs"]] for each in content]
    return {"content": [{**entry(each), "top_logprobs": top} for each, top in zip(content, tops, strict=True)]}


def _flat(logprobs: JsonObject | None) -> JsonObject | None:
    """Return log-probabilities of a chat as those of a text completion."""
    if logprobs is None:
        return None
    content, offsets, characters = logprobs["content"], [], 0
    for each in content:
        offsets.append(characters)
        characters += len(each["token"])
    return {
        "text_offset": offsets,
        "token_logprobs": [each["logprob"] for each in content],
        "tokens": [each["token"] for each in content],
        "top_logprobs": [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in content],
    }
