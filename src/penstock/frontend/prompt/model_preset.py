"""Model preset: what a model puts into its requests, as fields that clients leave out and a system prompt.

It is put in before the prompt is rendered, so that blocks are hashed of what the engine gets.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from penstock.config.files.data_files import text_of
from penstock.config.name_checks import FILE, default_fields
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings
from penstock.frontend.prompt.request_body import Parsed, with_fields
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject

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
