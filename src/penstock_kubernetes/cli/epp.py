"""Command ``penstock epp``: an end-point picker of the Gateway API Inference Extension, for Envoy and others."""

import json

import click

from penstock.cli.shared.attached_servers import KINDS, attached_models, models_of_pods
from penstock.cli.shared.settings_flags import SettingsCommand, load_to_start, settings_options

EPILOG = """\b
Examples:
  penstock epp --pool chat --namespace llm --frontend.host 0.0.0.0 --frontend.security.insecure true
  penstock epp http://10.0.0.7:8000 http://10.0.0.8:8000 --picker.tls false

It speaks ext_proc v3 over gRPC at picker.listen_port (9002) and is a frontend besides: status, explain, metrics and
the page work for the requests that it picked for. `penstock picker --for envoy --render` writes a config of Envoy.
"""


@click.command(
    "epp", cls=SettingsCommand, epilog=EPILOG, short_help="Choose endpoints for gateways of the Inference Extension."
)
@click.argument("urls", nargs=-1, metavar="[URL...]")
@click.option("--pool", help="InferencePool whose pods are the workers, in place of URLs.")
@click.option("--namespace", help="Namespace of the pool; unset is the one of the login.")
@click.option("--model", help="Model that all of them serve; unset asks each server, or a ready pod.")
@click.option(
    "--engine", type=click.Choice(KINDS), default="openai", show_default=True, help="Kind; openai asks each server."
)
@click.option("--tokenizer", help="Folder or tokenizer.json of the model.")
@settings_options
def command(
    urls: tuple[str, ...],
    pool: str | None,
    namespace: str | None,
    model: str | None,
    engine: str,
    tokenizer: str | None,
    overrides: tuple[str, ...],
) -> int:
    """Choose endpoints for a gateway: among the pods of an InferencePool, or servers at URL...."""
    if bool(urls) == (pool is not None):
        raise click.UsageError("name the URLs of servers, or the InferencePool with --pool")
    given = ["picker.kind=envoy", *([f"discovery.kubernetes.namespace={namespace}"] if namespace else []), *overrides]
    if pool is not None:
        models = models_of_pods(f"inferencepool/{pool}", given, model=model, engine=engine, tokenizer=tokenizer)
    else:
        models = attached_models(urls, model=model, engine=engine, tokenizer=tokenizer)
    loaded = load_to_start(None, [f"models={json.dumps(models)}", *given])
    from penstock.cli.shared.cluster_run import run_cluster

    return run_cluster(loaded, "epp")
