"""Command ``penstock join``: adds engines of this machine to a running cluster."""

import os

import click

from penstock.cli.shared.admin_client import DEFAULT_URL, AdminClient, admin_key_option
from penstock.cli.shared.cluster_tls import cluster_tls, tls_options
from penstock.cli.shared.settings_flags import SettingsCommand, settings_options
from penstock.frontend.admin.admin_answers import ClusterStatus
from penstock.kernel.errors import ConfigError

EPILOG = """\b
Examples:
  penstock join                                   one engine more for the cluster on http://127.0.0.1:8000
  penstock join --replicas 4 --sim.kv_blocks 8192
  penstock join --run runs/20260101T120000Z-up-1a2b3c --model sim
  penstock join --urls http://127.0.0.1:8001 --engine vllm --model my-model
  penstock join --engine vllm --model my-model --model_path ./my-model
  penstock join --config cluster.yaml --model sim --discovery.host 10.0.0.2

A cluster that keeps its membership in its run folder is joined on its own machine. One that keeps it in an etcd is
joined from any: --config names its config (or --discovery.store etcd and so on say the same), --discovery.host the
address of this machine, and PENSTOCK_CLUSTER_SECRET its secret. Ctrl-C takes the engines out again.
"""

OF_CLUSTER = ("discovery.", "name", "cluster_secret_file", "supervise.", "runs.")
"""Prefixes of settings that belong to the cluster and not to the pool."""


@click.command(
    "join",
    cls=SettingsCommand,
    cluster=False,
    groups=OF_CLUSTER,
    pool=True,
    epilog=EPILOG,
    short_help="Add engines of this machine to a running cluster.",
)
@tls_options
@click.option("--url", envvar="PENSTOCK_URL", help=f"The cluster, by default {DEFAULT_URL} [PENSTOCK_URL].")
@click.option("--run", "run_folder", help="The cluster's run folder, instead of its URL.")
@click.option("--config", help="The cluster's config, for where it keeps its membership.")
@click.option("--model", help="Model that the engines serve; unset where the cluster has only one.")
@click.option(
    "--engine",
    type=click.Choice(["sim", "vllm", "llamacpp", "openai"]),
    default="sim",
    show_default=True,
    help="Engine.",
)
@click.option("--replicas", type=click.IntRange(1, 1024), default=1, show_default=True, help="Engines to start.")
@admin_key_option
@settings_options
def command(
    url: str | None,
    run_folder: str | None,
    config: str | None,
    model: str | None,
    engine: str,
    replicas: int,
    admin_key: str | None,
    overrides: tuple[str, ...],
) -> int:
    """Add engines of this machine to a running cluster, until Ctrl-C."""
    if run_folder is not None and url is not None and os.environ.get("PENSTOCK_URL") != url:
        raise click.UsageError("--url and --run name the same thing twice; give one of them")
    from penstock.config.reading.load import load, load_group
    from penstock.config.settings.cluster_settings import PoolSettings

    of_cluster = [override for override in overrides if override.startswith(OF_CLUSTER)]
    of_pool = [override for override in overrides if not override.startswith(OF_CLUSTER)]
    settings = load(config, of_cluster, os.environ).settings
    pool = load_group(PoolSettings, [f"engine={engine}", f"replicas={replicas}", *of_pool])
    if pool.engine == "openai" and not pool.attached:
        raise ConfigError("engine openai needs the URLs of its servers", hint="give them with --urls URL,URL")
    cluster = run_folder if run_folder is not None else url or DEFAULT_URL
    if admin_key is not None:
        os.environ["PENSTOCK_ADMIN_KEY"] = admin_key  # the runtime asks the cluster for its run folder with it
    if model is None and settings.discovery.store != "sqlite":
        raise click.UsageError(
            "a cluster in an etcd or in Kubernetes needs --model as well: its store does not tell which one is meant"
        )
    chosen = model if model is not None else _only_model(cluster, admin_key)
    from penstock.runtime.supervision.joining import join

    return join(cluster, pool, chosen, settings, cluster_tls())


def _only_model(cluster: str, admin_key: str | None) -> str:
    if not cluster.startswith(("http://", "https://")):
        raise click.UsageError("--run needs --model as well: the folder alone does not tell which one is meant")
    names = [model.name for model in AdminClient(cluster, admin_key).get("/admin/status", ClusterStatus).models]
    if len(names) == 1:
        return names[0]
    raise ConfigError(f"the cluster has {len(names)} models: {', '.join(names)}", hint="choose one with --model")
