"""Extensions: what installed packages add to the server at named seams, by entry points, read when first needed.

A package declares one in its ``pyproject.toml``, and the companions of this server do the same:

    [project.entry-points."penstock.extensions"]
    acme = "acme_penstock.extension:EXTENSION"

    EXTENSION = Extension(name="acme", entries={"scorer": {"by-rack": "acme_penstock.by_rack:ByRack"}})

Settings are a seam, too: what a package offers there under its name is its group of knobs, ``extensions.acme``, which
is checked, documented and in the schema as the server's own are; ``check`` finds what one knob's range can't show.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, get_args

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.settings import Settings

GROUP = "penstock.extensions"
OWN = "penstock"
"""Distribution whose extensions come first: no other can take the place of what it offers."""

Seam = Literal[
    "settings",
    "check",
    "file check",
    "command",
    "store",
    "plane",
    "connector",
    "source",
    "client",
    "engine",
    "child",
    "tokenizer",
    "policy",
    "predictor",
    "speeds",
    "scorer",
    "filter",
    "route",
    "route description",
    "answer filter",
    "request end",
    "telemetry",
    "doctor check",
    "engine check",
    "listener",
    "key verifier",
    "trace format",
    "prompt form",
    "run",
    "tick listener",
    "importer",
    "frontend process",
]
"""Where an extension may add something; docs/guides/extensions.md says what an entry is."""
SEAMS = get_args(Seam)
PLACED = ("sim", "cache", "picker", "classic")
"""Groups of settings that have a place of their own in the server's tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """What one package adds.

    Args:
        name: of the extension, one word.
        entries: seam -> name -> what is offered: ``module:attribute``, imported when it is used, or the object itself.
    """

    name: str
    entries: Mapping[Seam, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Installed:
    """The extensions of this environment by name, and why others can't be used."""

    extensions: Mapping[str, Extension]
    faults: Mapping[str, str]


@cache
def installed() -> Installed:
    """Return the extensions of this environment; the first call reads the entry points of all packages."""
    extensions: dict[str, Extension] = {}
    faults: dict[str, str] = {}
    points = sorted(entry_points(group=GROUP), key=lambda point: (_distribution(point) != OWN, point.name))
    for point in points:
        try:
            extension = point.load()
        except Exception as error:  # noqa: BLE001 - others' code: the server goes on without it and says so
            faults[point.name] = f"{point.value} can't be imported: {type(error).__name__}: {error}"
            continue
        fault = _extension_fault(extension, extensions)
        if fault is None:
            extensions[extension.name] = extension
        else:
            faults[point.name] = fault
    return Installed(extensions, faults)


def names(seam: Seam) -> list[str]:
    """Return the names of everything that extensions offer at a seam, in alphabetical order."""
    return sorted(name for each in installed().extensions.values() for name in each.entries.get(seam, ()))


def choices(seam: Seam, *own: str) -> Any:
    """Return the type of a setting that names one entry of a seam: the server's ``own``, then those of extensions."""
    return Literal[tuple(dict.fromkeys((*own, *names(seam))))]


def entry(seam: Seam, name: str, setting: str = "", *, install: str | None = None) -> Any:
    """Return what an extension offers at a seam under a name.

    Args:
        setting: that asks for it, for the error.
        install: what to install where a package is missing that it needs.
    Raises:
        ConfigError: no extension offers it, or it can't be imported.
    """
    for extension in installed().extensions.values():
        offer = extension.entries.get(seam, {}).get(name)
        if offer is not None:
            return _loaded_offer(offer, extension, setting, install)
    before = f"{setting}: " if setting else ""
    raise ConfigError(f"{before}no installed extension has the {seam} {name!r}", hint=known(seam))


def known(*seams: Seam) -> str:
    """Return a hint with what is offered at some seams, and which extensions can't be used."""
    if not installed().extensions and not installed().faults:
        return "none is installed, not even Penstock's own: install it with pip"
    offered = sorted({name for seam in seams for name in names(seam)})
    absent = "".join(f"; {name} is left out: {why}" for name, why in sorted(installed().faults.items()))
    return f"known: {', '.join(offered) or 'none'}{absent}"


def offers(seam: Seam, name: str) -> bool:
    """Return whether an extension offers something at a seam under a name."""
    return any(name in each.entries.get(seam, ()) for each in installed().extensions.values())


def entries(seam: Seam) -> Mapping[str, Any]:
    """Return everything that extensions offer at a seam, by name in alphabetical order."""
    return {name: entry(seam, name) for name in names(seam)}


@cache
def settings_group(name: str) -> type[Settings]:
    """Return a group of knobs that an extension fills; without that extension it has none."""
    if offers("settings", name):
        group: type[Settings] = entry("settings", name)
        return group
    return _group_of(f"No_{name}", "Settings of a package that is not installed.", {})


@cache
def settings_groups() -> type[Settings]:
    """Return the groups of all extensions by name, but those that have a place of their own in the server's tree."""
    groups = {name: settings_group(name) for name in names("settings") if name not in PLACED}
    return _group_of("ExtensionSettings", "Settings of extensions, by the extension's name.", groups)


def __getattr__(name: str) -> Any:
    """Return a struct that is made here, for who unpickles one."""
    if name == "ExtensionSettings":
        return settings_groups()
    if name.startswith("No_"):
        return settings_group(name.removeprefix("No_"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _group_of(name: str, text: str, groups: Mapping[str, type[Settings]]) -> type[Settings]:
    fields = [(each, group, group()) for each, group in groups.items()]
    struct = msgspec.defstruct(name, fields, bases=(Settings,), namespace={"__doc__": text}, frozen=True, kw_only=True)
    made: type[Settings] = struct  # type: ignore[assignment]
    return made


def _loaded_offer(offer: Any, extension: Extension, setting: str, install: str | None) -> Any:
    if not isinstance(offer, str):
        return offer
    module, _, attribute = offer.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        if install is not None:
            raise ConfigError(f"{setting} needs a package: {error}", hint=install) from error
        hint = f"is all that the extension {extension.name} needs installed?"
        before = f"{setting}: " if setting else ""
        raise ConfigError(f"{before}{offer} can't be imported: {error}", hint=hint) from error


def _extension_fault(extension: Any, others: Mapping[str, Extension]) -> str | None:
    """Return what is wrong with an extension; None where nothing is."""
    if not isinstance(extension, Extension):
        return f"it is a {type(extension).__name__}, not a penstock.extension.Extension"
    if extension.name in others:
        return f"another extension is called {extension.name}"
    for seam, offered in extension.entries.items():
        if seam not in SEAMS:
            return f"it has entries for {seam!r}, which is not one of {', '.join(SEAMS)}"
        for name in offered:
            for other in others.values():
                if name in other.entries.get(seam, ()):
                    return f"its {seam} {name} has the name of one of {other.name}"
    return None


def _distribution(point: EntryPoint) -> str:
    return "" if point.dist is None else point.dist.name
