"""Command ``penstock attach``: puts a frontend before servers that are running already."""

import json

import click

from penstock.cli.shared.attached_servers import KINDS, access_options, attached_models, models_of_pods
from penstock.cli.shared.settings_flags import SettingsCommand, load_to_start, settings_options
from penstock.config.settings.pool_access_settings import PoolAccessSettings

EPILOG = """\b
Examples:
  penstock attach http://gpu1:8000 http://gpu2:8000
  penstock attach http://gpu1:8000 --tokenizer ./my-model --frontend.port 9000
  penstock attach http://gpu1:8000 --model my-model --block-size 16
  penstock attach http://gpu1:8000 http://gpu2:8000 --events http://gpu1:8000=tcp://gpu1:5557
  penstock attach https://gpu1:8000 --api-key-env VLLM_API_KEY --cacert ca.pem
  penstock attach --selector app=vllm --namespace serving

With --selector the servers are the ready pods of a Kubernetes namespace, as they come and go; their annotations
penstock.io/kv-events, penstock.io/kv-replay and penstock.io/stats say where they publish, as ports.

A server is asked of which kind it is, and where it announces its KV events. Without a tokenizer (--tokenizer, or the
folder that a server on this machine names) prompts are routed by hashed blocks of text, which match the engines' caches
less well.
"""


@click.command(
    "attach", cls=SettingsCommand, epilog=EPILOG, short_help="Put a frontend before servers that already run."
)
@click.argument("urls", nargs=-1, metavar="[URL...]")
@click.option("--selector", help="Label selector of Kubernetes pods, or inferencepool/NAME; in place of URLs.")
@click.option("--namespace", help="Namespace of those pods; unset is the one of the login.")
@click.option("--model", help="Model that all of them serve, as requests name it; unset asks each server for its list.")
@click.option(
    "--engine", type=click.Choice(KINDS), default="openai", show_default=True, help="Kind; openai asks each server."
)
@click.option("--tokenizer", help="Folder or tokenizer.json of the model.")
@click.option("--block-size", type=click.IntRange(1), help="Tokens per KV block, where a server does not tell it.")
@click.option(
    "--events",
    multiple=True,
    metavar="[URL=]ENDPOINT",
    help="KV event endpoint (ZMQ) of a server that does not tell it; may be repeated, once for each rank.",
)
@click.option("--replay", multiple=True, metavar="[URL=]ENDPOINT", help="Replay endpoint, in the same way.")
@click.option("--topic", help="Topic of those KV events; unset takes every topic.")
@click.option("--stats", multiple=True, metavar="[URL=]ENDPOINT", help="Endpoint of a server's statistics plug-in.")
@access_options
@click.option("--wait", is_flag=True, help="Start although no attached server answers yet: supervise.wait.")
@settings_options
def command(
    urls: tuple[str, ...],
    selector: str | None,
    namespace: str | None,
    model: str | None,
    engine: str,
    tokenizer: str | None,
    block_size: int | None,
    events: tuple[str, ...],
    replay: tuple[str, ...],
    topic: str | None,
    stats: tuple[str, ...],
    access: PoolAccessSettings,
    wait: bool,
    overrides: tuple[str, ...],
) -> int:
    """Put a frontend before OpenAI-compatible servers that already run at URL..., grouped by the model they serve."""
    if bool(urls) == (selector is not None):
        raise click.UsageError("name the URLs of servers, or the pods with --selector")
    if selector is not None:
        overrides = (*overrides, *([f"discovery.kubernetes.namespace={namespace}"] if namespace else []))
        models = models_of_pods(
            selector,
            overrides,
            model=model,
            engine=engine,
            tokenizer=tokenizer,
            block_size=block_size,
            topic=topic,
            access=access,
        )
    else:
        models = attached_models(
            urls,
            model=model,
            engine=engine,
            tokenizer=tokenizer,
            block_size=block_size,
            topic=topic,
            events=events,
            replay=replay,
            stats=stats,
            wait=wait,
            access=access,
        )
    loaded = load_to_start(
        None, [f"models={json.dumps(models)}", *(["supervise.wait=true"] if wait else []), *overrides]
    )
    from penstock.cli.shared.cluster_run import run_cluster

    return run_cluster(loaded, "attach")
