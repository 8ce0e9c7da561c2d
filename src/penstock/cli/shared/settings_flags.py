"""Turns every knob into a flag of up, serve, attach and join without slowing ``--help``.

A flag with a dot in it, such as ``--router.mode kv``, becomes ``--set router.mode=kv`` before click parses it;
the settings are imported only where such a flag or the help needs them.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from penstock.config.derived.knobs import DerivedKnob
    from penstock.config.reading.load import Loaded

F = TypeVar("F", bound=Callable[..., Any])

COMMON = (
    "frontend.host",
    "frontend.port",
    "router.preset",
    "router.mode",
    "router.cost.overlap_credit",
    "router.cost.temperature",
    "router.queue.threshold",
    "router.affinity.mode",
    "frontend.security.api_keys",
    "logs.level",
    "runs.dir",
)
"""Settings that ``--help`` shows; ``--help-all`` shows all of them."""
COMMON_OF_POOL = (
    "command",
    "args",
    "env",
    "sim.block_size",
    "sim.kv_blocks",
    "sim.max_num_seqs",
    "sim.max_num_batched_tokens",
    "sim.timing.speed_up",
)
_BOOLEAN_WORDS = ("true", "false", "yes", "no", "on", "off")


class SettingsCommand(click.Command):
    """A command that takes every knob as a long flag.

    Args:
        cluster: knobs of the whole cluster are flags; otherwise only those that begin with one of ``groups``.
        pool: knobs of a pool are flags too, such as ``--sim.block_size``.
    """

    def __init__(
        self, *args: Any, cluster: bool = True, pool: bool = False, groups: tuple[str, ...] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.cluster = cluster
        self.groups = groups
        self.pool = pool

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._translated(ctx, args))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        common = [*(COMMON if self.cluster else ()), *(COMMON_OF_POOL if self.pool else ())]
        rows = [_flag_help_row(knob) for knob in self.knobs() if knob.dotted in common]
        with formatter.section("Common settings (all of them: --help-all)"):
            formatter.write_dl(rows)

    def knobs(self) -> list["DerivedKnob"]:
        """Return every knob that is a flag here."""
        from penstock.config.derived.knobs import derive
        from penstock.config.settings.cluster_settings import ClusterSettings, PoolSettings

        of_cluster = [knob for knob in derive(ClusterSettings) if self.cluster or knob.dotted.startswith(self.groups)]
        return [*of_cluster, *(derive(PoolSettings) if self.pool else [])]

    def _translated(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        translated: list[str] = []
        rest = list(args)
        while rest:
            arg = rest.pop(0)
            if arg == "--":
                return [*translated, arg, *rest]
            name, equals, value = arg.partition("=")
            if not name.startswith("--") or name in own or not self._is_setting(name):
                translated.append(arg)
                if arg in own and rest and self._takes_value(ctx, arg):
                    translated.append(rest.pop(0))
                continue
            if not equals:
                value = self._value(ctx, name, rest)
            translated += ["--set", f"{name.removeprefix('--')}={value}"]
        return translated

    def _is_setting(self, name: str) -> bool:
        """Return whether a flag is a setting and no mistyped option: it has a dot, or is a knob at the top."""
        plain = name.removeprefix("--").replace("-", "_")
        return "." in plain or any(len(knob.path) == 1 and knob.path[0] == plain for knob in self.knobs())

    def _takes_value(self, ctx: click.Context, option: str) -> bool:
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and option in param.opts:
                return not param.is_flag and not param.count
        return False

    def _value(self, ctx: click.Context, name: str, rest: list[str]) -> str:
        following = rest[0] if rest else None
        if self._is_boolean(name.removeprefix("--").replace("-", "_")):
            return rest.pop(0) if following is not None and following.lower() in _BOOLEAN_WORDS else "true"
        if following is None or following.startswith("--"):
            raise click.UsageError(f"Option '{name}' requires a value.", ctx)
        return rest.pop(0)

    def _is_boolean(self, name: str) -> bool:
        parts = name.split(".")
        for knob in self.knobs():
            # A mapping's key may contain dots, so only the ends are compared.
            if knob.type is bool and (knob.dotted == name or ("*" in knob.path and _same_end(knob.path, parts))):
                return True
        return False


def settings_options(command: F) -> F:
    """Add ``--set`` and ``--help-all`` to a `SettingsCommand`."""
    command = click.option(
        "--help-all", is_flag=True, is_eager=True, expose_value=False, callback=_help_all, help="Show every setting."
    )(command)
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="NAME=VALUE",
        help="Set one knob, such as router.cost.overlap_credit=2; may be repeated, later ones win.",
    )(command)


def load_to_start(config: str | None, overrides: Sequence[str]) -> "Loaded":
    """Read and check everything that a start needs, including the files that the config names.

    Raises:
        ConfigProblems: something is wrong; nothing may be started.
    """
    import os

    from penstock.config.reading.load import load

    return load(config, overrides, os.environ, files=True)


def pool_overrides(overrides: Sequence[str], model: str) -> list[str]:
    """Turn names that start at a pool, such as ``sim.block_size``, into names of the cluster's settings."""
    from penstock.config.derived.knobs import fields_by_name
    from penstock.config.settings.cluster_settings import ClusterSettings, PoolSettings

    below_pool = set(fields_by_name(PoolSettings)) - set(fields_by_name(ClusterSettings))
    translated = []
    for override in overrides:
        head = override.partition("=")[0].partition(".")[0].strip()
        translated.append(f'models."{model}".pools.main.{override}' if head in below_pool else override)
    return translated


def _help_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    command = ctx.command
    assert isinstance(command, SettingsCommand)
    formatter = ctx.make_formatter()
    command.format_usage(ctx, formatter)
    groups: dict[str, list[tuple[str, str]]] = {}
    for knob in command.knobs():
        groups.setdefault(knob.group.replace("*", "NAME") or "top", []).append(_flag_help_row(knob))
    for group, rows in groups.items():
        with formatter.section(group):
            formatter.write_dl(rows)
    click.echo(formatter.getvalue().rstrip())
    ctx.exit()


def _flag_help_row(knob: "DerivedKnob") -> tuple[str, str]:
    from penstock.config.derived.knobs import range_text, type_text
    from penstock.config.reading.units import format_number
    from penstock.kernel.settings import is_group

    kinds = [type_text(knob.type), range_text(knob.knob), knob.knob.unit]
    default = knob.default
    if default is None or knob.is_mapping or default == () or is_group(knob.type):
        shown = ""
    elif isinstance(default, bool):
        shown = f"; default {str(default).lower()}"
    elif isinstance(default, int | float):
        shown = f"; default {format_number(default, knob.knob.unit)}"
    else:
        shown = f"; default {', '.join(map(str, default)) if isinstance(default, tuple) else default}"
    return knob.flag, f"{knob.knob.help} [{', '.join(kind for kind in kinds if kind)}{shown}]"


def _same_end(path: tuple[str, ...], parts: list[str]) -> bool:
    last_key = len(path) - 1 - path[::-1].index("*")
    tail = list(path[last_key + 1 :])
    return parts[0] == path[0] and parts[-len(tail) :] == tail
