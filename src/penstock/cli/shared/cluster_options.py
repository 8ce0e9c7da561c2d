"""Options of commands for a running cluster: its URL, or the PenstockCluster of Kubernetes that it is."""

import functools
from collections.abc import Callable
from typing import Any

import click

from penstock.cli.shared.admin_client import AdminClient, admin_key_option, url_option


def cluster_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add ``--url`` and ``--admin-key``, or where a PenstockCluster is; the command gets the ``client`` for it."""

    @functools.wraps(command)
    def with_client(
        *,
        url: str,
        admin_key: str | None,
        context: str | None,
        namespace: str | None,
        cluster: str | None,
        **others: Any,
    ) -> int:
        if (context, namespace, cluster) == (None, None, None):
            return command(client=AdminClient(url, admin_key), **others)
        from penstock import extension  # a cluster at a URL needs no entry points

        return command(
            client=extension.entry("client", "kubernetes", "--cluster")(context, namespace, cluster), **others
        )

    options = url_option(admin_key_option(with_client))
    for name, metavar, text in (
        ("--cluster", "NAME", "The PenstockCluster of Kubernetes to talk to, through its API server."),
        ("--namespace", "NS", "Its namespace, where that is not the context's own."),
        ("--context", "NAME", "Context of the kubeconfig; alone it means the only PenstockCluster there."),
    ):
        options = click.option(name, metavar=metavar, help=text)(options)
    return options
