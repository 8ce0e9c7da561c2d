"""What is written down reads back to the same settings, whatever they are."""

from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.derived.knobs import entry_type, fields_by_name
from penstock.config.derived.yaml_writer import init_yaml, plain_settings, shown_yaml
from penstock.config.reading.load import fill_empty_groups, resolved_yaml
from penstock.config.reading.problems import ValueOrigin
from penstock.config.reading.tree_check import build, check_tree
from penstock.config.reading.yaml_source import read_yaml
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.settings import Field, Settings, is_group, or_word, without_none
from tests.depth import deep

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)


def read(text: str) -> ClusterSettings:
    """Read a config without the cross checks, which random values would fail."""
    tree, problems = read_yaml(text, lambda line, column: ValueOrigin("file", f"{line}:{column}"))
    assert problems == []
    assert tree is not None
    fill_empty_groups(ClusterSettings, tree)
    given_values, problems = check_tree(ClusterSettings, tree)
    assert problems == []
    found = build(ClusterSettings, given_values)
    assert isinstance(found, ClusterSettings)
    return found


def values(field: Field) -> st.SearchStrategy[Any]:
    knob = field.knob
    assert knob is not None
    plain, word = or_word(without_none(field.type))
    low = knob.ge if knob.ge is not None else knob.gt
    high = knob.le if knob.le is not None else knob.lt
    if get_origin(plain) is Literal:
        made: st.SearchStrategy[Any] = st.sampled_from(get_args(plain))
    elif plain is bool:
        made = st.booleans()
    elif plain is int:
        start = 0 if low is None else int(low) + (knob.gt is not None)
        made = st.integers(start, 2**53 if high is None else int(high))
    elif plain is float:
        made = st.floats(
            -1e15 if low is None else low,
            1e15 if high is None else high,
            exclude_min=knob.gt is not None,
            exclude_max=knob.lt is not None,
        )
    elif plain is str:
        made = NAMES
    elif get_origin(plain) is dict:
        entry = get_args(plain)[1]
        floats, counts = st.floats(1e-6, 1e15 if high is None else high), st.integers(0, 9)
        made = st.dictionaries(NAMES, {float: floats, int: counts}.get(entry, NAMES), max_size=3)
    else:
        assert get_origin(plain) is tuple
        items = get_args(plain)
        item = {int: st.integers(0, 9), float: st.floats(0, 1e15)}.get(items[0], NAMES)
        made = st.lists(item, max_size=3).map(tuple) if ... in items else st.tuples(*[item] * len(items))
    if word is not None:
        return made | st.just(word)
    return made if plain is field.type else st.none() | made


def structs(group: type[Settings]) -> st.SearchStrategy[Any]:
    parts: dict[str, st.SearchStrategy[Any]] = {}
    for field in fields_by_name(group).values():
        entry = entry_type(field.type)
        if is_group(field.type):
            parts[field.name] = structs(field.type)
        elif entry is not None:
            parts[field.name] = st.dictionaries(NAMES, structs(entry), max_size=2)
        elif field.knob is not None:
            parts[field.name] = values(field)
    return st.builds(group, **parts)


@settings(max_examples=deep(25))
@given(structs(ClusterSettings))
def test_resolved_yaml_reads_back(made):
    assert read(resolved_yaml(made, secrets=True)) == made


@settings(max_examples=deep(15))
@given(structs(ClusterSettings))
def test_the_form_for_people_reads_back_but_for_secrets(made):
    assert read(shown_yaml(made, {})) == bare(made)


def bare(group: Any) -> Any:
    """Return settings with every secret at its default, at any depth."""
    changes: dict[str, Any] = {}
    for field in fields_by_name(type(group)).values():
        value = getattr(group, field.name)
        if is_group(field.type):
            changes[field.name] = bare(value)
        elif entry_type(field.type) is not None:
            changes[field.name] = {key: bare(entry) for key, entry in value.items()}
        elif field.knob is not None and field.knob.secret:
            changes[field.name] = field.default
    return msgspec.structs.replace(group, **changes)


def test_both_forms_of_the_template_are_the_default():
    for everything in (False, True):
        assert read(init_yaml(everything=everything)) == ClusterSettings()


def test_the_resolved_form_holds_plain_yaml_only():
    loaded = yaml.safe_load(resolved_yaml(ClusterSettings()))
    assert loaded == plain_settings(ClusterSettings())
    assert "api_keys" not in loaded["frontend"]["security"]


def test_settings_are_frozen():
    with pytest.raises(AttributeError):
        ClusterSettings().name = "other"
