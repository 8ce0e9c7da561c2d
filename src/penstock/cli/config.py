"""Command ``penstock config``: writes, checks, shows and imports configs."""

import os
import sys

import click

from penstock.cli.shared.output import json_option, print_json
from penstock.cli.shared.settings_flags import SettingsCommand, settings_options
from penstock.kernel.plurals import counted

EPILOG = """\b
Examples:
  penstock config init > cluster.yaml
  penstock config check cluster.yaml
  penstock config show cluster.yaml --router.mode random
  penstock config schema > penstock.schema.json
  penstock config import planner-config.json
"""


@click.group("config", epilog=EPILOG, short_help="Write, check and show configs.")
def command() -> None:
    """Write, check and show configs."""


@command.command("init", epilog="\b\nExample:\n  penstock config init > cluster.yaml")
@click.option("--all", "everything", is_flag=True, help="Show every setting, not only the usual ones.")
def init(everything: bool) -> int:
    """Print a commented config to start from; as it stands it is the default cluster."""
    from penstock.config.derived.yaml_writer import init_yaml

    click.echo(init_yaml(everything=everything), nl=False)
    return 0


@command.command("check", cls=SettingsCommand, epilog="\b\nExample:\n  penstock config init | penstock config check -")
@click.argument("config", required=False, metavar="[CONFIG]")
@json_option
@settings_options
def check(config: str | None, as_json: bool, overrides: tuple[str, ...]) -> int:
    """Say everything that is wrong with CONFIG, the environment and the flags; exit status 2 if anything is.

    What a start takes of this machine is looked at as well: ports, the run folder, names of servers. CONFIG is a YAML
    file, or - for standard input; without one only environment and flags are checked.
    """
    from penstock.cli.doctor_checks.local_checks import check_start, is_running
    from penstock.cli.shared.settings_flags import load_to_start
    from penstock.config.reading.problems import ConfigProblems

    try:
        loaded = load_to_start(config, overrides)
    except ConfigProblems as error:
        if not as_json:
            raise
        problems = [
            {"where": str(p.origin), "path": p.path, "message": p.message, "hint": p.hint} for p in error.problems
        ]
        print_json({"ok": False, "problems": problems})
        return 2
    settings = loaded.settings
    faults = [each for each in check_start(settings, is_running(settings)) if each.level == "error"]
    if as_json:
        problems = [{"where": "this machine", "path": f.check, "message": f.text, "hint": f.hint} for f in faults]
        print_json({"ok": not faults, "problems": problems})
        return 2 if faults else 0
    for fault in faults:
        click.echo(f"{fault.check}: {fault.text}" + (f"\n  -> {fault.hint}" if fault.hint else ""), err=True)
    if faults:
        return 2
    pools = [pool for model in settings.models.values() for pool in model.pools.values()]
    engines = sum(pool.size for pool in pools)
    click.echo(
        f"Fine: {counted(len(settings.models), 'model')}, {counted(len(pools), 'pool')}, {counted(engines, 'engine')}, "
        f"{settings.router.mode} routing on {settings.frontend.host}:{settings.frontend.port}."
    )
    return 0


@command.command("show", cls=SettingsCommand, epilog="\b\nExample:\n  penstock config show cluster.yaml")
@click.argument("config", required=False, metavar="[CONFIG]")
@json_option
@settings_options
def show(config: str | None, as_json: bool, overrides: tuple[str, ...]) -> int:
    """Print every setting that CONFIG, environment and flags come to, and where each given value came from.

    Secrets are left out.
    """
    from penstock.config.derived.yaml_writer import plain_settings, shown_yaml
    from penstock.config.reading.load import load

    loaded = load(config, overrides, os.environ)
    if as_json:
        origins = {name: str(origin) for name, origin in loaded.origins.items()}
        print_json({"settings": plain_settings(loaded.settings), "origins": origins})
    else:
        click.echo(shown_yaml(loaded.settings, loaded.origins), nl=False)
    return 0


@command.command("schema", epilog="\b\nExample:\n  penstock config schema > penstock.schema.json")
def schema() -> int:
    """Print the JSON Schema of a config file, for editors."""
    from penstock.config.derived.json_schema import schema_text

    click.echo(schema_text(), nl=False)
    return 0


@command.command("import", epilog="\b\nExample:\n  penstock config import planner-config.json --out planner.yaml")
@click.argument("file", metavar="FILE")
@click.option("--out", metavar="FILE", help="Write the settings there instead of to standard output.")
@click.option(
    "--generation",
    type=click.Choice(["planner-config", "load-classic", "sla-classic", "frontend"]),
    help="What the options are of, where they do not tell by themselves.",
)
@json_option
def import_(file: str, out: str | None, generation: str | None, as_json: bool) -> int:
    """Translate options of Dynamo's planners, today's or the classic ones, or of its frontend and router.

    FILE holds a command line, YAML, JSON or a DynamoGraphDeployment; - is standard input. Each option is named on
    standard error: what it became, or why it became nothing.
    """
    from pathlib import Path

    from penstock import extension
    from penstock.kernel.errors import ConfigError

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from error
    result = extension.entry("importer", "dynamo")(text, generation)
    if out is not None:
        try:
            Path(out).write_text(result.yaml())
        except OSError as error:
            raise ConfigError(f"{out} can't be written: {error.strerror}") from error
    if as_json:
        options = [
            {"option": t.option, "value": t.value, "became": dict(t.became), "why": t.why, "implied": t.implied}
            for t in result.notes
        ]
        print_json({"generation": result.generation, "settings": result.settings, "options": options})
        return 0
    if out is None:
        click.echo(result.yaml(), nl=False)
    for one in result.notes:
        click.echo(str(one), err=True)
    left = len(result.left)
    click.echo(f"{counted(len(result.notes) - left, 'option')} translated, {left} not ({result.generation}).", err=True)
    return 0


@command.command("docs", epilog="\b\nExample:\n  penstock config docs | less")
def docs() -> int:
    """Print every setting with its unit, its default and what it trades, as Markdown."""
    from penstock.config.derived.docs import configuration_page

    click.echo(configuration_page(), nl=False)
    return 0
