"""Call arguments: what a model wrote for a tool call, as the object, the JSON or the one text that an API has there."""

import msgspec

from penstock.kernel.values import JsonObject


def arguments_of(text: str) -> JsonObject:
    """Return a call's arguments; words that are no object are within one, as nobody may invent a call."""
    try:
        given = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {"arguments": text}


def mended(text: str) -> str:
    """Return arguments that clients and chat templates can decode: as they stand where they are an object."""
    given = arguments_of(text)
    return msgspec.json.encode(given).decode() if not text or given == {"arguments": text} else text


def custom_arguments(text: str) -> str:
    """Return a custom tool's input as its function's arguments."""
    return msgspec.json.encode({"input": text}).decode()


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool that a model called by its function; what is no such call is input as it is."""
    text = arguments_of(arguments).get("input")
    return text if isinstance(text, str) else arguments
