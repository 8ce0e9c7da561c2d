"""Cluster TLS: ``--cacert`` and ``--insecure`` of commands that talk to a cluster, and what a failure of TLS means."""

import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click

from penstock.adapters.tls import client_context

F = TypeVar("F", bound=Callable[..., Any])
_META = "penstock.cluster_tls"


def tls_options(command: F) -> F:
    """Add the options; `cluster_tls` has what they come to."""

    def remember(context: click.Context, param: click.Parameter, value: Any) -> None:
        context.meta.setdefault(_META, {})[param.name] = value

    hidden = partial(click.option, expose_value=False, callback=remember)
    command = hidden(
        "--insecure",
        is_flag=True,
        envvar="PENSTOCK_INSECURE",
        help="Trust any certificate of the cluster [PENSTOCK_INSECURE].",
    )(command)
    return hidden(
        "--cacert",
        envvar="PENSTOCK_CACERT",
        metavar="FILE",
        help="Certificates to trust in place of the system's [PENSTOCK_CACERT].",
    )(command)


def cluster_tls() -> ssl.SSLContext | None:
    """Return the TLS of the running command; None where it trusts the system's certificates.

    Raises:
        ConfigError: the file of ``--cacert`` can't be read.
    """
    context = click.get_current_context(silent=True)
    given = {} if context is None else context.meta.get(_META, {})
    if given.get("insecure"):
        return client_context(ca=None, verify=False)
    return None if given.get("cacert") is None else client_context(ca=given["cacert"])


def tls_fault(url: str, error: ssl.SSLError) -> tuple[str, str]:
    """Return what is wrong between us and a server, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "--cacert FILE (or PENSTOCK_CACERT) names certificates to trust, --insecure trusts any"
        return f"the certificate of {url} is not trusted: {error.verify_message}", hint
    if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return f"{url} does not speak TLS", "write http:// in place of https://"
    return f"no TLS connection to {url}: {error.reason or error}", "does it ask for a certificate of yours?"
