"""How does an operator's plugin come into the planner's process? By its module's path; errors name the setting."""

import importlib
import inspect
from typing import Any

import msgspec
import yaml

from penstock.config.problems import did_you_mean
from penstock.kernel.errors import ConfigError
from penstock.planner.plugins import Plugin, Spec
from penstock.planner.settings_plugins import ModulePlugin, OfPlugin, PluginSettings

_METHODS = ("evaluate", "snapshot", "restore")


def load_plugins(settings: PluginSettings) -> list[Plugin]:
    """Import the plugins of ``planner.plugins.modules`` and make one of each, in the order they are named.

    A class (or function) is called with its `Spec` first and then the options by name.

    Raises:
        ConfigError: a module or name is not there, it takes other options, or what it gives is no plugin.
    """
    return [_load(id, plugin) for id, plugin in settings.modules.items()]


def spec_of(id: str, settings: OfPlugin) -> Spec:
    """Return the spec that settings of a plugin come to."""
    names = {"stage", "priority", "interval", "hold", "needs", "requires", "window"}
    return msgspec.convert({"id": id, **{name: getattr(settings, name) for name in names}}, Spec)


def _load(id: str, given: ModulePlugin) -> Plugin:
    where = f"planner.plugins.modules.{id}"
    if not given.module:
        raise ConfigError(f"{where}.module is not set", hint="name the Python module, such as my_company.scaling")
    try:
        module = importlib.import_module(given.module)
    except Exception as error:
        # What an operator's module does when it is imported can be anything; whatever it is, the setting is named.
        raise ConfigError(
            f"{where}.module: {given.module} can't be imported: {type(error).__name__}: {error}",
            hint="is it installed in this environment, or its folder in PYTHONPATH?",
        ) from error
    make = getattr(module, given.name, None)
    if not callable(make):
        names = [name for name, each in vars(module).items() if callable(each) and not name.startswith("_")]
        raise ConfigError(
            f"{where}.name: {given.module} has no class or function {given.name}",
            hint=did_you_mean(given.name, names, otherwise=f"it has {', '.join(names[:8]) or 'none'}"),
        )
    options = {name: _value(f"{where}.options.{name}", text) for name, text in given.options.items()}
    spec = spec_of(id, given)
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
            f"{where}: what {given.name} gives is no plugin: it {lacks}", hint="see docs/planner-plugins.md"
        )
    found: Plugin = plugin
    return found


def _value(where: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {text!r} is no YAML: {error}") from error
