"""Writes settings as YAML that reads back to the same settings, whole or as a commented start."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import yaml

from penstock.config.derived.knobs import dotted, entry_type, fields_by_name, range_text, shape_of, type_text
from penstock.config.reading.problems import ValueOrigin
from penstock.config.reading.units import format_number
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.settings import Field, Settings, is_group

INIT_HEAD = """\
# A Penstock cluster. Check it with 'penstock config check FILE', start it with 'penstock up FILE'.
# Numbers take units: 200ms, 5s, 2m, 1h; 8k, 64GiB; 80%. Lines that start with '#' show defaults.
"""
INIT_KEYS = {
    "name",
    "models",
    "models.*.tokenizer",
    "models.*.pools",
    "models.*.pools.*.engine",
    "models.*.pools.*.replicas",
    "models.*.pools.*.sim.block_size",
    "models.*.pools.*.sim.kv_blocks",
    "models.*.pools.*.sim.timing.speed_up",
    "frontend.host",
    "frontend.port",
    "router.mode",
}
"""Keys to which `config init` gives a value; all others are comments."""
INIT_HINTS = {
    "models.*.pools.*.urls",
    "frontend.limits.body_max",
    "frontend.limits.inflight_max",
    "frontend.security.api_keys",
    "router.cost.overlap_credit",
    "router.cost.temperature",
    "router.queue.threshold",
    "router.affinity.mode",
    "router.request_timeout",
    "logs.format",
    "runs.dir",
}
"""Keys that the short form of `config init` shows as comments."""
_WORD = re.compile(r"[A-Za-z/](?:[A-Za-z0-9_./:-]*[A-Za-z0-9_./-])?")


def plain_settings(settings: Settings, *, secrets: bool = False) -> dict[str, Any]:
    """Return settings as nested plain data in the order of declaration; secrets are left out unless requested."""
    found: dict[str, Any] = {}
    for field in fields_by_name(type(settings)).values():
        value = getattr(settings, field.name)
        if is_group(field.type):
            found[field.name] = plain_settings(value, secrets=secrets)
        elif entry_type(field.type) is not None:
            found[field.name] = {key: plain_settings(entry, secrets=secrets) for key, entry in value.items()}
        elif secrets or field.knob is None or not field.knob.secret:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def resolved_yaml(settings: ClusterSettings, secrets: bool = False) -> str:
    """Return the whole config as YAML that `load` reads back to equal settings (except for secrets left out)."""
    return yaml.safe_dump(plain_settings(settings, secrets=secrets), sort_keys=False, width=120, allow_unicode=True)


def shown_yaml(settings: ClusterSettings, origins: Mapping[str, ValueOrigin]) -> str:
    """Return the whole config for an operator: with units, and the origin of each given value."""
    lines: list[str] = []
    _add_lines(settings, origins, (), lines)
    return "\n".join(lines) + "\n"


def init_yaml(*, everything: bool = False) -> str:
    """Return a commented config to start from; unchanged it is the embedded default.

    Args:
        everything: show every knob, not only the usual ones.
    """
    lines = [INIT_HEAD]
    _template(ClusterSettings(), (), (), lines, everything)
    return "\n".join(lines) + "\n"


def value_text(value: Any, field: Field) -> str:
    """Write one value in YAML, with a unit where that reads better."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return format_number(value, field.knob.unit if field.knob is not None else None)
    if isinstance(value, str):
        return _yaml_scalar(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_yaml_scalar(item) if isinstance(item, str) else _flow(item) for item in value) + "]"
    return _flow(msgspec.to_builtins(value))


def _add_lines(settings: Settings, origins: Mapping[str, ValueOrigin], path: tuple[str, ...], lines: list[str]) -> None:
    indent = "  " * len(path)
    for field in fields_by_name(type(settings)).values():
        here, value = (*path, field.name), getattr(settings, field.name)
        if field.is_group:
            lines.append(f"{indent}{field.name}:")
            _add_lines(value, origins, here, lines)
        elif entry_type(field.type) is not None:
            lines.append(f"{indent}{field.name}:")
            for key, entry in value.items():
                lines.append(f"{indent}  {_yaml_scalar(key)}:")
                _add_lines(entry, origins, (*here, key), lines)
        else:
            secret = field.knob is not None and field.knob.secret and value
            nothing = "[]" if isinstance(value, tuple) else "{}" if isinstance(value, dict) else "null"
            text = f"{nothing}  # kept secret" if secret else value_text(value, field)
            origin = origins.get(dotted(here)) or origins.get(f"{dotted(here)}.0")
            lines.append(f"{indent}{field.name}: {text}" + (f"  # {origin}" if origin is not None else ""))


def _template(
    settings: Settings, path: tuple[str, ...], pattern: tuple[str, ...], lines: list[str], everything: bool
) -> None:
    depth = "  " * len(path)
    for field in fields_by_name(type(settings)).values():
        here, value = (*pattern, field.name), getattr(settings, field.name)
        name = ".".join(here)
        entry = entry_type(field.type)
        if field.is_group or entry is not None:
            inner: list[str] = []
            if entry is None:
                _template(value, (*path, field.name), here, inner, everything)
            for key, child in value.items() if entry is not None else ():
                inner.append(f"{depth}  {_yaml_scalar(key)}:")
                _template(child, (*path, field.name, key), (*here, "*"), inner, everything)
            if entry is not None and everything and not value:
                shown: list[str] = [f"{depth}  NAME:"]
                _template(entry(), (*path, field.name, "NAME"), (*here, "*"), shown, everything)
                inner += [line if line.lstrip().startswith("#") else f"{depth}  # {line.lstrip()}" for line in shown]
            if not inner:
                continue
            lines.append(f"{depth}{field.name}:" + (f"  # {_first_line(field.type)}" if entry is None else ""))
            lines.extend(inner)
            if not path:
                lines.append("")
            continue
        given = name in INIT_KEYS
        if not (given or everything or name in INIT_HINTS) or field.knob is None:
            continue
        lines.append(f"{depth}# {field.knob.help}{_allowed_values_text(field)}")
        lines.append(f"{depth}{'' if given else '# '}{field.name}: {value_text(value, field)}")
        if not path:
            lines.append("")


def _allowed_values_text(field: Field) -> str:
    assert field.knob is not None
    parts = []
    if shape_of(field.type).kind == "choice":
        parts.append(type_text(field.type))
    allowed = range_text(field.knob)
    if allowed is not None:
        parts.append(allowed)
    return f" ({'; '.join(parts)})" if parts else ""


def _first_line(group: type[Settings]) -> str:
    return (group.__doc__ or "").strip().splitlines()[0]


def _yaml_scalar(text: str) -> str:
    return text if _is_plain_scalar(text) else yaml.safe_dump(text, default_style='"', width=1_000_000).strip()


def _is_plain_scalar(text: str) -> bool:
    """Return whether YAML needs no quotes around a text: a path or a name, not a number or a word like null."""
    return bool(_WORD.fullmatch(text)) and text.lower() not in ("null", "true", "false", "yes", "no", "on", "off")


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1_000_000).strip().removesuffix("\n...")
