"""Command ``penstock completion``: prints the script by which a shell completes commands, options and names."""

import click
from click.shell_completion import get_completion_class

EPILOG = """\b
Examples:
  source <(penstock completion bash)      for this shell
  penstock completion bash >> ~/.bashrc   for later ones
  penstock completion zsh > ~/.zfunc/_penstock
  penstock completion fish > ~/.config/fish/completions/penstock.fish

Names of models, workers and pools come from the cluster at PENSTOCK_URL or --url, with PENSTOCK_ADMIN_KEY, where it
answers within a second.
"""


@click.command("completion", epilog=EPILOG, short_help="Print the script by which a shell completes commands.")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def command(context: click.Context, shell: str) -> int:
    """Print the script by which SHELL completes commands, options, and names of the running cluster."""
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(context.find_root().command, {}, "penstock", "_PENSTOCK_COMPLETE").source())
    return 0
