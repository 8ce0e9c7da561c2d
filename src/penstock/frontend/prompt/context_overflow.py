"""Refusals of prompts longer than a model's context, in OpenAI's wording and code.

They tell clients whether a larger model may help: LiteLLM by the wording ("This model's maximum context length
is", "Input tokens exceed the configured limit"), LangChain by the code, which it looks for in the text of OpenAI's
exception: since release 3.57 of OpenAI's client that has the message alone, so the message ends with the code.
"""

import msgspec

from penstock.adapters.engines.dialects.engine_failure import failure_of
from penstock.frontend.http.error_responses import error_body

CODE = "context_length_exceeded"
_SIGN = "This model's maximum context length is"


def too_long(isl: int, longest: int, param: str) -> str:
    """Return the message that a prompt does not fit into the context.

    Args:
        isl: its tokens.
        longest: tokens that the model takes, output included.
        param: the field that holds the prompt.
    """
    return (
        f"{_SIGN} {longest} tokens, output included. However, your {param} resulted in {isl} tokens. "
        f"Please reduce the length of the {param}. ({CODE})"
    )


def above_limit(isl: int, limit: int, param: str) -> str:
    """Return the message that a prompt is longer than this endpoint accepts, whatever the model can."""
    return (
        f"Input tokens exceed the configured limit of {limit} tokens (frontend.limits.prompt_max). "
        f"Your {param} resulted in {isl} tokens. Please reduce the length of the {param}."
    )


def in_openai_words(message: str, longest: int | None) -> str:
    """Return an engine's or the router's overflow message, with OpenAI's wording and code where they are missing."""
    if _SIGN.lower() not in message.lower():
        message = f"{_SIGN} {'exceeded' if longest is None else f'{longest} tokens'}: {message}"
    return message if CODE in message else f"{message} ({CODE})"


def refusal_body(engine_body: bytes, longest: int | None, param: str) -> bytes:
    """Return the answer for an engine's refusal of a request that is too long: its message, our code."""
    message = failure_of(engine_body).message
    return msgspec.json.encode(error_body(400, in_openai_words(message, longest), code=CODE, param=param))
