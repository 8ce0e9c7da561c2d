"""Frozen, strict pydantic model, derived from the settings structs, that checks a whole tree at once."""

from functools import cache, partial
from typing import Annotated, Any, Optional, get_args, get_origin

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)
from pydantic import Field as ModelField
from pydantic_core import PydanticCustomError

from penstock.config.derived.knobs import derive, dotted, entry_type, fields_by_name, range_text, type_text
from penstock.config.former_names import way_on
from penstock.config.reading.problems import ConfigProblem, ValueOrigin, did_you_mean, listed
from penstock.config.reading.text_tree import TreeNode, TreeScalar, node_at, shown
from penstock.config.reading.typed_value import UnreadableValue, read_value
from penstock.kernel.settings import Field, Knob, Settings, is_group, or_word, without_none

_STRICT = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


@cache
def model_of(group: type[Settings]) -> type[BaseModel]:
    """Return the pydantic model of a settings struct; texts with units are converted, all else is strict."""
    fields: dict[str, Any] = {}
    for field in fields_by_name(group).values():
        default = partial(_plain_default, field)
        fields[field.name] = (_annotation(field), ModelField(default_factory=default, validate_default=False))
    return create_model(group.__name__, __config__=_STRICT, __doc__=group.__doc__, **fields)


def check_tree(group: type[Settings], root: TreeNode) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """Check a tree against a settings struct.

    Returns: the given values that are valid, as plain values by name (nested); and every problem.
    """
    model = model_of(group)
    problems: list[ConfigProblem] = []
    plain = root.plain()
    for _ in range(2):
        try:
            checked = model.model_validate(plain)
            return checked.model_dump(exclude_unset=True), problems
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_input=False)
            problems.extend(_problem(group, root, entry) for entry in wrong)
            for entry in wrong:
                _drop(plain, entry["loc"])
    return {}, problems


def build(group: type[Settings], given: dict[str, Any], base: Settings | None = None) -> Any:
    """Return a settings struct: ``base`` (or the defaults) with the given values put in."""
    start = group() if base is None else base
    changes: dict[str, Any] = {}
    for name, value in given.items():
        field = fields_by_name(group)[name]
        entry = entry_type(field.type)
        if is_group(field.type):
            changes[name] = build(field.type, value, getattr(start, name))
        elif entry is not None:
            changes[name] = {key: build(entry, child) for key, child in value.items()}
        else:
            changes[name] = value
    return msgspec.structs.replace(start, **changes)


def _annotation(field: Field) -> Any:
    if is_group(field.type):
        return model_of(field.type)
    entry = entry_type(field.type)
    if entry is not None:
        below: Any = model_of(entry)
        return dict[str, below]
    assert field.knob is not None, field.name
    knob = field.knob
    plain, word = or_word(without_none(field.type))
    bounds = {name: getattr(knob, name) for name in ("ge", "gt", "le", "lt") if getattr(knob, name) is not None}
    inner: Any = plain
    if bounds:
        if get_origin(plain) is tuple:
            items: Any = tuple(a if a is ... else Annotated[a, ModelField(**bounds)] for a in get_args(plain))
            inner = tuple[items]
        elif plain in (int, float):
            inner = Annotated[plain, ModelField(**bounds)]
    if word is not None:
        return Annotated[inner, WrapValidator(partial(_read_or_word, field.type, knob)), PlainSerializer(_as_it_is)]
    if plain is not field.type:
        inner = Optional[inner]  # noqa: UP045  # made at run time
    return Annotated[inner, BeforeValidator(partial(_read, field.type, knob))]


def _read(hint: Any, knob: Knob, typed: Any) -> Any:
    try:
        return read_value(typed, hint, knob)
    except UnreadableValue as error:
        # Braces would be read as a template by pydantic, so the texts travel in the context.
        raise PydanticCustomError("unreadable", "{reason}", {"reason": str(error), "hint": error.hint}) from None


def _read_or_word(hint: Any, knob: Knob, typed: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Read a number that may be a word; the number's range is checked, a word has none."""
    found = _read(hint, knob, typed)
    return found if found == or_word(hint)[1] else check(found)


def _as_it_is(value: Any) -> Any:
    return value


def _plain_default(field: Field) -> Any:
    if is_group(field.type):
        return model_of(field.type).model_validate(_values(field.default))
    if entry_type(field.type) is not None:
        entry = entry_type(field.type)
        assert entry is not None
        return {key: model_of(entry).model_validate(_values(value)) for key, value in field.default.items()}
    return field.default


def _values(settings: Any) -> Any:
    """Turn structs into dicts and leave all other values, tuples too, unchanged."""
    if isinstance(settings, msgspec.Struct):
        return {name: _values(getattr(settings, name)) for name in settings.__struct_fields__}
    if isinstance(settings, dict):
        return {key: _values(value) for key, value in settings.items()}
    return settings


def _drop(plain: Any, loc: tuple[int | str, ...]) -> None:
    """Remove a wrong value, so that the checks that need whole settings can run on the rest."""
    here = plain
    for part in loc[:-1]:
        if isinstance(here, dict) and isinstance(here.get(part), dict):
            here = here[part]
        else:
            loc = loc[: loc.index(part) + 1]
            break
    if isinstance(here, dict):
        here.pop(loc[-1], None)


def _problem(group: type[Settings], root: TreeNode, entry: Any) -> ConfigProblem:
    loc: tuple[int | str, ...] = entry["loc"]
    path = tuple(str(part) for part in loc)
    node = node_at(root, loc)
    kind: str = entry["type"]
    if kind == "extra_forbidden":
        parent = _group_at(group, path[:-1])
        known = list(fields_by_name(parent)) if parent is not None else []
        origin: ValueOrigin = node.key_at
        otherwise = _known_elsewhere(group, path[-1]) or f"known: {listed(known)}"
        hint = way_on(path) or did_you_mean(path[-1], known, otherwise=otherwise)
        return ConfigProblem(origin, dotted(path), "unknown key", hint)
    field = _field_at(group, path)
    if kind == "unreadable":
        context = entry["ctx"]
        return ConfigProblem(node.at, dotted(path), _with_value(field, node, context["reason"]), context["hint"])
    if field is None or field.knob is None or entry_type(field.type) is not None:
        # A group, or an entry of a mapping, that holds something other than keys.
        return ConfigProblem(node.at, dotted(path), f"takes a mapping of keys, not {shown(node)}")
    allowed = range_text(field.knob)
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal") and allowed is not None:
        unit = f" {field.knob.unit}" if field.knob.unit not in (None, "count", "ratio") else ""
        return ConfigProblem(node.at, dotted(path), _with_value(field, node, f"is out of range: {allowed}{unit}"))
    return ConfigProblem(
        node.at, dotted(path), _with_value(field, node, f"does not fit: takes {type_text(field.type)}")
    )


def _with_value(field: Field | None, node: TreeNode, reason: str) -> str:
    if (
        not isinstance(node.value, TreeScalar)
        or node.value.is_null
        or (field is not None and field.knob is not None and field.knob.secret)
    ):
        return f"the value {reason}" if not reason.startswith(("takes", "has")) else reason
    return f"{shown(node)!r} {reason}"


def _group_at(group: type[Settings], path: tuple[str, ...]) -> type[Settings] | None:
    here: type[Settings] = group
    parts = iter(path)
    for part in parts:
        field = fields_by_name(here).get(part)
        if field is None:
            return None
        entry = entry_type(field.type)
        if is_group(field.type):
            here = field.type
        elif entry is not None:
            if next(parts, None) is None:
                return None
            here = entry
        else:
            return None
    return here


def _field_at(group: type[Settings], path: tuple[str, ...]) -> Field | None:
    """Return the field that a path leads to, or into (an item of a list belongs to the list's field)."""
    for end in range(len(path), 0, -1):
        parent = _group_at(group, path[: end - 1])
        if parent is not None and path[end - 1] in fields_by_name(parent):
            return fields_by_name(parent)[path[end - 1]]
    return None


def _known_elsewhere(group: type[Settings], name: str) -> str | None:
    """Return where a key of that exact name would be right: a knob under the wrong group is a common slip."""
    places = [knob.dotted for knob in derive(group) if knob.path[-1] == name]
    return f"it belongs at {places[0].replace('*', 'NAME')}" if len(places) == 1 else None
