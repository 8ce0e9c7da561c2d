"""Command ``penstock picker``: chooses engines for a gateway that carries the requests itself."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from penstock.cli.shared.attached_servers import KINDS, attached_models
from penstock.cli.shared.settings_flags import SettingsCommand, load_to_start, settings_options

if TYPE_CHECKING:
    from penstock.config.settings.cluster_settings import ClusterSettings
    from penstock_kubernetes.picker_settings import GatewayKind

EPILOG = """\b
Examples:
  penstock picker --for nginx http://gpu1:8000 http://gpu2:8000 --picker.folder /run/penstock
  penstock picker --for nginx --picker.folder /run/penstock --render --listen 0.0.0.0:80
  penstock picker --for haproxy cluster.yaml
  penstock picker --for envoy cluster.yaml
  penstock picker --for envoy cluster.yaml --render --picker.fallbacks 0 --failure close > envoy.json

Without servers and without a config it is the simulated default. --render writes the gateway's config and ends; it
names sockets, so it does not change when workers do; Envoy's is printed.
"""


@click.command(
    "picker",
    cls=SettingsCommand,
    epilog=EPILOG,
    short_help="Choose engines for an Envoy, nginx or HAProxy in front.",
)
@click.argument("sources", nargs=-1, metavar="[CONFIG|URL...]")
@click.option(
    "--for", "kind", type=click.Choice(("envoy", "nginx", "haproxy")), required=True, help="The gateway in front."
)
@click.option("--model", help="Model that all URLs serve; unset asks each server.")
@click.option(
    "--engine", type=click.Choice(KINDS), default="openai", show_default=True, help="Kind; openai asks each server."
)
@click.option("--tokenizer", help="Folder or tokenizer.json of the model.")
@click.option("--events", multiple=True, metavar="[URL=]ENDPOINT", help="KV event endpoint (ZMQ) of a server.")
@click.option(
    "--render", is_flag=True, help="Write the gateway's config into picker.folder (for Envoy: print it), and end."
)
@click.option("--listen", default="127.0.0.1:8080", show_default=True, help="With --render: the gateway's address.")
@click.option(
    "--failure",
    type=click.Choice(("open", "close")),
    default="open",
    show_default=True,
    help="With --render: without a picker, take any worker (open) or refuse (close).",
)
@click.option(
    "--watch-answers/--no-watch-answers",
    "watch",
    default=True,
    show_default=True,
    help="With --render for Envoy: answers pass by the picker, which reads their usage; without, it costs less.",
)
@settings_options
def command(
    sources: tuple[str, ...],
    kind: "GatewayKind",
    model: str | None,
    engine: str,
    tokenizer: str | None,
    events: tuple[str, ...],
    render: bool,
    listen: str,
    failure: Literal["open", "close"],
    watch: bool,
    overrides: tuple[str, ...],
) -> int:
    """Start a cluster whose frontends choose engines for a gateway, from a CONFIG or before servers at URL...."""
    urls = [source for source in sources if "://" in source]
    if (urls and len(urls) < len(sources)) or (len(sources) > 1 and not urls):
        raise click.UsageError("give either URLs of servers or one CONFIG")
    given = [f"picker.kind={kind}"]
    if urls:
        models = attached_models(urls, model=model, engine=engine, tokenizer=tokenizer, events=events)
        given.append(f"models={json.dumps(models)}")
    loaded = load_to_start(None if urls or not sources else sources[0], [*given, *overrides])
    if render:
        return _render(kind, loaded.settings, listen, failure, watch)
    from penstock.cli.shared.cluster_run import run_cluster

    return run_cluster(loaded, "picker")


def _render(
    kind: "GatewayKind", settings: "ClusterSettings", listen: str, failure: Literal["open", "close"], watch: bool
) -> int:
    """Write the gateway's config, and the file of workers where no picker has written it yet."""
    from penstock_kubernetes.picker.gateway_configs import GatewayFolder, GatewayOptions, rendered, workers_file

    folder = GatewayFolder(settings)
    urls = [url for entry in settings.models.values() for pool in entry.pools.values() for url in pool.urls]
    if kind == "envoy":
        from penstock_kubernetes.picker.envoy_config import envoy_config, plan_of

        plan = plan_of(settings, urls, listen, watch_answers=watch, fail_open=failure == "open")
        click.echo(json.dumps(envoy_config(plan), indent=1))
        return 0
    folder.make()
    command = f"penstock picker --for {kind} --render --listen {listen} --failure {failure}"
    texts = rendered(kind, settings, GatewayOptions(listen, failure, command))
    name, text = workers_file(kind, urls)
    if not (folder.path / name).exists():
        texts[name] = text
    for name, text in texts.items():
        folder.write(name, text)
        click.echo(str(Path(folder.path / name)))
    return 0
