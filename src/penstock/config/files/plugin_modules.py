"""Imports planner plugins by their module's path; errors name the setting."""

import importlib
import inspect
from typing import Any

import yaml

from penstock.config.reading.problems import did_you_mean
from penstock.kernel.errors import ConfigError
from penstock.planner.plugins.plugin_registry import PlannerPlugin, PluginSpec
from penstock.planner.settings_plugins import PluginEntry, PluginSettings

_METHODS = ("evaluate", "snapshot", "restore")


def load_plugins(settings: PluginSettings) -> list[PlannerPlugin]:
    """Import the modules of ``planner.plugins.use`` and make one plugin of each, in the order of the setting.

    A class (or function) is called with its `PluginSpec` first and then the options by name.

    Raises:
        ConfigError: a module or name does not exist, takes other options, or makes no plugin.
    """
    return [_load(id, entry.module, entry) for id, entry in settings.use.items() if entry.module]


def _load(id: str, path: str, given: PluginEntry) -> PlannerPlugin:
    where = f"planner.plugins.use.{id}"
    try:
        module = importlib.import_module(path)
    except Exception as error:
        # An operator's module can do anything when it is imported; whatever fails, the error names the setting.
        raise ConfigError(
            f"{where}.module: {path} can't be imported: {type(error).__name__}: {error}",
            hint="is it installed in this environment, or its folder in PYTHONPATH?",
        ) from error
    make = getattr(module, given.name, None)
    if not callable(make):
        names = [name for name, each in vars(module).items() if callable(each) and not name.startswith("_")]
        raise ConfigError(
            f"{where}.name: {path} has no class or function {given.name}",
            hint=did_you_mean(given.name, names, otherwise=f"it has {', '.join(names[:8]) or 'none'}"),
        )
    options = {name: _parsed_option(f"{where}.options.{name}", text) for name, text in given.options.items()}
    spec = PluginSpec.of(id, given)
    try:
        inspect.signature(make).bind(spec, **options)
    except TypeError as error:
        shown = inspect.signature(make)
        raise ConfigError(f"{where}.options: {given.name}{shown} does not take them: {error}") from error
    try:
        plugin = make(spec, **options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where}: {given.name} failed on its options: {type(error).__name__}: {error}") from error
    missing = [name for name in _METHODS if not callable(getattr(plugin, name, None))]
    if missing or getattr(plugin, "spec", None) != spec:
        lacks = f"has no {', '.join(missing)}" if missing else "does not keep the spec it was given as its spec"
        raise ConfigError(
            f"{where}: what {given.name} gives is not a plugin: it {lacks}", hint="see docs/guides/planner-plugins.md"
        )
    found: PlannerPlugin = plugin
    return found


def _parsed_option(where: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {text!r} is not valid YAML: {error}") from error
