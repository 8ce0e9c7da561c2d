"""Every knob of every room is derived: a field that can't be set by file, flag and environment fails here."""

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest

import penstock
from penstock.config.derived.docs import configuration_page
from penstock.config.derived.json_schema import json_schema
from penstock.config.derived.knobs import ANY_KEY, RESERVED, derive, entry_type, env_name, fields_by_name
from penstock.config.derived.yaml_writer import init_yaml, value_text
from penstock.config.reading.load import load
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.extension import Extension
from penstock.kernel.errors import ConfigError
from penstock.kernel.settings import Field, Knob, Settings, fields_of, is_group
from penstock.testing.installed_extensions import extension_installed
from penstock_kv.cache_settings import CacheSettings
from penstock_lab.engine.settings import TierLinks

KNOBS = derive(ClusterSettings)
KNOBS_MAX = 250 + len(fields_of(CacheSettings)) + len(fields_of(TierLinks)) + 14 + 54 + 13 + 3 + 5 + 2 + 1 + 2
"""The last: 14 of Kubernetes and the pickers, 54 of adapters, names, tenants, media, starts, gRPC and agents, 13 of
health checks, waiting for servers, late system messages, engines behind keys or TLS and CORS, 3 of what clients may not
steer, 5 of Dynamo's planners, 2 of the roofline and of what a request takes beside its passes, 1 of which
decisions are written down whole, 2 of plug-ins of the router."""
"""Settings of a whole cluster, and of the tiers that came since: what nobody turns is a constant with its reason."""
SCHEMA = json_schema()
PAGE = configuration_page()


def all_settings() -> list[type[Settings]]:
    """Import every module that may declare settings, and return all the structs that it declared."""
    for package in (
        "penstock.kernel",
        "penstock.router",
        "penstock_lab.engine",
        "penstock_lab.traffic",
        "penstock.config",
    ):
        root = importlib.import_module(package)
        for module in pkgutil.iter_modules(root.__path__):
            importlib.import_module(f"{package}.{module.name}")
    found: list[type[Settings]] = []
    waiting: list[type[Settings]] = [Settings]
    while waiting:
        for child in waiting.pop().__subclasses__():
            if child.__module__.partition(".")[0].startswith(penstock.__name__):
                found.append(child)
                waiting.append(child)
    return found


def test_every_field_of_every_settings_struct_has_a_knob_with_a_sentence():
    faults = [
        f"{group.__name__}.{field.name}: {field.knob}"
        for group in all_settings()
        for field in fields_of(group)
        if not is_group(field.type) and (field.knob is None or not field.knob.help.endswith("."))
    ]
    assert not faults, "\n".join(faults)


def test_settings_do_not_become_more_unseen():
    assert len(KNOBS) <= KNOBS_MAX


def test_every_settings_struct_hangs_in_the_tree():
    reached = set()
    waiting = [ClusterSettings, ModelSettings, PoolSettings]
    while waiting:
        group = waiting.pop()
        reached.add(group)
        waiting.extend(field.type for field in fields_of(group) if is_group(field.type))
        waiting.extend(entry for field in fields_of(group) if (entry := entry_type(field.type)) is not None)
    bases = {base for group in reached for base in group.__mro__} & set(all_settings())
    assert set(all_settings()) == reached | bases


def test_every_default_lies_in_its_own_range():
    load(None, [f"{d.dotted}={text(d)}" for d in KNOBS if ANY_KEY not in d.path and not d.is_mapping])


def text(knob):
    if isinstance(knob.default, str):
        return knob.default or "text"
    return value_text(knob.default, Field(knob.path[-1], knob.type, knob.default, knob.knob))


def concrete(knob):
    """The knob's path in the default cluster, where its mappings have the entries sim and main."""
    return tuple("sim" if part == ANY_KEY and i == 1 else "main" if part == ANY_KEY else part
                 for i, part in enumerate(knob.path))  # fmt: skip


def with_entry(knob, path, folder):
    """A file with the entry in it, where the knob is of a mapping that is empty by default; else none."""
    if ANY_KEY not in knob.path or knob.path[0] == "models":
        return None
    tree = {}
    if knob.path[:3] == ("planner", "plugins", "use"):  # a plugin is in a module, or elsewhere
        tree = {"endpoint" if knob.path[-1] == "module" else "module": "x"}
    if knob.path[0] == "tenants":  # one without a key is refused
        tree = {"key_files" if knob.path[-1] == "keys" else "keys": ["k"]}
    for part in reversed(path[: knob.path.index(ANY_KEY) + 1]):
        tree = {part: tree}
    file = folder / "entry.yaml"
    file.write_text(json.dumps(tree))
    return file


class AnyScorer:
    """A plug-in of the router for the entry main of router.plugins."""

    def __init__(self, **options):
        self.score = None


PLUGINS = Extension(name="any", entries={"scorer": {"main": AnyScorer}})


def test_every_knob_is_set_by_flag_and_environment(tmp_path):
    with extension_installed(tmp_path, "any", "tests.config.test_derive:PLUGINS"):
        set_every_knob(tmp_path)


def set_every_knob(tmp_path):
    faults = []
    for knob in [knob for knob in KNOBS if not knob.is_mapping]:
        path, value = concrete(knob), text(knob)
        file, dotted = with_entry(knob, path, tmp_path), ".".join(path)
        for kind, flags, env in (("flag", [f"{dotted}={value}"], {}), ("environment", (), {env_name(path): value})):
            try:
                origin = load(file, flags, env).origin(dotted).kind
            except ConfigError as error:
                origin = str(error)
            if origin != kind:
                faults.append(f"{knob.dotted} by {kind}: {origin}")
    assert not faults, "\n".join(faults)


def test_every_knob_is_in_schema_and_docs():
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    faults = [f"{knob.dotted}: {fault}" for knob in KNOBS for fault in unshown(knob, sections)]
    assert not faults, "\n".join(faults)


def unshown(knob, sections: dict[str, str]) -> Iterator[str]:
    """Yield what the schema and the page of the configuration lack of a knob."""
    here = SCHEMA
    for part in knob.path:
        if "$ref" in here:
            here = SCHEMA["$defs"][here["$ref"].rsplit("/", 1)[1]]
        here = here.get("additionalProperties") if part == ANY_KEY else here.get("properties", {}).get(part)
        if here is None:
            yield f"the schema has no {part}"
            return
    if (here.get("description"), here.get("x-unit")) != (knob.knob.help, knob.knob.unit):
        yield f"the schema has {here.get('description')!r} in {here.get('x-unit')!r}"
    section = sections.get(f"`{knob.group.replace(ANY_KEY, 'NAME')}`" if knob.group else "Top", "")
    if f"| `{knob.path[-1]}` |" not in section:
        yield "the page has no row"
    if knob.knob.help.replace("|", "\\|") not in section:
        yield "the page has no sentence"


def test_the_full_template_shows_every_knob_and_is_the_default():
    shown = init_yaml(everything=True)
    absent = [knob.dotted for knob in KNOBS if not knob.is_mapping and f"{knob.path[-1]}: " not in shown]
    assert not absent, "\n".join(absent)


def test_names_are_unique_and_apart_from_the_reserved_ones():
    assert len({k.env for k in KNOBS}) == len(KNOBS)
    assert len({k.flag for k in KNOBS}) == len(KNOBS)
    assert not {k.env for k in KNOBS} & set(RESERVED)


def test_what_tests_and_the_makefile_set_is_no_unknown_name_to_the_clusters_that_they_start():
    root = Path(__file__).parents[2]
    set_there = [root / "Makefile", *(path for path in (root / ".ci").glob("*"))]
    names = {name for path in set_there for name in re.findall(r"\b(PENSTOCK_\w+)=", path.read_text())}
    for path in [*root.glob("tests/**/*.py"), *root.glob("bench/**/*.py")]:
        names.update(re.findall(r'environ(?:\.get\(|\[)"(PENSTOCK_\w+)"', path.read_text()))
    assert len(names) > 10
    assert names <= set(RESERVED) | {knob.env for knob in KNOBS}


def test_names_as_the_documents_give_them():
    (knob,) = [k for k in KNOBS if k.dotted == "router.cost.overlap_credit"]
    assert knob.env == "PENSTOCK_ROUTER__COST__OVERLAP_CREDIT"
    assert knob.flag == "--router.cost.overlap_credit"
    assert env_name(("models", "org/Model-1.5", "tokenizer")) == "PENSTOCK_MODELS__ORG_MODEL_1_5__TOKENIZER"


class Bare(Settings, frozen=True, kw_only=True):
    naked: int = 1


class Odd(Settings, frozen=True, kw_only=True):
    odd: Annotated[set[int], Knob("Can't be typed in.")] = set()


def test_a_field_without_a_knob_or_with_a_type_that_cant_be_typed_is_refused():
    with pytest.raises(TypeError, match=r"Bare\.naked has no Knob"):
        derive(Bare)
    with pytest.raises(TypeError, match=r"Odd\.odd"):
        derive(Odd)
    assert "naked" in fields_by_name(Bare)
