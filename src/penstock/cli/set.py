"""Command ``penstock set``: changes live knobs of a running cluster, in all its processes."""

from collections.abc import Mapping

import click
from msgspec.structs import asdict

from penstock.cli.shared.admin_client import AdminClient
from penstock.cli.shared.cluster_options import cluster_options
from penstock.cli.shared.output import json_option, show, table
from penstock.cli.shared.waiting import wait_for, wait_options
from penstock.frontend.admin.admin_answers import KnobValue, LiveSettings, SettingsSet
from penstock.kernel.plurals import counted
from penstock.runtime.records.change_log import value_text

EPILOG = """\b
Examples:
  penstock set                                    show every knob that can be changed, and its value
  penstock set router.cost.overlap_credit=2
  penstock set router.queue.wait_max=5s logs.level=debug
  penstock set router.overload.ttft=null          unset it

`penstock config docs` marks the knobs that are live. The others take a change of the config and a restart.
A changed knob counts until the cluster ends; every change is a line of changes.jsonl in the run folder.
"""


@click.command("set", epilog=EPILOG, short_help="Change settings of a running cluster.")
@click.argument("values", nargs=-1, metavar="[KEY=VALUE]...")
@wait_options
@cluster_options
@json_option
def command(client: AdminClient, values: tuple[str, ...], patience: float | None, as_json: bool) -> int:
    """Change settings of a running cluster; all that are named, or none. Without arguments it shows them."""
    if not values:
        state = client.get("/admin/settings", LiveSettings)
        rows = [
            [key, value_text(value), f"was {value_text(state.changed[key].start)}" if key in state.changed else ""]
            for key, value in state.settings.items()
        ]
        show(as_json, state, table(("KEY", "VALUE", "AT THE START"), rows))
        return 0
    accepted, _ = client.post("/admin/set", {"values": dict(_parsed_knob_value(text) for text in values)}, SettingsSet)
    frontends = None
    if patience is not None:
        after = wait_for(
            client, "/admin/settings", LiveSettings, patience, lambda state: _late_frontends(state, accepted.values)
        )
        frontends = len(after.frontends)
    changes = accepted.changed.items()
    lines = [f"{key}: {value_text(change.old)} -> {value_text(change.new)}" for key, change in changes]
    same = accepted.values.keys() - accepted.changed.keys()
    lines += [f"{key} was {value_text(accepted.values[key])} already." for key in same]
    if frontends is not None and accepted.changed:
        lines.append(f"{'All ' if frontends > 1 else ''}{counted(frontends, 'frontend')} took it.")
    show(as_json, {**asdict(accepted), "frontends": frontends}, "\n".join(lines))
    return 0


def _parsed_knob_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise click.UsageError(f"{text!r} is not KEY=VALUE, such as router.cost.overlap_credit=2")
    key = key.strip()
    # A name that clients ask for is as it is; of knobs, both spellings are right.
    return key if key.startswith("names.") else key.replace("-", "_"), value.strip()


def _late_frontends(state: LiveSettings, values: Mapping[str, KnobValue]) -> str | None:
    """Return which frontends have not applied the change yet."""
    late = [
        frontend.name
        for frontend in state.frontends
        if any(frontend.settings.get(key) != value for key, value in values.items())
    ]
    return f"{', '.join(late)} is to take it" if late else None
