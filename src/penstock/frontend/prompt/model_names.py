"""Model names: which model a public name stands for, by aliases, weights and sessions, which get a copy, and presets.

A session's model is that of the smallest ``-ln(u) / weight``, with u drawn from a hash of the session and the model: so
every process chooses alike without remembering anything, and a changed weight moves only sessions to or from its model.
A preset is put in before the prompt is rendered, so that blocks are hashed of what the engine gets.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from penstock.config.files.data_files import text_of
from penstock.config.name_checks import FILE, default_fields
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings
from penstock.frontend.prompt.request_body import Endpoint, Parsed, with_fields
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject

SCALE = 2.0**64


class ShadowOrder(NamedTuple):
    """The copies that a request is to have, once its client has been answered. ``body``: as the client sent it."""

    name: str
    models: tuple[str, ...]
    endpoint: Endpoint
    body: bytes
    streamed: bool


class ModelNames:
    """The names of a cluster beside those of its models."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.aliases: dict[str, str] = {}
        self.weights: dict[str, dict[str, float]] = {}
        """Model -> weight of every shared name; weights of 0 are left out."""
        self.shadows: dict[str, dict[str, float]] = {}
        """Model -> share, of every shared name."""
        self.use(settings)

    def use(self, settings: ClusterSettings) -> None:
        """Take the names of other settings."""
        self.aliases = {alias: model for model, entry in settings.models.items() for alias in entry.aliases}
        self.weights = {
            name: {model: weight for model, weight in shared.models.items() if weight} or {name: 1.0}
            for name, shared in settings.names.items()
        }
        self.shadows = {
            name: {model: share for model, share in shared.shadow.items() if share}
            for name, shared in settings.names.items()
        }

    def known(self) -> dict[str, str]:
        """Return every name that is no model's own, with the model that answers most of its requests."""
        return self.aliases | {name: self.main(name) for name in self.weights}

    def behind(self, name: str) -> tuple[str, ...]:
        """Return the models and adapters that may answer by a name."""
        weights = self.weights.get(name)
        return (self.aliases.get(name, name),) if weights is None else tuple(weights)

    def main(self, name: str) -> str:
        """Return the model that a name stands for; of a shared name, the one with the largest weight."""
        weights = self.weights.get(name)
        return self.aliases.get(name, name) if weights is None else max(weights, key=lambda model: weights[model])

    def model(self, name: str, by: str, ready: Callable[[str], int]) -> str:
        """Return the model for a request by a shared name.

        Args:
            by: its session; requests of the same one go to the same model.
            ready: returns how many workers of a model can take a request; a model without any is left out while
                another has some.
        """
        weights = self.weights[name]
        serving = [model for model in weights if ready(model)] or list(weights)
        return min(serving, key=lambda model: -math.log(_drawn(name, by, model)) / weights[model])

    def copied_to(self, name: str, by: str, answering: str) -> tuple[str, ...]:
        """Return the models that get a copy of a request; a session is copied as a whole or not at all."""
        shadows: Mapping[str, float] = self.shadows.get(name) or {}
        return tuple(
            model
            for model, share in shadows.items()
            if model != answering and _drawn(f"shadow of {name}", by, model) <= share
        )


def _drawn(name: str, by: str, model: str) -> float:
    """Return a number above 0 and up to 1 that is always the same for the same texts."""
    digest = hashlib.blake2b("\0".join((name, by, model)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 1) / SCALE


SYSTEM_ROLES = ("system", "developer")
LENGTHS = frozenset({"max_tokens", "max_completion_tokens"})
"""Two names of one limit: a client that gives either has given it."""
CHAT_ONLY = frozenset(
    {"max_completion_tokens", "chat_template_kwargs", "reasoning_effort", "tool_choice", "parallel_tool_calls"}
)
"""Fields that text completions do not have."""


class ModelPreset:
    """What one model puts into its requests.

    Args:
        template: chat template for engines that take one with each chat.
    """

    def __init__(self, defaults: JsonObject, system: str | None, template: str | None) -> None:
        self.defaults = defaults
        self.system = system
        self.template = template

    def missing(self, parsed: Parsed) -> JsonObject:
        """Return the fields that a request lacks, or that replace its own."""
        fields, chat = parsed.fields, parsed.endpoint == "chat_completions"
        limited = any(fields.get(name) is not None for name in LENGTHS)
        added = {
            name: value
            for name, value in self.defaults.items()
            if fields.get(name) is None and not (limited and name in LENGTHS) and (chat or name not in CHAT_ONLY)
        }
        if chat and self.system is not None:
            messages = fields["messages"]
            if not any(message.get("role") in SYSTEM_ROLES for message in messages):
                added["messages"] = [{"role": "system", "content": self.system}, *messages]
        return added


def as_served(parsed: Parsed, model: str | None, preset: ModelPreset | None) -> Parsed:
    """Return a request as its engine gets it; ``parsed.model`` stays the name that the client asked for.

    Args:
        model: the model behind that name, where it has another.
    """
    added: JsonObject = {} if model is None else {"model": model}
    if preset is not None:
        added |= preset.missing(parsed)
    if not added:
        return parsed
    return replace(parsed, raw=with_fields(parsed, added), fields={**parsed.fields, **added})


def load_presets(settings: ClusterSettings) -> Mapping[str, ModelPreset]:
    """Load what models put into their requests; models that put in nothing are absent.

    Raises:
        ConfigError: a file can't be read.
    """
    return {model: preset for model, entry in settings.models.items() if (preset := _preset(model, entry)) is not None}


def template_text(model: str, entry: ModelSettings) -> str | None:
    """Return the chat template that a model's settings name, or None.

    Raises:
        ConfigError: the file can't be read.
    """
    return (
        None
        if entry.chat_template is None
        else text_of(Path(entry.chat_template).expanduser(), f"models.{model}.chat_template")
    )


def _preset(model: str, entry: ModelSettings) -> ModelPreset | None:
    if not entry.defaults and entry.system_prompt is None and entry.chat_template is None:
        return None
    system = entry.system_prompt
    if system is not None and system.startswith(FILE):
        system = text_of(Path(system.removeprefix(FILE)).expanduser(), f"models.{model}.system_prompt").strip()
        if not system:
            raise ConfigError(f"models.{model}.system_prompt: the file is empty", hint="leave it out, or write a text")
    return ModelPreset(default_fields(entry.defaults), system, template_text(model, entry))
