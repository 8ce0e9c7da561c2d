"""Request body of a completion: decodes it, checks the few fields that routing needs, and finds its media.

Steering fields are kept from clients: with them a client reads another's KV, has an engine connect where it says, or
runs code. None of them passes to an engine, at any depth of a body, unless the engine's pool names it in
``client_fields``; what is withheld is reported as a hint without an effect.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, Literal

import msgspec

from penstock.config.settings.client_fields import CLIENT_FIELDS, OWN_WORDS, PLAIN_NAMES, STEERING
from penstock.frontend.http.error_responses import rejected
from penstock.kernel.values import JsonObject

_ANSWERED = frozenset({"kv_transfer_params", "ec_transfer_params", "disaggregated_params"})
"""Fields in which engines answer where KV lies."""
_PLACES = re.compile(rb'"(?:%b)"\s*:\s*(?!null\b)\S' % "|".join(sorted(_ANSWERED)).encode())
_NAMES = frozenset(STEERING)
_PLAIN = _NAMES, frozenset[str]()
_RULES = {name: (_NAMES - PLAIN_NAMES, schemas) for name, schemas in OWN_WORDS.items()}
"""Field of a body -> the names to look for below it, and the fields below it that are not looked into."""


def withheld_from(fields: JsonObject) -> tuple[str, ...]:
    """Return the names of the steering fields in a body, sorted; there are none in nearly every request."""
    present = set[str]()
    if not _NAMES.isdisjoint(fields):
        present |= _NAMES & fields.keys()
    for name, value in fields.items():
        if type(value) is dict or (type(value) is list and not (name == "prompt" and value and type(value[0]) is int)):
            names, schemas = _RULES.get(name, _PLAIN)
            if "*" not in schemas:
                _search(value, names, schemas, present)
    return tuple(sorted(present))


def without(raw: bytes, fields: JsonObject, names: Collection[str]) -> tuple[bytes, JsonObject, JsonObject]:
    """Return a body without its steering fields, the same decoded, and those of its top, which a pool may allow."""
    whole: JsonObject = dict(_RAW.decode(raw))
    kept: JsonObject = {}
    for name, value in fields.items():
        if name in names:
            del whole[name]
            continue
        inner, schemas = _RULES.get(name, _PLAIN)
        kept[name] = value if "*" in schemas else _clean(value, inner, schemas)
        if kept[name] != value:
            whole[name] = kept[name]
    return msgspec.json.encode(whole), kept, {name: fields[name] for name in names if name in fields}


def without_parts(raw: bytes, content_type: str) -> tuple[bytes, tuple[str, ...]]:
    """Return a form without the parts that are steering fields, and their names.

    Raises:
        ClientError: 400: it names no boundary.
    """
    head = Message()
    head["content-type"] = content_type
    boundary = head.get_boundary()
    if not boundary:
        raise rejected("the form's content-type names no boundary", "content-type", code="invalid_header")
    mark = b"--" + boundary.encode("utf-8", "surrogateescape")
    first, *parts = raw.split(mark)
    named = [(_part_name(part), part) for part in parts]
    names = {name for name, _ in named if name in _NAMES}
    if not names:
        return raw, ()
    return mark.join([first, *(part for name, part in named if name not in names)]), tuple(sorted(names))


def allowed_of(steering: Mapping[str, Any], labels: Mapping[str, str]) -> JsonObject:
    """Return what of a client's steering fields an engine with these labels may get; others within them it may not."""
    allowed: JsonObject = {}
    for entry in labels.get(CLIENT_FIELDS, "").split():
        name, _, inner = entry.partition(".")
        value = steering.get(name)
        if name in steering and not inner:
            allowed[name] = _clean(value, *_PLAIN)
        elif isinstance(value, dict) and inner in value:
            allowed[name] = {**allowed.get(name, {}), inner: _clean(value[inner], *_PLAIN)}
    return allowed


def without_places(answer: bytes) -> bytes:
    """Return an engine's answer, or the data of one event of it, without what says where KV lies.

    In a text its quotes would be escaped. What can't be decoded is returned unchanged: no client's parser reads it.
    """
    if b"_params" not in answer or _PLACES.search(answer) is None:
        return answer
    try:
        return msgspec.json.encode(_clean(msgspec.json.decode(answer), _ANSWERED, frozenset()))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return answer


def _part_name(part: bytes) -> str:
    """Return the name of a form's part; empty for what stands behind the last one."""
    message = Message()
    for line in part.partition(b"\r\n\r\n")[0].decode("utf-8", "replace").splitlines():
        header, _, value = line.partition(":")
        if header.strip().lower() == "content-disposition":
            message["content-disposition"] = value.strip()
            break
    name = message.get_param("name", "", "content-disposition")
    return str(name[2] if isinstance(name, tuple) else name)


def _search(value: Any, names: frozenset[str], schemas: frozenset[str], present: set[str]) -> None:
    if type(value) is list:
        for inner in value:
            kind = type(inner)
            # A message of text alone, as nearly all are, has nothing to look into.
            if kind is list or (kind is dict and not (len(inner) == 2 and "role" in inner and _is_text(inner))):
                _search(inner, names, schemas, present)
    elif type(value) is dict:
        if not names.isdisjoint(value):
            present |= names & value.keys()
        for name, inner in value.items():
            if (type(inner) is dict or type(inner) is list) and name not in schemas:
                _search(inner, names, schemas, present)


def _is_text(message: JsonObject) -> bool:
    return type(message.get("content")) is str


def _clean(value: Any, names: frozenset[str], schemas: frozenset[str]) -> Any:
    if type(value) is dict:
        return {
            name: inner if name in schemas else _clean(inner, names, schemas)
            for name, inner in value.items()
            if name not in names
        }
    return [_clean(inner, names, schemas) for inner in value] if type(value) is list else value


DEPTH_MAX = 64
"""Deepest nesting of JSON: deeper than any schema or tool, shallower than what makes an engine's parser fail."""

Endpoint = Literal["chat_completions", "completions"]
PATHS: dict[Endpoint, str] = {"chat_completions": "/v1/chat/completions", "completions": "/v1/completions"}
RESPONSES, RESPONSES_COUNT, MESSAGES, MESSAGES_COUNT = TRANSLATED = (
    *("/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens"),
)
"""Routes of other APIs, whose requests become chats."""
VIDEOS, VIDEO_REMIX, IMAGES = JOB_PATHS = ("/v1/videos", "/v1/videos/{job}/remix", "/v1/images")
"""Routes that begin a job of an engine."""
IMAGES_MADE = ("/v1/images/generations", "/v1/images/edits")
"""Routes that make images at once, which may then lie at the engine."""
FILES = "/v1/files"
_COUNTS = frozenset({"n", "max_tokens", "max_completion_tokens"})
_CHECKED_KINDS: dict[str, tuple[type, str]] = {"tools": (list, "a list"), "chat_template_kwargs": (dict, "an object")}
_CHECKED = _COUNTS | _CHECKED_KINDS.keys()
_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_WHOLE = ("use_beam_search", "echo", "prompt_embeds", "suffix")
_SEVERAL = ("n", "best_of")
_RARE = frozenset((*_SEVERAL, *_WHOLE, "prompt_logprobs", "prompt"))
_READ = ("messages", "prompt")
"""Fields whose every part is looked at in any case."""
_TEXT = ("text", "refusal")
_REFERENCE = re.compile(r"(?i)(https?|file|s3|gs)://")


@dataclass(slots=True)
class Parsed:
    """A request that may be routed. ``raw`` goes to the engine; ``fields`` is the same, decoded."""

    endpoint: Endpoint
    raw: bytes
    fields: JsonObject
    model: str
    stream: bool
    wants_usage: bool
    """The client requested the usage chunk of a stream."""
    nvext: JsonObject = field(default_factory=dict)
    media: tuple[str | None, ...] = ()
    """Ids of a chat's images and other media, in order; None where only the engine can identify one."""
    withheld: tuple[str, ...] = ()
    """Its steering fields, which are not in ``raw`` and ``fields``."""
    steering: JsonObject = field(default_factory=dict)
    """Those of them that stood at the top of the body: a pool may allow them."""
    plain: bool = False
    """Known to be text alone, in each message and each other field: there is nothing in it to look for."""

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    @property
    def prompt_field(self) -> str:
        """The field that holds the prompt."""
        return "messages" if self.endpoint == "chat_completions" else "prompt"


def decode_object(raw: bytes) -> JsonObject:
    """Decode a JSON object.

    Raises:
        ClientError: 400: it is empty, not JSON, not UTF-8, no object, or nested deeper than `DEPTH_MAX`.
    """
    if not raw or raw.isspace():
        raise rejected("the request has no body; send a JSON object", code="invalid_json")
    try:
        value = msgspec.json.decode(raw)
    except UnicodeDecodeError as error:
        raise rejected(f"the body is not valid UTF-8 (byte {error.start})", code="invalid_json") from None
    except RecursionError:
        raise rejected(f"the body is nested deeper than {DEPTH_MAX} levels", code="invalid_json") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise rejected(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise rejected(f"the body must be a JSON object, not {_name(value)}", code="invalid_json")
    if raw.count(b"[") + raw.count(b"{") > DEPTH_MAX and _deep(value):
        raise rejected(f"the body is nested deeper than {DEPTH_MAX} levels", code="invalid_json")
    return value


def parse(endpoint: Endpoint, raw: bytes, fields: JsonObject | None = None) -> Parsed:
    """Read a chat or text completion.

    Args:
        fields: the same, where it is decoded already.
    Raises:
        ClientError: 400, naming the field.
    """
    if fields is None:
        fields = decode_object(raw)
    model = text_field(fields, "model")
    if model is None:
        raise rejected("you must name a model", "model", code="missing_field")
    stream = _typed_field(fields, "stream", bool, "a boolean") or False
    wants_usage = False
    if "stream_options" in fields:
        options = _typed_field(fields, "stream_options", dict, "an object") or {}
        wants_usage = _typed_field(options, "include_usage", bool, "a boolean", "stream_options.") or False
    nvext = (_typed_field(fields, "nvext", dict, "an object") or {}) if "nvext" in fields else {}
    plain = _check_messages(fields) if endpoint == "chat_completions" else _check_prompt(fields)
    for name, value in fields.items():
        if name in STEERING or (name not in _READ and (type(value) is dict or type(value) is list)):
            plain = False
    steering: JsonObject = {}
    withheld = () if plain else withheld_from(fields)
    if withheld:
        raw, fields, steering = without(raw, fields, withheld)
    for name in fields.keys() & _CHECKED:
        if name in _COUNTS:
            value = _typed_field(fields, name, int, "a whole number")
            if value is not None and (isinstance(value, bool) or value < 0):
                raise rejected(f"{name} must be a whole number of at least 0, not {value!r}", name)
        else:
            _typed_field(fields, name, *_CHECKED_KINDS[name])
    return Parsed(
        endpoint, raw, fields, model, stream, wants_usage, nvext, withheld=withheld, steering=steering, plain=plain
    )


def with_fields(parsed: Parsed, added: JsonObject) -> bytes:
    """Return the body with some top-level fields set and every other byte as the client sent it."""
    if not added:
        return parsed.raw
    if parsed.fields.keys().isdisjoint(added):
        # The usual case: put them in front; the object has at least its model, so the comma is correct.
        start = parsed.raw.index(b"{") + 1
        return parsed.raw[:start] + msgspec.json.encode(added)[1:-1] + b"," + parsed.raw[start:]
    whole = _RAW.decode(parsed.raw)
    for name, value in added.items():
        whole[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(whole)


def choices_of(parsed: Parsed) -> int:
    """Return how many answers a request asks for, over all of its prompts."""
    prompt, count = parsed.fields.get("prompt"), parsed.fields.get("n")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return prompts * (count if isinstance(count, int) and count else 1)


def is_whole(parsed: Parsed) -> bool:
    """Return whether one worker has to do all of it: several answers or prompts can't be handed over as one."""
    fields = parsed.fields
    if _RARE.isdisjoint(fields):
        return False
    if any((fields.get(name) or 1) != 1 for name in _SEVERAL):
        return True
    if any(fields.get(name) for name in _WHOLE) or fields.get("prompt_logprobs") is not None:
        return True
    return choices_of(parsed) > 1


def is_undivided(parsed: Parsed) -> bool:
    """Return whether no hand-off gives the answer of a request that `is_whole`.

    Several prompts and an echo can be split where both sides get the whole request at once;
    several answers to a prompt, and its log probabilities, can't.
    """
    fields = parsed.fields
    logprobs = fields.get("prompt_logprobs") is not None or (fields.get("echo") and fields.get("logprobs") is not None)
    several = any((fields.get(name) or 1) != 1 for name in _SEVERAL)
    return bool(several or logprobs or any(fields.get(name) for name in _WHOLE if name != "echo"))


def media_of(fields: JsonObject) -> list[JsonObject]:
    """Return the parts of a chat that are an image, a sound or a video, in order; none for another request."""
    found: list[dict[str, Any]] = []
    for message in fields.get("messages") or ():
        content = message.get("content")
        if isinstance(content, list):
            found += filter(is_media, content)
    return found


def is_media(part: Any) -> bool:
    """Return whether a part of a message is an image, a sound or a video."""
    return isinstance(part, dict) and part.get("type", "text") not in _TEXT


def media_id(part: JsonObject) -> str | None:
    """Return a name for a part whose content only an engine can read (embeddings, files): a digest of its text.

    A URL gives None: what is at a URL may change while an engine's cache stays.
    """
    kind = str(part.get("type"))
    inner = part.get(kind)
    if isinstance(inner, dict):
        inner = inner.get("url") or inner.get("data")
    if not isinstance(inner, str) or _REFERENCE.match(inner):
        return None
    return hashlib.blake2b(f"{kind}:{inner}".encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def with_uuids(parsed: Parsed) -> list[JsonObject] | None:
    """Return a chat's messages with the name of each part's content as its ``uuid``; None: no part has one.

    A client's own is never passed on: an engine would take what it has under that name for the content, and some name
    files by it.
    """
    ids = parsed.media
    if not any(ids) and not any("uuid" in part for part in media_of(parsed.fields)):
        return None

    def named(number: int, part: JsonObject) -> JsonObject:
        plain = {name: value for name, value in part.items() if name != "uuid"}
        id = ids[number] if number < len(ids) else None
        return plain if id is None else {**plain, "uuid": id}

    return with_media(parsed, named)


def with_media(parsed: Parsed, changed: Callable[[int, JsonObject], JsonObject]) -> list[JsonObject]:
    """Return a chat's messages with what ``changed`` makes of each part of `media_of`, given its place among them."""
    messages: list[JsonObject] = []
    places = itertools.count()
    for message in parsed.fields["messages"]:
        content = message.get("content")
        if isinstance(content, list):
            parts = [changed(next(places), part) if is_media(part) else part for part in content]
            message = {**message, "content": parts}
        messages.append(message)
    return messages


def text_field(fields: JsonObject, name: str, prefix: str = "") -> str | None:
    """Return a text field that may be absent but not empty.

    Raises:
        ClientError: 400: it is something else, or empty.
    """
    value = _typed_field(fields, name, str, "text", prefix)
    if value is not None and not value:
        raise rejected(f"{prefix}{name} must not be empty", prefix + name)
    return value


def _typed_field(fields: JsonObject, name: str, kind: type, expected: str, prefix: str = "") -> Any:
    value = fields.get(name)
    if value is None or isinstance(value, kind):
        return value
    raise rejected(f"{prefix}{name} must be {expected}, not {_name(value)}", prefix + name)


def _check_messages(fields: JsonObject) -> bool:
    """Check a chat's messages; return whether each is a role and a text, and nothing more."""
    plain = True
    messages = _typed_field(fields, "messages", list, "a list of messages")
    if not messages:
        raise rejected("messages must be a list with at least one message", "messages", code="missing_field")
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        if not isinstance(message, dict):
            raise rejected(f"{where} must be an object, not {_name(message)}", where)
        if not isinstance(message.get("role"), str):
            raise rejected(f"{where}.role must be text such as 'user'", f"{where}.role")
        content = message.get("content")
        plain = plain and len(message) == 2 and type(content) is str
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list) or not all(isinstance(part, (dict, str)) for part in content):
            raise rejected(f"{where}.content must be text or a list of parts", f"{where}.content")
    return plain


def _check_prompt(fields: JsonObject) -> bool:
    """Check a text completion's prompt, which has no fields of its own: return true."""
    prompt = fields.get("prompt")
    if prompt is None:
        if "prompt_embeds" in fields:
            return True
        raise rejected("you must give a prompt", "prompt", code="missing_field")
    if isinstance(prompt, str):
        return True
    rule = "prompt must be text, a list of texts, a list of token ids, or a list of such lists"
    if not isinstance(prompt, list):
        raise rejected(f"{rule}, not {_name(prompt)}", "prompt")
    if not prompt:
        raise rejected("prompt must not be an empty list", "prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) != 1 or not kinds <= {str, int, list}:
        raise rejected(rule, "prompt")
    if kinds == {list} and not all(item and {type(token) for token in item} == {int} for item in prompt):
        raise rejected(rule, "prompt")
    return True


def _deep(value: Any) -> bool:
    """Return whether a value is nested deeper than `DEPTH_MAX`, walking level by level."""
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        inner: list[Any] = []
        for item in level:
            values = item.values() if type(item) is dict else item
            inner += [v for v in values if type(v) is dict or type(v) is list]
        if not inner:
            return False
        level = inner
    return True


def _name(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
