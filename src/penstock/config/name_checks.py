"""Name checks: aliases, shared names and what models put into requests, where they contradict each other."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.config.derived.knobs import range_text
from penstock.config.reading.problems import Complaint, listed
from penstock.config.settings.cluster_settings import ClusterSettings, NameSettings
from penstock.kernel.settings import Knob
from penstock.kernel.values import JsonObject

FILE = "file:"
"""Beginning of a system prompt that a file has."""
RESERVED = frozenset(
    (
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "nvext",
        "n",
        "tools",
        "functions",
        "input",
        "chat_template",
    )
)
"""Fields that are the request itself, or decide how it is carried: no model may put them in."""
NUMBERS: Mapping[str, tuple[type, Knob]] = {
    "temperature": (float, Knob("", ge=0)),
    "top_p": (float, Knob("", gt=0, le=1)),
    "min_p": (float, Knob("", ge=0, le=1)),
    "top_k": (int, Knob("", ge=-1)),
    "max_tokens": (int, Knob("", ge=1)),
    "max_completion_tokens": (int, Knob("", ge=1)),
    "min_tokens": (int, Knob("", ge=0)),
    "presence_penalty": (float, Knob("", ge=-2, le=2)),
    "frequency_penalty": (float, Knob("", ge=-2, le=2)),
    "repetition_penalty": (float, Knob("", gt=0)),
    "seed": (int, Knob("")),
}
"""Fields whose values are known to be numbers, with their ranges; others are the engine's to judge."""


def default_fields(defaults: Mapping[str, str]) -> JsonObject:
    """Return a model's defaults as fields of a request: JSON where a text is that, else the text itself."""
    return {name: _json_or_text(text) for name, text in defaults.items()}


def name_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    """Return what is wrong with names, and with what models put into requests."""
    owners: dict[str, str] = {}
    for model, entry in settings.models.items():
        path = ("models", model, "aliases")
        for alias in entry.aliases:
            if not alias or any(letter.isspace() for letter in alias):
                yield path, f"{alias!r} is not a valid name", "take 1 to 256 characters without spaces"
            elif alias in settings.models:
                other = "its own name" if alias == model else "the name of another model"
                yield path, f"{alias!r} is {other}", "leave it out; names.NAME shares a model's name with others"
            elif alias in settings.names:
                yield path, f"{alias!r} stands in names as well", "give it one meaning"
            elif owners.setdefault(alias, model) != model or entry.aliases.count(alias) > 1:
                yield path, f"{alias!r} is an alias of {owners[alias]} already", "an alias leads to one model"
        yield from _defaults(("models", model, "defaults"), entry.defaults)
        if entry.system_prompt is not None and not entry.system_prompt.removeprefix(FILE).strip():
            yield ("models", model, "system_prompt"), "is empty", "leave it out, or give a text or file:PATH"
        for name, pool in entry.pools.items():
            by_python = pool.engine == "llamacpp" and not Path(pool.program).name.startswith("llama-server")
            if entry.chat_template is not None and not pool.attached and by_python:
                hint = f"pool {name} is llama-cpp-python's, which takes no template file; llama-server does"
                yield ("models", model, "chat_template"), "would not reach every engine", hint
    for name, shared in settings.names.items():
        yield from _shared(name, shared, settings)


def _shared(name: str, shared: NameSettings, settings: ClusterSettings) -> Iterator[Complaint]:
    path = ("names", name)
    adapters = [adapter for entry in settings.models.values() for adapter in entry.adapters]
    known = f"models are {listed(list(settings.models))}"
    known += f", adapters {listed(adapters)}" if adapters else "; an adapter stands in models.MODEL.adapters"
    if not name or any(letter.isspace() for letter in name):
        yield path, f"{name!r} is not a valid name", "take 1 to 256 characters without spaces"
    for field, models in (("models", shared.models), ("shadow", shared.shadow)):
        for model in models:
            if model not in settings.models and model not in adapters:
                yield (*path, field), f"there is no model {model!r}", known
    if not shared.models:
        if name not in settings.models:
            yield (*path, "models"), "is empty, and no model is called so", f"name models with weights; {known}"
    elif name in adapters:
        yield path, f"{name!r} is an adapter's own name", "give the name another one"
    elif not any(shared.models.values()):
        yield (*path, "models"), "has no weight above 0, so nothing would answer", "give one of them a weight"
    elif name in settings.models and name not in shared.models:
        hint = "list it among the models, with weight 0 where it is to get nothing"
        yield (*path, "models"), f"hides the model {name!r}", hint
    answering = list(shared.models) or [name]
    for model in shared.shadow:
        if answering == [model]:
            yield (*path, "shadow"), f"{model} would shadow itself", "name another model"


def _defaults(path: tuple[str, ...], defaults: Mapping[str, str]) -> Iterator[Complaint]:
    for name, value in default_fields(defaults).items():
        if name in RESERVED:
            yield path, f"{name} can't have a default", f"such as {listed(list(NUMBERS))}"
            continue
        if name == "chat_template_kwargs" and not isinstance(value, dict):
            yield path, f"{name} is {defaults[name]!r}, no object", """write it as '{"enable_thinking": false}'"""
        kind, limits = NUMBERS.get(name, (None, None))
        if kind is None or limits is None:
            continue
        whole = isinstance(value, int) or (isinstance(value, float) and kind is float)
        if isinstance(value, bool) or not whole:
            yield path, f"{name} is {defaults[name]!r}", f"it takes a {'whole ' if kind is int else ''}number"
        elif _outside(limits, value):
            yield path, f"{name} is {defaults[name]}, out of range", f"it takes {range_text(limits)}"


def _outside(limits: Knob, value: float) -> bool:
    return (
        (limits.ge is not None and value < limits.ge)
        or (limits.gt is not None and value <= limits.gt)
        or (limits.le is not None and value > limits.le)
    )


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
