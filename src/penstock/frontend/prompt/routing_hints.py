"""Routing hints of a request: reads ``nvext`` in the body and headers into the router's `Preferences`.

Headers win over the body, Penstock's spelling of a header wins over the other ones, and all of these win over what a
framework says (`framework_hints`). Unknown names are ignored: the body reaches the engine as it came.

Of frameworks that do not know our headers OpenAI's ``prompt_cache_key``, ``user``, ``safety_identifier`` and
``metadata``, LangSmith's header of runs and Claude Code's of sessions are read. They are no hints for us, so one of
another form is left alone: the engine judges it.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from penstock.frontend.http.error_responses import rejected
from penstock.kernel.values import WorkerId
from penstock.router.events import Preferences

RUN_HEADER = "langsmith-trace"
SESSION_HEADER = "x-claude-code-session-id"
FIELDS = frozenset({"prompt_cache_key", "user", "safety_identifier", "metadata"})
SESSION_KEYS = ("session_id", "thread_id", "conversation_id")
"""Keys of ``metadata`` that name a conversation, as LangSmith and LangGraph have them."""
PROGRAM_KEYS = ("program_id", "trace_id", "run_id")
_ROOT_RUN = re.compile(r"[0-9]{8}T[0-9]+Z([0-9a-fA-F-]{32,36})(?:\.|\Z)")
"""Such a header is a path of runs, each a time and an id; the first is the run of the whole program."""


class FrameworkHints(NamedTuple):
    """What a framework's request says of where it belongs."""

    session: str | None = None
    program: str | None = None


def framework_hints(headers: Mapping[str, str], fields: Mapping[str, object]) -> FrameworkHints:
    """Read the hints of a request, the first of each row that it has.

    ``prompt_cache_key``, then Claude Code's session, then a conversation in ``metadata``, is the session. A
    program in ``metadata``, then the root of LangSmith's runs, then the person (``safety_identifier``, ``user``) is the
    program.
    """
    metadata = fields.get("metadata")
    notes: Mapping[str, object] = metadata if isinstance(metadata, dict) else {}
    session = (
        _short_id(fields.get("prompt_cache_key"))
        or _short_id(headers.get(SESSION_HEADER))
        or _first_id(notes, SESSION_KEYS)
    )
    program = _first_id(notes, PROGRAM_KEYS) or _root_run(headers.get(RUN_HEADER))
    if program is None:
        program = _person(fields.get("safety_identifier")) or _person(fields.get("user"))
    return FrameworkHints(session, program)


def _first_id(notes: Mapping[str, object], names: tuple[str, ...]) -> str | None:
    return next((value for value in (_short_id(notes.get(name)) for name in names) if value is not None), None)


def _short_id(value: object) -> str | None:
    """Return an id, shortened to a digest where it is long or has signs that do not print."""
    if not isinstance(value, str) or not value:
        return None
    return value if len(value) <= TEXT_MAX and value.isprintable() else digest(value)


def _person(value: object) -> str | None:
    """Return a person's id as a digest: it may be an address, and records and status show the program."""
    return f"user-{digest(value)}" if isinstance(value, str) and value else None


def _root_run(trace: str | None) -> str | None:
    match = None if trace is None else _ROOT_RUN.match(trace)
    return None if match is None else match[1]


def digest(value: str) -> str:
    """Return a short name for an id that can't be shown or sent as it is."""
    return hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


_PREFILL = ("x-penstock-prefill-worker", "x-dynamo-prefill-instance-id")
_WORKER = ("x-penstock-worker", "x-dynamo-worker-instance-id", "x-worker-instance-id")
_RANK = ("x-penstock-dp-rank", "x-dynamo-dp-rank", "x-data-parallel-rank")
_PRIORITY = ("x-penstock-priority", "x-dynamo-request-priority")
_STRICT = ("x-penstock-strict-priority", "x-dynamo-request-strict-priority")
_SESSION = ("x-penstock-session-id", "x-dynamo-session-id")
_PROGRAM = ("x-penstock-program-id", "x-dynamo-program-id")
_CONTEXT = ("x-penstock-context-type", "x-dynamo-context-type")
_OSL = ("x-penstock-osl", "x-dynamo-osl")
_SALT = ("x-penstock-cache-salt", "x-dynamo-cache-salt")
_ALLOWED = ("x-penstock-allowed-workers",)
_TIMEOUT = ("x-penstock-timeout",)
_CREDIT = ("x-penstock-overlap-credit",)
_NEXT_IN = ("x-penstock-next-request-in",)
_PREFER = "prefer"
IF_CACHED = "if-available"
"""What ``Prefer`` says (RFC 7240) where a prompt is to be answered only where it is cached; llm-d's word for it."""
_TEMPERATURE = ("x-penstock-router-temperature",)

_NAMES = frozenset(
    name
    for names in (
        *(_PREFILL, _WORKER, _RANK, _PRIORITY, _STRICT, _SESSION, _PROGRAM, _CONTEXT),
        *(_OSL, _SALT, _ALLOWED, _TIMEOUT, _CREDIT, _TEMPERATURE, _NEXT_IN),
    )
    for name in names
) | {RUN_HEADER, SESSION_HEADER, _PREFER}
_FIELDS = FIELDS | {"cache_salt"}

EXTRA_FIELDS = ("worker_id", "timing", "ignored_hints")
"""Response fields that ``nvext.extra_fields`` can request from Penstock; others are the engine's."""
CACHE_CONTROL = "cache_control"
NEXT_REQUEST_IN = "agent_hints.next_request_in"
NEXT_IN_MAX = 3600.0
"""Seconds: a session that pauses for longer is no longer one whose blocks should be brought up for it."""
SPECULATIVE_PREFILL = "agent_hints.speculative_prefill"
IDLE = ("session_control.action", "session_control.timeout")
"""Hints of ``nvext`` that other gateways know and that have no effect here: the response reports them."""
CACHE_TTL = 300.0
"""Seconds of a ``cache_control`` that names none, as callers of other gateways expect."""
CACHE_TTL_MAX = 7 * 24 * 3600.0
"""Longest pin in seconds: blocks that nobody asks for within a week are not worth their memory."""
CONTEXT_PINS = {"system": 3600.0, "long_lived": 3600.0}
"""Type of context -> seconds of its pin, where the request itself asks for none: prompts that many requests share."""
TEXT_MAX = 256
"""Longest id or salt in characters, so that the memory per session or request stays small."""


@dataclass(frozen=True, slots=True)
class RoutingHints:
    """What routing uses of a request, beside its prompt."""

    preferences: Preferences
    salt: str | None = None
    extra: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """Which hints of `IDLE` the request has."""
    pin: float = 0.0
    """Seconds for which KV tiers are to keep its blocks; 0 where nobody asks for that."""
    asks_pin: bool = False
    """Whether the request itself asks for the pin, so that it is told where there is none."""
    warms: bool = False
    """Whether the beginning of its next turn is to be computed as soon as it has been answered."""
    keep: int = 0
    """Priority of its blocks in KV tiers; 0 is the lowest."""
    token_data: list[int] | None = None
    timeout: float | None = None
    """Seconds that the caller allows for the whole request."""
    uncertain: bool = False
    """Whether it has a hint that has no effect, or not on every worker."""
    withheld: tuple[str, ...] = ()
    """Names of the fields that steer engines and were taken out of its body."""
    steering: Mapping[str, Any] = field(default_factory=dict)
    """Those of them that pools may allow."""
    pins: tuple[str, ...] = ()
    """Which preferences for workers the client has: it needs the right to pin."""

    def with_withheld(self, names: tuple[str, ...], steering: Mapping[str, Any]) -> "RoutingHints":
        """Return the same for a body from which fields were taken."""
        return replace(self, withheld=names, steering=steering, uncertain=True) if names else self

    def placed(self, worker: WorkerId) -> "RoutingHints":
        """Return the same for a worker that we chose ourselves, which needs no right to pin."""
        preferences = msgspec.structs.replace(self.preferences, worker=worker)
        return replace(self, preferences=preferences, pins=tuple(name for name in self.pins if name != "worker"))

    def unpinned(self) -> "RoutingHints":
        """Return the same without pins to workers, which are then reported as hints without an effect."""
        preferences = msgspec.structs.replace(self.preferences, **dict.fromkeys(self.pins))
        ignored = (*(f"pin.{name}" for name in self.pins), *self.ignored)
        return replace(self, preferences=preferences, ignored=ignored, uncertain=True, pins=())


def read_hints(headers: Mapping[str, str], nvext: Mapping[str, Any], fields: Mapping[str, Any]) -> RoutingHints:
    """Read all hints.

    Args:
        headers: of the request, case-insensitive.
        nvext: the body's object of that name, or an empty one.
        fields: the whole body, for its top-level ``cache_salt``.
    Raises:
        ClientError: 400: a known hint has an invalid value.
    """
    if not nvext and isinstance(headers, dict) and _FIELDS.isdisjoint(fields) and _NAMES.isdisjoint(headers):
        return _NONE  # the usual request has none, and searching for each would be a third of reading it
    framework = framework_hints(headers, fields)
    hints = _object_field(nvext, "agent_hints")
    context = _object_field(nvext, "agent_context")
    session = _object_field(nvext, "session_control")
    worker = _header_text(headers, _WORKER)
    if worker is None:
        worker = _pinned_worker(nvext, "backend_instance_id", "decode_worker_id")
    prefill = _header_text(headers, _PREFILL)
    if prefill is None:
        prefill = _pinned_worker(nvext, "prefill_worker_id")
    allowed = _header_text(headers, _ALLOWED, limit=8192)
    program = _first_given(
        _header_text(headers, _PROGRAM),
        _text_field(nvext, "program_id"),
        _text_field(hints, "program_id"),
        _text_field(context, "program_id"),
        framework.program,
    )
    home = _first_given(
        _header_text(headers, _SESSION),
        _text_field(session, "session_id"),
        _text_field(context, "session_id"),
        framework.session,
    )
    rank = _first_given(_header_number(headers, _RANK, 0, 65_535), _whole(nvext, "dp_rank", 0, 65_535))
    priority = _first_given(
        _header_number(headers, _PRIORITY, -(2**31), 2**31 - 1), _whole(hints, "priority", -(2**31), 2**31 - 1)
    )
    strict = _first_given(
        _header_number(headers, _STRICT, 0, 2**32 - 1), _whole(hints, "strict_priority", 0, 2**32 - 1)
    )
    service_class = _first_given(
        _header_text(headers, _CONTEXT),
        _text_field(nvext, "context_type"),
        _text_field(hints, "context_type"),
        _text_field(context, "context_type"),
    )
    ttl = _cache_ttl(nvext)
    ignored = tuple(name for name in IDLE if _value_at_path(nvext, name))
    warms = bool(hints.get("speculative_prefill"))
    next_in = _real(headers, _NEXT_IN, 0.0, NEXT_IN_MAX)
    if next_in is None:
        next_in = _seconds_field(hints, "next_request_in", NEXT_IN_MAX)
    pins = {
        "worker": None if worker is None else WorkerId(worker),
        "prefill": None if prefill is None else WorkerId(prefill),
        "rank": rank,
        "allowed": None if allowed is None else tuple(WorkerId(w.strip()) for w in allowed.split(",") if w.strip()),
    }
    return RoutingHints(
        preferences=Preferences(
            **pins,
            priority=priority or 0,
            strict=strict or 0,
            osl=_first_given(_header_number(headers, _OSL, 0, 2**32 - 1), _whole(hints, "osl", 0, 2**32 - 1)),
            # A program without a session counts as a session: its requests share prefixes and belong together.
            session=_first_given(home, program),
            program=program,
            service_class=service_class,
            overlap_credit=_real(headers, _CREDIT, 0.0, 1e6),
            temperature=_real(headers, _TEMPERATURE, 0.0, 1e6),
            next_in=next_in,
            if_cached=IF_CACHED in headers.get(_PREFER, "").lower(),
        ),
        salt=_first_given(
            _header_text(headers, _SALT), _text_field(nvext, "cache_salt"), _text_field(fields, "cache_salt", "")
        ),
        extra=_extra_fields(nvext),
        ignored=ignored,
        uncertain=bool(ignored) or ttl is not None or warms or next_in is not None,
        warms=warms,
        pin=CONTEXT_PINS.get(service_class, 0.0) if ttl is None else ttl,
        asks_pin=ttl is not None,
        keep=max(0, priority or 0),
        token_data=_token_data(nvext),
        timeout=_real(headers, _TIMEOUT, 0.001, 1e6),
        pins=tuple(name for name, value in pins.items() if value is not None),
    )


def route_hints(headers: Mapping[str, str]) -> RoutingHints:
    """Read what the router takes of a request whose body is the engine's matter.

    Raises:
        ClientError: 400: a known header has an invalid value.
    """
    found = read_hints(headers, {}, {})
    return RoutingHints(found.preferences, pins=found.pins)


_NONE = RoutingHints(preferences=Preferences())
_TTL = re.compile(r"([0-9]{1,7})([smh])")
_TTL_UNITS = {"s": 1, "m": 60, "h": 3600}


def _first_given(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _header_text(headers: Mapping[str, str], names: tuple[str, ...], limit: int = TEXT_MAX) -> str | None:
    for name in names:
        value = headers.get(name)
        if value is not None:
            value = value.strip()
            if not value or len(value) > limit or not value.isprintable():
                raise rejected(f"header {name} must be 1 to {limit} printable characters", name, code="invalid_header")
            return value
    return None


def _header_number(headers: Mapping[str, str], names: tuple[str, ...], low: int, high: int) -> int | None:
    for name in names:
        value = headers.get(name)
        if value is not None:
            try:
                number = int(value) if len(value) <= 24 else None
            except ValueError:
                number = None
            if number is None or not low <= number <= high:
                raise rejected(f"header {name} must be a whole number {low}..{high}", name, code="invalid_header")
            return number
    return None


def _real(headers: Mapping[str, str], names: tuple[str, ...], low: float, high: float) -> float | None:
    for name in names:
        value = headers.get(name)
        if value is not None:
            try:
                number = float(value)
            except ValueError:
                number = float("nan")
            if not low <= number <= high:  # also refuses nan
                raise rejected(f"header {name} must be a number {low:g}..{high:g}", name, code="invalid_header")
            return number
    return None


def _seconds_field(fields: Mapping[str, Any], name: str, high: float) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
        raise rejected(f"nvext.agent_hints.{name} must be seconds, 0..{high:g}", f"nvext.agent_hints.{name}")
    return float(value)


def _object_field(nvext: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = nvext.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise rejected(f"nvext.{name} must be an object", f"nvext.{name}")
    return value


def _text_field(fields: Mapping[str, Any], name: str, prefix: str = "nvext.") -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value or len(value) > TEXT_MAX:
        raise rejected(f"{prefix}{name} must be text of 1 to {TEXT_MAX} characters", prefix + name)
    return value


def _whole(fields: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise rejected(f"nvext {name} must be a whole number {low}..{high}", f"nvext.{name}")
    return value


def _pinned_worker(nvext: Mapping[str, Any], *names: str) -> str | None:
    """Return a pinned worker; Dynamo's ids are numbers, ours are words, so both are accepted."""
    for name in names:
        value = nvext.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, str)) or not 0 < len(str(value)) <= TEXT_MAX:
            raise rejected(f"nvext.{name} must be a worker id", f"nvext.{name}")
        return str(value)
    return None


def _extra_fields(nvext: Mapping[str, Any]) -> tuple[str, ...]:
    value = nvext.get("extra_fields")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise rejected("nvext.extra_fields must be a list of names", "nvext.extra_fields")
    return tuple(name for name in EXTRA_FIELDS if name in value)


def _cache_ttl(nvext: Mapping[str, Any]) -> float | None:
    """Return the seconds of ``cache_control``; None where there is none."""
    control = _object_field(nvext, CACHE_CONTROL)
    if not control:
        return None
    if control.get("type") != "ephemeral":
        raise rejected('nvext.cache_control.type must be "ephemeral"', "nvext.cache_control.type")
    value = control.get("ttl", CACHE_TTL)
    seconds = value
    if isinstance(value, str):
        matched = _TTL.fullmatch(value)
        seconds = None if matched is None else int(matched[1]) * _TTL_UNITS[matched[2]]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= CACHE_TTL_MAX:
        raise rejected(
            'nvext.cache_control.ttl must be seconds, or text such as "90s", "5m" or "1h", of at most 7 days',
            "nvext.cache_control.ttl",
        )
    return float(seconds)


def _value_at_path(nvext: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None."""
    value: Any = nvext
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _token_data(nvext: Mapping[str, Any]) -> list[int] | None:
    value = nvext.get("token_data")
    if value is None:
        return None
    if not isinstance(value, list) or {type(token) for token in value} - {int}:
        raise rejected("nvext.token_data must be a list of token ids", "nvext.token_data")
    return value
