"""Body fields of another API's request: read with their type, refused by name, passed on where they are a chat's.

System messages are brought to where the model's chat template takes them: most templates take one, at the beginning,
and refuse a later one; agents write them between turns.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from penstock.config.settings.cluster_settings import LateSystem, ModelSettings
from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.service import Service
from penstock.kernel.errors import ClientError
from penstock.kernel.values import JsonObject

T = TypeVar("T")
_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAMES: dict[type, str] = {str: "text", list: "a list", dict: "an object", bool: "a boolean", int: "a whole number"}


def field_of(fields: JsonObject, name: str, kind: type[T], where: str = "") -> T | None:
    """Return a field that may be absent or null.

    Raises:
        ClientError: 400: it is of another type.
    """
    value = fields.get(name)
    if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
        return value
    raise rejected(f"{where}{name} must be {_NAMES[kind]}", f"{where}{name}")


def needed(fields: JsonObject, name: str, kind: type[T], where: str = "") -> T:
    """Return a field that must be there.

    Raises:
        ClientError: 400: it is absent, or of another type.
    """
    value = field_of(fields, name, kind, where)
    if value is None:
        raise rejected(f"you must give {where}{name}", f"{where}{name}", code="missing_field")
    return value


def objects_of(value: Iterable[object], where: str) -> list[JsonObject]:
    """Return a list of objects.

    Raises:
        ClientError: 400: one of them is something else.
    """
    objects: list[JsonObject] = []
    for position, item in enumerate(value):
        if not isinstance(item, dict):
            raise rejected(f"{where}[{position}] must be an object", f"{where}[{position}]")
        objects.append(item)
    return objects


def unserved(what: str, where: str, hint: str) -> ClientError:
    """Make the refusal of something that only the vendor's own service has."""
    return rejected(f"{quoted(what)} is not served here: {hint}", where, code="unsupported_value")


def refuse(fields: JsonObject, names: Mapping[str, str]) -> None:
    """Refuse fields that would have an effect which nobody here can give; ``names``: field -> why.

    Raises:
        ClientError: 400: one of them is set.
    """
    for name, why in names.items():
        if fields.get(name):
            raise unserved(name, name, why)


def leave_out(left_out: list[str], field: str, kind: str = "") -> None:
    """Note, once, what has no effect here; the answer names it in a header, so a ``kind`` of other signs is not."""
    name = f"{field}.{kind}" if _WORD.fullmatch(kind) else field
    if name not in left_out:
        left_out.append(name)


def name_ignored(
    fields: JsonObject,
    ignored: Mapping[str, Sequence[object] | None],
    inner: Mapping[str, Collection[str]],
    left_out: list[str],
) -> None:
    """Note the fields without an effect that a request sets.

    Args:
        ignored: field -> values that ask for what is done anyway; None where every value does.
        inner: object -> its fields that have an effect; others are noted.
    """
    for name, usual in ignored.items():
        if usual is not None and fields.get(name) and fields[name] not in usual:
            leave_out(left_out, name)
    for name, known in inner.items():
        for key, value in (field_of(fields, name, dict) or {}).items():
            if key not in known and value is not None:
                leave_out(left_out, name, key)


def passed_on(fields: JsonObject, own: Collection[str]) -> JsonObject:
    """Return the fields that are not the API's ``own``: a chat's, such as ``seed`` or ``nvext``, or an engine's."""
    return {name: value for name, value in fields.items() if name not in own}


def set_fields(**fields: object) -> JsonObject:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


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


_MARKED = "<system>\n{}\n</system>"


def with_one_system(service: Service, caller: str, chat: JsonObject) -> JsonObject:
    """Return a caller's chat whose system messages are as its model's settings say.

    Raises:
        ClientError: 404: there is no such model.
    """
    entry = service.settings.models.get(service.catalog.resolve(chat["model"], caller).model, ModelSettings())
    return {**chat, "messages": folded(chat["messages"], entry.late_system)}


def folded(messages: list[JsonObject], late: LateSystem) -> list[JsonObject]:
    """Return messages of which the system messages at the beginning are one, and later ones are where ``late`` says."""
    first: list[str] = []
    rest: list[JsonObject] = []
    moved = False
    """Whether the last of ``rest`` is what a system message became."""
    for message in messages if late == "keep" else _behind_results(messages):
        role, content = message["role"], message["content"]
        late_one = role == "system" and late != "keep"
        if role == "system" and isinstance(content, str) and (not rest or late == "first"):
            first.append(content)
            continue
        if late_one:
            message = {"role": "user", "content": _MARKED.format(content) if isinstance(content, str) else content}
        # Many templates want the turns of user and model to alternate.
        if rest and rest[-1]["role"] == message["role"] == "user" and (late_one or moved):
            rest[-1] = {**rest[-1], "content": joined(rest[-1]["content"], message["content"])}
        else:
            rest.append(message)
        moved = late_one
    return [{"role": "system", "content": "\n\n".join(first)}, *rest] if first else rest


def _behind_results(messages: list[JsonObject]) -> Iterator[JsonObject]:
    """Yield messages, those of the system between a call and its results behind these: templates want both together."""
    held: list[JsonObject] = []
    for message in messages:
        if message["role"] == "system":
            held.append(message)
            continue
        if message["role"] != "tool":
            yield from held
            held = []
        yield message
    yield from held


def speak(messages: list[JsonObject], fields: JsonObject) -> None:
    """Add what the model said to its present turn: other APIs have several items or messages for one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    turn = messages[-1]
    for name, value in fields.items():
        before = turn.get(name)
        if name != "role":
            turn[name] = joined(before, value) if before and value else before or value


def joined(one: str | list[JsonObject], two: str | list[JsonObject]) -> str | list[JsonObject]:
    """Return two contents as one, or two lists."""
    if isinstance(one, str) and isinstance(two, str):
        return f"{one}\n\n{two}"
    return [
        part
        for content in (one, two)
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]
