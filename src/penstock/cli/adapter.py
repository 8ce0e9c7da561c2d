"""Command ``penstock adapter``: lists, loads and unloads LoRA adapters of a running cluster."""

import click

from penstock.cli.shared.admin_client import AdminClient
from penstock.cli.shared.cluster_options import cluster_options
from penstock.cli.shared.output import json_option, show, table
from penstock.kernel.plurals import counted
from penstock.runtime.cluster_state.fleet_api import (
    AdapterList,
    AdapterState,
    AdapterUnloaded,
    AdapterWorkersBody,
    LoadAdapterBody,
    UnloadAdapterBody,
)

EPILOG = """\b
Examples:
  penstock adapter ls
  penstock adapter load sql /models/adapters/sql
  penstock adapter unload sql
  penstock adapter scale sql 2

Clients name an adapter where they name a model. One that no worker holds is loaded when it is asked for; loading it
here only saves the first request that time. See docs/guides/adapters.md.
"""


@click.group("adapter", epilog=EPILOG, short_help="List, load and unload LoRA adapters.")
def command() -> None:
    """List, load and unload LoRA adapters."""


@command.command("ls", epilog="Example: penstock adapter ls --json")
@cluster_options
@json_option
def ls(client: AdminClient, as_json: bool) -> int:
    """List the adapters, and the workers that hold them."""
    found = client.get("/admin/adapters", AdapterList)
    rows = [[each.name, each.model, str(each.wanted or "-"), _workers(each), each.path] for each in found.adapters]
    text = table(["ADAPTER", "MODEL", "WANTED", "WORKERS", "PATH"], rows)
    show(as_json, found, text if rows else "There is no adapter. 'penstock adapter load NAME PATH' adds one.")
    return 0


@command.command("load", epilog="Example: penstock adapter load sql /models/adapters/sql")
@click.argument("name")
@click.argument("path")
@click.option("--model", help="Model that it adapts, where several take adapters.")
@cluster_options
@json_option
def load(client: AdminClient, name: str, path: str, model: str | None, as_json: bool) -> int:
    """Let clients ask for NAME, which lies at PATH for the engines, and load it on a worker."""
    loaded, _ = client.post("/v1/load_lora_adapter", LoadAdapterBody(name, path, model), AdapterState)
    where = f"loaded on {', '.join(loaded.workers)}" if loaded.workers else "loaded with its first request"
    show(as_json, loaded, f"adapter {name} of {loaded.model}: {where}")
    return 0


@command.command("unload", epilog="Example: penstock adapter unload sql")
@click.argument("name")
@cluster_options
@json_option
def unload(client: AdminClient, name: str, as_json: bool) -> int:
    """Take NAME out of service, and out of every engine's memory."""
    gone, _ = client.post("/v1/unload_lora_adapter", UnloadAdapterBody(name), AdapterUnloaded)
    where = f"unloaded from {', '.join(gone.workers)}" if gone.workers else "no worker held it"
    show(as_json, gone, f"adapter {name} of {gone.model}: {where}")
    return 0


@command.command("scale", epilog="Examples:\n  penstock adapter scale sql 2\n  penstock adapter scale sql settings")
@click.argument("name")
@click.argument("workers")
@cluster_options
@json_option
def scale(client: AdminClient, name: str, workers: str, as_json: bool) -> int:
    """Have NAME on so many WORKERS at any time, also once one of them is replaced; "settings": as those say."""
    if not workers.isdecimal() and workers != "settings":
        raise click.BadParameter(f"{workers!r} is neither a number nor 'settings'", param_hint="WORKERS")
    body = AdapterWorkersBody(name, int(workers) if workers.isdecimal() else None)
    state, _ = client.post("/admin/adapters", body, AdapterState)
    show(
        as_json,
        state,
        f"adapter {name} of {state.model}: {counted(state.wanted, 'worker')} wanted, now {_workers(state)}",
    )
    return 0


def _workers(adapter: AdapterState) -> str:
    return ", ".join([*adapter.workers, *(f"{worker} (loads)" for worker in adapter.loading)]) or "-"
