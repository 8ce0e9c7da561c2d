"""Command ``penstock operator``: cares for the PenstockClusters of a Kubernetes cluster."""

import asyncio
import os
import socket
from pathlib import Path

import click

from penstock.config.settings.cluster_settings import LogSettings
from penstock.config.settings.discovery_settings import KubernetesSettings

EPILOG = """\b
Examples:
  penstock operator                                   in a pod: every namespace, by the pod's account
  penstock operator --context dev --namespace llm     from outside, one namespace; give it again for more
  penstock operator --crd | kubectl apply --server-side -f -
"""


@click.command("operator", epilog=EPILOG, short_help="Care for the PenstockClusters of a Kubernetes cluster.")
@click.option("--context", metavar="NAME", help="Context of the kubeconfig; by default the pod's own account.")
@click.option(
    "--namespace", "namespaces", multiple=True, metavar="NS", help="Only the PenstockClusters of these namespaces."
)
@click.option("--health-port", type=int, metavar="PORT", help="Answer probes at /health of this port.")
@click.option(
    "--lease-namespace",
    envvar="POD_NAMESPACE",
    default="default",
    show_default=True,
    metavar="NS",
    help="Where the Lease lies by which one of several operators leads [POD_NAMESPACE].",
)
@click.option(
    "--image",
    envvar="PENSTOCK_IMAGE",
    default="",
    metavar="IMAGE",
    help="Image of frontends, planners and simulated engines: the operator's own [PENSTOCK_IMAGE].",
)
@click.option("--runs", default="/run/penstock", show_default=True, metavar="DIR", help="Folder of its journals.")
@click.option("--crd", is_flag=True, help="Print the CustomResourceDefinition of PenstockCluster, and end.")
@click.option("--rights", is_flag=True, help="Print the rules of the role that it needs, and end.")
def command(
    context: str | None,
    namespaces: tuple[str, ...],
    health_port: int | None,
    lease_namespace: str,
    image: str,
    runs: str,
    *,
    crd: bool,
    rights: bool,
) -> int:
    """Care for the PenstockClusters of a Kubernetes cluster: engines, frontends and planner of each."""
    if crd:
        from penstock_kubernetes.operator.cluster_crd import crd_text

        click.echo(crd_text(), nl=False)
        return 0
    if rights:
        import yaml

        from penstock_kubernetes.api.rights import OPERATOR_RIGHTS, rules

        click.echo(yaml.safe_dump(rules(OPERATOR_RIGHTS), sort_keys=False), nl=False)
        return 0
    from penstock.frontend import logs
    from penstock_kubernetes.operator.managed_cluster import OperatorSettings
    from penstock_kubernetes.operator.operator import ALL, operate

    os.environ.pop("POD_UID", None)  # its leases lie in other namespaces, where no pod can own them
    settings = LogSettings()
    logs.setup(settings.format, settings.level)
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{os.getpid()}"
    asyncio.run(
        operate(
            KubernetesSettings(context=context, namespace=namespaces[0] if namespaces else None),
            OperatorSettings(context, image, Path(runs)),
            namespaces=namespaces or (ALL,),
            health_port=health_port,
            lease_namespace=lease_namespace,
            identity=identity,
        )
    )
    return 0
