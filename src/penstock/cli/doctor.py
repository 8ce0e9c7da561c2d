"""Command ``penstock doctor``: problems of this machine or the cluster, how bad each is, and the next step."""

import click
from click.core import ParameterSource

from penstock.cli.shared.admin_client import DEFAULT_URL, admin_key_option, api_key_option, url_option
from penstock.cli.shared.output import json_option, print_json
from penstock.kernel.plurals import counted

EPILOG = """\b
Examples:
  penstock doctor                         this machine, and the cluster if one runs
  penstock doctor cluster.yaml            also whether that config could be started
  penstock doctor --no-probe              without sending a prompt to each worker
  penstock doctor --json | jq '.findings[] | select(.level == "error")'

Exit status 1 says that there is an error.
"""

MARKS = {"ok": "ok     ", "info": "info   ", "warning": "WARNING", "error": "ERROR  "}


@click.command("doctor", epilog=EPILOG, short_help="Look for what is wrong on this machine and in the cluster.")
@click.argument("config", required=False, metavar="[CONFIG]")
@url_option
@admin_key_option
@api_key_option
@click.option(
    "--probe/--no-probe",
    default=None,
    help="Ask each worker a new prompt twice, to see whether our view of its cache is right; --probe also asks servers "
    "of unknown kind.  [default: those of known kind]",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    config: str | None,
    url: str,
    admin_key: str | None,
    api_key: str | None,
    probe: bool | None,
    as_json: bool,
) -> int:
    """Look for what is wrong on this machine, in CONFIG and in the running cluster."""
    from penstock.cli.doctor_checks.local_checks import ProbeOptions, examine

    url_given = ctx.get_parameter_source("url") is not ParameterSource.DEFAULT or url != DEFAULT_URL
    probing = ProbeOptions(on=probe is not False, unknown=probe is True, api_key=api_key)
    findings = examine(config, url, admin_key, url_was_given=url_given, probing=probing)
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if as_json:
        rows = [{"check": f.check, "level": f.level, "text": f.text, "hint": f.hint} for f in findings]
        print_json({"ok": errors == 0, "errors": errors, "warnings": warnings, "findings": rows})
    else:
        for finding in findings:
            click.echo(f"{MARKS[finding.level]}  {finding.check}: {finding.text}")
            if finding.hint:
                click.echo(f"         -> {finding.hint}")
        click.echo(f"\n{counted(errors, 'error')}, {counted(warnings, 'warning')}.")
    return 1 if errors else 0
