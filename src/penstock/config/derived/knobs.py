"""Names of each knob, from a walk over the settings structs: flags, environment, schema and docs start from here."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

import msgspec

from penstock.kernel.settings import Field, Knob, Settings, fields_of, is_group, or_word, without_none

ANY_KEY = "*"
"""Stands in a knob's path for the key of a mapping, such as a model's name."""
PREFIX = "PENSTOCK_"

RESERVED = {
    "PENSTOCK_URL": "the cluster that status, top, explain, chat, join and doctor talk to",
    "PENSTOCK_ADMIN_KEY": "key for /admin that those commands send",
    "PENSTOCK_CACERT": "file of the certificates that those commands trust in place of the system's",
    "PENSTOCK_INSECURE": "1 makes those commands trust any certificate",
    "PENSTOCK_API_KEY": "key for /v1 that chat and bench send",
    "PENSTOCK_STATS_ENDPOINT": "where the statistics plug-in inside an engine publishes; set for the engine",
    "PENSTOCK_STATE_DIR": "folder of the state files, one per namespace, in place of the user's state folder",
    "PENSTOCK_IMAGE": "container image that `penstock operator` gives to frontends, planners and simulated engines",
    "PENSTOCK_POD": "name of the pod that a process of a cluster has to itself",
    "PENSTOCK_REQUIRE": "used by the project's own tests",
    "PENSTOCK_K8S_PROGRAMS": "used by the project's own tests: folder of kubectl, helm, Envoy, nginx and HAProxy",
    "PENSTOCK_TRACES": "used by the project's own tests and benchmarks",
    "PENSTOCK_SEEDS": "used by the project's own tests",
    "PENSTOCK_DEPTH": "used by the project's own tests",
    "PENSTOCK_CHAOS_SECONDS": "used by the project's own tests",
    "PENSTOCK_SIM_SIBLING": "set for a simulated engine that starts beside one of its pool which shares its weights",
    "PENSTOCK_SIM_FAULTS": "used by the project's own tests: simulated engines take orders to misbehave",
    "PENSTOCK_SOAK_SECONDS": "used by the project's own tests",
    "PENSTOCK_FUZZ_SECONDS": "used by the project's own tests",
    "PENSTOCK_VLLM_VENV": "used by the project's own tests: the environment with vLLM in it",
    "PENSTOCK_SGLANG_VENV": "used by the project's own tests: the environment with SGLang in it",
    "PENSTOCK_VLLM_FLAGS": "used by the project's own tests: more flags for its servers",
    "PENSTOCK_KUBECONFIG": "used by the project's own tests: a real cluster in the place of the double",
    "PENSTOCK_NAT": "used by the project's own tests: the program of NeMo Agent Toolkit",
    "PENSTOCK_CODEX": "used by the project's own tests: the program codex",
    "PENSTOCK_CLAUDE": "used by the project's own tests: the program claude",
    "PENSTOCK_AZURITE": "used by the project's own tests: the program azurite-blob",
    "PENSTOCK_LLAMACPP_VENV": "used by the project's own tests: the environment with llama-cpp-python[server] in it",
}
"""Environment names that are no settings of a cluster, with their meaning."""


@dataclass(frozen=True, slots=True)
class DerivedKnob:
    """One knob with its names. ``path`` is its place in the tree; mappings of groups have entries below them."""

    path: tuple[str, ...]
    type: Any
    default: Any
    knob: Knob
    group: str

    @property
    def dotted(self) -> str:
        """Name in ``--set``, in problems and in origins, such as ``router.cost.overlap_credit``."""
        return dotted(self.path)

    @property
    def flag(self) -> str:
        """The long flag, such as ``--router.cost.overlap_credit``; ``NAME`` stands for a mapping's key."""
        return "--" + self.dotted.replace(ANY_KEY, "NAME")

    @property
    def env(self) -> str:
        """The environment name, such as ``PENSTOCK_ROUTER__COST__OVERLAP_CREDIT``."""
        return env_name(self.path).replace(ANY_KEY, "NAME")

    @property
    def is_mapping(self) -> bool:
        """True for a mapping of groups, whose entries have knobs of their own."""
        return entry_type(self.type) is not None


def derive(root: type[msgspec.Struct]) -> list[DerivedKnob]:
    """List every knob below a settings struct, depth first in the order of declaration.

    Raises:
        TypeError: a field has no `Knob`, or a type that can't be written as text.
    """
    return list(_walk(root, ()))


@cache
def fields_by_name(group: type[msgspec.Struct]) -> dict[str, Field]:
    """Return a group's fields by name."""
    return {field.name: field for field in fields_of(group)}


def entry_type(hint: Any) -> type[Settings] | None:
    """Return ``X`` for ``dict[str, X]`` with a settings struct X, else None."""
    if get_origin(hint) is dict:
        entry = get_args(hint)[1]
        if is_group(entry):
            found: type[Settings] = entry
            return found
    return None


@dataclass(frozen=True, slots=True)
class ValueShape:
    """What a setting takes: schemas, the docs table and the check of a knob's type start from here.

    Args:
        kind: a ``group`` of settings, ``entries`` of groups by name, a ``list``, a ``mapping`` to scalars, a ``choice``
            or a ``scalar``; ``other`` can't be written as text.
        item: the group, the entries' group, or the type of the scalars: int, float, bool or str.
        choices: of a choice.
        word: that may stand in the place of a scalar, such as ``auto``.
        count: items of a list that has a fixed number of them.
        nullable: whether null is one of the values.
    """

    kind: Literal["group", "entries", "list", "mapping", "choice", "scalar", "other"]
    item: Any
    choices: tuple[str | int, ...] = ()
    word: str | None = None
    count: int | None = None
    nullable: bool = False


def shape_of(hint: Any) -> ValueShape:
    """Read the type of a setting."""
    not_none = without_none(hint)
    nullable = not_none is not hint
    plain, word = or_word(not_none)
    origin, arguments = get_origin(plain), get_args(plain)
    if is_group(plain):
        return ValueShape("group", plain, nullable=nullable)
    if entry_type(plain) is not None:
        return ValueShape("entries", entry_type(plain), nullable=nullable)
    if origin is Literal:
        return ValueShape("choice", type(arguments[0]), choices=arguments, nullable=nullable)
    if plain in _WORDS:
        return ValueShape("scalar", plain, word=word, nullable=nullable)
    if origin in (tuple, list, dict) and all(argument in _WORDS or argument is Ellipsis for argument in arguments):
        if origin is dict:
            return ValueShape("mapping", arguments[1], nullable=nullable)
        count = len(arguments) if origin is tuple and Ellipsis not in arguments else None
        return ValueShape("list", arguments[0], count=count, nullable=nullable)
    return ValueShape("other", plain, nullable=nullable)


def dotted(path: tuple[str, ...]) -> str:
    """Write a path as one name; a key with a dot in it is quoted."""
    return ".".join(f'"{part}"' if "." in part else part for part in path)


def env_name(path: tuple[str, ...]) -> str:
    """Write a path as an environment name: upper case, parts joined by two underscores."""
    return PREFIX + "__".join(part if part == ANY_KEY else env_part(part) for part in path)


def env_part(key: str) -> str:
    """Write one part of a path in environment spelling: ``meta/Llama-3`` is ``META_LLAMA_3``."""
    return re.sub(r"[^A-Z0-9]+", "_", key.upper()).strip("_") if not key.replace("_", "").isalnum() else key.upper()


def type_text(hint: Any) -> str:
    """Describe in words what a value may be, such as ``whole number`` or ``one of kv, random``."""
    shape = shape_of(hint)
    if shape.kind == "choice":
        text = f"one of {', '.join(str(choice) for choice in shape.choices)}"
    elif shape.kind == "list":
        text = f"list of {f'{shape.count} ' if shape.count else ''}{_PLURALS[shape.item]}"
    elif shape.kind == "mapping":
        text = f"mapping to {_PLURALS[shape.item]}"
    elif shape.kind in ("group", "entries"):
        text = "mapping"
    else:
        text = _WORDS.get(shape.item, str(shape.item)) + (f" or {shape.word}" if shape.word is not None else "")
    return text + (" or null" if shape.nullable else "")


def range_text(knob: Knob) -> str | None:
    """Describe the allowed range, such as ``0 to 65535`` or ``above 0``; None where there is none."""
    low = f"{knob.ge:g}" if knob.ge is not None else None
    high = f"{knob.le:g}" if knob.le is not None else None
    parts = []
    if low is not None and high is not None:
        return f"{low} to {high}"
    if low is not None:
        parts.append(f"{low} or more")
    if knob.gt is not None:
        parts.append(f"above {knob.gt:g}")
    if high is not None:
        parts.append(f"{high} or less")
    if knob.lt is not None:
        parts.append(f"below {knob.lt:g}")
    return " and ".join(parts) or None


_WORDS: dict[Any, str] = {int: "whole number", float: "number", bool: "true or false", str: "text"}
_PLURALS: dict[Any, str] = {int: "whole numbers", float: "numbers", bool: "booleans", str: "texts"}


def _walk(group: type[msgspec.Struct], path: tuple[str, ...]) -> Iterator[DerivedKnob]:
    for field in fields_of(group):
        here = (*path, field.name)
        if field.is_group:
            yield from _walk(field.type, here)
            continue
        if field.knob is None:
            raise TypeError(f"{group.__name__}.{field.name} has no Knob, so nobody can set it")
        shape = shape_of(field.type)
        if shape.kind == "other":
            raise TypeError(f"{group.__name__}.{field.name} has type {shape.item}, which can't be typed in as text")
        yield DerivedKnob(here, field.type, field.default, field.knob, ".".join(path))
        entry = entry_type(field.type)
        if entry is not None:
            yield from _walk(entry, (*here, ANY_KEY))
