"""Knobs that may change while a cluster runs, and the settings that follow from a change."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import msgspec

from penstock.config.checks import cross_checks
from penstock.config.derived.knobs import ANY_KEY, DerivedKnob, derive, dotted, entry_type, fields_by_name
from penstock.config.reading.problems import ConfigProblem, ConfigProblems, ValueOrigin
from penstock.config.reading.sources import put_overrides
from penstock.config.reading.text_tree import tree_of
from penstock.config.reading.tree_check import build, check_tree
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.settings import Settings, is_group
from penstock.router.settings import RouterSettings

AGAIN = "set it in the config and start the cluster again"
LISTED = "'penstock set' lists what can be changed"
_REPLICAS = "'penstock scale POOL=N' changes how many there are"


class SettingChange(NamedTuple):
    """One changed knob; plain values."""

    key: str
    old: Any
    new: Any


def live_knobs(settings: ClusterSettings) -> dict[str, DerivedKnob]:
    """Return the knobs that a running cluster may change, by their dotted names; a mapping's entries are as set."""
    return {knob.dotted: knob for pattern in _live_patterns() for knob in _entries(pattern, settings)}


def live_values(settings: ClusterSettings) -> dict[str, Any]:
    """Return the present value of every live knob."""
    return {key: msgspec.to_builtins(value_at(settings, knob.path)) for key, knob in live_knobs(settings).items()}


def changed(settings: ClusterSettings, overrides: Sequence[str], started: ClusterSettings) -> list[SettingChange]:
    """Check ``name=value`` texts against the settings in use; return what they would change.

    Args:
        started: the settings with which the cluster started.
    Raises:
        ConfigProblems: a name is unknown, a value wrong, or a knob can't be changed while the cluster runs; it lists
            every problem, and nothing may be changed.
    """
    tree = tree_of(settings)
    problems: list[ConfigProblem] = []
    for override in overrides:
        name = override.partition("=")[0].strip()
        problems += put_overrides(tree, ClusterSettings, [override], ValueOrigin("flag", name), unknown=LISTED)
        problem = _not_live(name)
        if problem is not None:
            problems.append(problem)
    given, wrong = check_tree(ClusterSettings, tree)
    problems += wrong
    new: ClusterSettings = build(ClusterSettings, given)
    if not problems:
        problems += cross_checks(new, tree, set())
        found, live = differences(settings, new), live_knobs(settings)
        problems += [_fixed_setting(change.key) for change in found if change.key not in live]
        problems += unheard(new.router, started.router)
    if problems:
        raise ConfigProblems(list(dict.fromkeys(problems)))
    return found


def with_values(settings: ClusterSettings, values: Mapping[str, Any]) -> ClusterSettings:
    """Return settings with the live knobs among ``values`` (plain, by dotted name) put in.

    Raises:
        msgspec.ValidationError: a value has another type than its knob.
    """
    live = live_knobs(settings)
    for key, value in values.items():
        knob = live.get(key)
        if knob is not None:
            settings = put_at(settings, knob.path, msgspec.convert(value, knob.type))
    return settings


def differences(old: Settings, new: Settings, path: tuple[str, ...] = ()) -> list[SettingChange]:
    """Return where two settings differ, knob by knob; an entry that only one of them has is one change."""
    found: list[SettingChange] = []
    for field in fields_by_name(type(new)).values():
        here, before, after = (*path, field.name), getattr(old, field.name), getattr(new, field.name)
        if is_group(field.type):
            found += differences(before, after, here)
        elif entry_type(field.type) is not None:
            for key in dict.fromkeys([*before, *after]):
                if key in before and key in after:
                    found += differences(before[key], after[key], (*here, key))
                else:
                    found.append(SettingChange(dotted((*here, key)), key in before, key in after))
        elif before != after:
            secret = field.knob is not None and field.knob.secret
            plain = [None, None] if secret else [msgspec.to_builtins(before), msgspec.to_builtins(after)]
            found.append(SettingChange(dotted(here), *plain))
    return found


def value_at(settings: Settings, path: Sequence[str]) -> Any:
    """Return the value at a path."""
    value: Any = settings
    for name in path:
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def refusal_of(key: str) -> str:
    """Return why a knob can't change now, and what changes it."""
    return f"{key} can't be changed while the cluster runs ({_REPLICAS if key.endswith('.replicas') else AGAIN})"


def unheard(new: RouterSettings, started: RouterSettings) -> list[ConfigProblem]:
    """Refuse a weight on cached blocks where no index was kept from the start: it would have no effect."""
    if started.index.kind == "auto" and not started.weighs_overlap and new.weighs_overlap:
        text = "needs the index, which is not kept since the cluster started without a weight on cached blocks"
        return [ConfigProblem(ValueOrigin("flag", "router.cost"), "", text, AGAIN)]
    return []


def put_at(settings: Any, path: Sequence[str], value: Any) -> Any:
    """Return settings with another value at a path."""
    name, *rest = path
    if isinstance(settings, dict):
        return {**settings, name: put_at(settings[name], rest, value) if rest else value}
    return msgspec.structs.replace(settings, **{name: put_at(getattr(settings, name), rest, value) if rest else value})


@cache
def _live_patterns() -> tuple[DerivedKnob, ...]:
    return tuple(knob for knob in derive(ClusterSettings) if knob.knob.live)


def _entries(pattern: DerivedKnob, settings: ClusterSettings) -> list[DerivedKnob]:
    """Return a knob once for each entry of the mapping that it is below, which is at most one."""
    if ANY_KEY not in pattern.path:
        return [pattern]
    at = pattern.path.index(ANY_KEY)
    before, after = pattern.path[:at], pattern.path[at + 1 :]
    return [replace(pattern, path=(*before, key, *after)) for key in value_at(settings, before)]


def _not_live(name: str) -> ConfigProblem | None:
    """Refuse a single knob by its name, even where its value would not change."""
    key = name.replace("-", "_")
    known = {knob.dotted for knob in derive(ClusterSettings)}
    return _fixed_setting(key) if key in known and key not in {pattern.dotted for pattern in _live_patterns()} else None


def _fixed_setting(key: str) -> ConfigProblem:
    hint = _REPLICAS if key.endswith(".replicas") else AGAIN
    return ConfigProblem(ValueOrigin("flag", key), "", "can't be changed while the cluster runs", hint)
