"""Entry point of ``penstock``: finds the command, runs it, and turns errors into sentences.

Nothing heavy is imported here: ``penstock --help`` should take about 0.2 s.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import click

from penstock import __version__
from penstock.kernel.errors import ConfigError, PenstockError
from penstock.kernel.numeric_threads import ONE_THREAD

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("penstock.cli.up", "Start a cluster from a config, or the simulated default."),
    "serve": ("penstock.cli.serve", "Serve one model with engines of this machine."),
    "join": ("penstock.cli.join", "Add engines of this machine to a running cluster."),
    "attach": ("penstock.cli.attach", "Put a frontend before servers that already run."),
    "epp": ("penstock_kubernetes", "Choose endpoints for gateways of the Inference Extension."),
    "picker": ("penstock_kubernetes", "Choose engines for an Envoy, nginx or HAProxy in front."),
    "forward": ("penstock.cli.forward", "Carry events among the frontends of a cluster."),
    "operator": ("penstock_kubernetes", "Care for the PenstockClusters of a Kubernetes cluster."),
    "adapter": ("penstock.cli.adapter", "List, load and unload LoRA adapters."),
    "scale": ("penstock.cli.scale", "Change how many engines pools have."),
    "flip": ("penstock.cli.flip", "Change what a worker does: prefill, decode or both."),
    "drain": ("penstock.cli.drain", "Take a worker or a frontend out of service."),
    "planner": ("penstock.cli.planner", "Decide how many workers there should be, and say why."),
    "restart": ("penstock.cli.restart", "Replace every engine and frontend, without losing a request."),
    "set": ("penstock.cli.set", "Change settings of a running cluster."),
    "status": ("penstock.cli.status", "Show models, workers, queues and findings of a cluster."),
    "top": ("penstock.cli.top", "Watch a cluster live."),
    "logs": ("penstock.cli.logs", "Show the log of a worker or another process."),
    "events": ("penstock.cli.events", "Show what happened to a cluster, and who did it."),
    "explain": ("penstock.cli.explain", "Show why a request went where it went."),
    "replay": ("penstock_lab", "Feed a run's journal back, also with other settings."),
    "ui": ("penstock_lab", "Look at a run that is over in a browser."),
    "usage": ("penstock.cli.usage", "Show tokens and requests per tenant and key."),
    "audit": ("penstock_extras", "Read the log of prompts and answers."),
    "runs": ("penstock.cli.runs", "List and delete run folders."),
    "chat": ("penstock.cli.chat", "Talk to a model of the cluster."),
    "bench": ("penstock_lab", "Load a server and measure it."),
    "profile": ("penstock_lab", "Measure an engine: TTFT, ITL, start, and which size to take."),
    "study": ("penstock_lab", "Hold split and co-located engines against each other."),
    "simulate": ("penstock_lab", "Run a cluster on virtual time and compare settings."),
    "plan": ("penstock_lab", "Find the cheapest deployments that meet an SLO."),
    "render": ("penstock_kubernetes", "Print a config as files of other tools."),
    "tune": ("penstock_lab", "Search better settings by simulation."),
    "trace": ("penstock_lab", "Inspect, convert, cut and scale traces of requests."),
    "cache": ("penstock_kv", "Look into KV tiers, pin, drop and check blocks."),
    "doctor": ("penstock.cli.doctor", "Look for what is wrong on this machine and in the cluster."),
    "config": ("penstock.cli.config", "Write, check and show configs."),
    "completion": ("penstock.cli.completion", "Print the script by which a shell completes commands."),
}
"""Name -> module with a ``command``, or the companion that offers it, and its line in the help; a test compares the
line with the command's own. So the help needs no entry points; commands of other extensions are not in it."""
GROUPS: dict[str, tuple[str, ...]] = {
    "Serve": ("up", "serve", "join", "attach", "epp", "picker", "forward", "operator"),
    "Look": ("status", "top", "logs", "events", "explain", "ui", "replay", "usage", "audit", "runs"),
    "Operate": ("scale", "flip", "drain", "restart", "set", "cache", "adapter", "planner"),
    "Ask and measure": ("chat", "bench", "simulate", "study", "tune", "trace"),
    "Set up": ("profile", "plan", "render", "config", "completion", "doctor"),
}
"""Headings of the help, each with its commands."""
HIDDEN = {"engine": "penstock_lab", "frontend": "penstock.cli.frontend", "weights": "penstock_kv"}
"""Processes of the supervisor that can be run by hand."""
COMPUTE = ("planner", "study", "simulate", "tune")
"""Commands that compute; none of them starts engines, which choose their threads themselves."""

USER_ERROR = 2
INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group that imports a command's module only to run it, not to list it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = HIDDEN.get(cmd_name) or COMMANDS.get(cmd_name, ("", ""))[0]
        if cmd_name in COMPUTE:
            os.environ.update({**ONE_THREAD, **os.environ})
        command: click.Command
        if "." in module:
            command = importlib.import_module(module).command
        elif _is_known(cmd_name):
            from penstock import extension

            if module and not extension.offers("command", cmd_name):
                hint = f"python -c 'import {module}' says why not; 'pip install penstock' brings it"
                raise ConfigError(f"{cmd_name} comes with the package {module}, which can't be used here", hint=hint)
            command = extension.entry("command", cmd_name, f"penstock {cmd_name}")
        else:
            return None
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and not _is_known(args[0]):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "'penstock --help' lists them."
            raise click.UsageError(f"There is no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), COMMANDS[name][1]) for name in names])


def _is_known(name: str) -> bool:
    """Return whether there is such a command, of the server, of a companion or of another extension."""
    if name in COMMANDS or name in HIDDEN:
        return True
    from penstock import extension

    return extension.offers("command", name)


def _say_version(context: click.Context, param: click.Parameter, wanted: bool) -> None:
    """Print the version, the commit, and whether the hot modules are machine code (`make fast`), or Python as usual."""
    if not wanted:
        return
    from penstock.cli.shared.build_revision import build_revision

    hot = find_spec("penstock.kernel.simulation")
    assert hot is not None and hot.origin is not None
    kind = "pure Python" if hot.origin.endswith(".py") else "compiled"
    click.echo(f"penstock {__version__} ({kind}, {build_revision()})")
    context.exit()


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    no_args_is_help=True,
    epilog="Start with 'penstock up', then 'penstock chat Hello' in another terminal.",
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_say_version, help="Version and commit."
)
def cli() -> None:
    """One service of many LLM inference engines: an OpenAI endpoint, KV-aware routing, and the reason for every
    decision."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 1 (it failed), 2 (config or usage), 130 (Ctrl-C)."""
    try:
        result = cli.main(
            args=list(arguments) if arguments is not None else None,
            prog_name="penstock",
            standalone_mode=False,
            color=False if os.environ.get("NO_COLOR") else None,
        )
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("Stopped.", err=True)
        return INTERRUPTED
    except ConfigError as error:
        click.echo(f"penstock: {error}", err=True)
        return USER_ERROR
    except PenstockError as error:
        click.echo(f"penstock: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as head, has gone: point stdout elsewhere, so that the interpreter's last flush is quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return result if isinstance(result, int) else 0
