"""Framework hints: the session and the program of requests from frameworks that do not know our headers.

Read are OpenAI's ``prompt_cache_key``, ``user``, ``safety_identifier`` and ``metadata``, LangSmith's header of runs and
Claude Code's of sessions. They are no hints for us, so one of another form is left alone: the engine judges it.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple

RUN_HEADER = "langsmith-trace"
SESSION_HEADER = "x-claude-code-session-id"
FIELDS = frozenset({"prompt_cache_key", "user", "safety_identifier", "metadata"})
SESSION_KEYS = ("session_id", "thread_id", "conversation_id")
"""Keys of ``metadata`` that name a conversation, as LangSmith and LangGraph have them."""
PROGRAM_KEYS = ("program_id", "trace_id", "run_id")
TEXT_MAX = 256
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
    session = _id(fields.get("prompt_cache_key")) or _id(headers.get(SESSION_HEADER)) or _first(notes, SESSION_KEYS)
    program = _first(notes, PROGRAM_KEYS) or _root_run(headers.get(RUN_HEADER))
    if program is None:
        program = _person(fields.get("safety_identifier")) or _person(fields.get("user"))
    return FrameworkHints(session, program)


def _first(notes: Mapping[str, object], names: tuple[str, ...]) -> str | None:
    return next((value for value in (_id(notes.get(name)) for name in names) if value is not None), None)


def _id(value: object) -> str | None:
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
