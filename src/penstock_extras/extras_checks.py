"""Extras checks: what is wrong with the settings of JWT and of the audit log."""

from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import urlsplit

from penstock.config.checks import is_loopback
from penstock.config.reading.problems import Complaint, listed
from penstock.config.settings.cluster_settings import ClusterSettings


def jwt_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    """Check that tokens of an issuer can be verified, and that each is of a tenant."""
    token, path = settings.frontend.security.jwt, ("frontend", "security", "jwt")
    if token.issuer is None:
        if token.audience is not None or token.jwks_url is not None:
            yield path, "has no issuer, so no token is accepted", "set issuer"
        return
    if token.audience is None:
        hint = "name what the issuer writes into aud for this endpoint"
        yield (*path, "audience"), "is unset: a token for any other service would be accepted", hint
    for name in ("issuer", "jwks_url"):
        url = urlsplit(getattr(token, name) or "https://unset")
        if url.scheme != "https" and not (url.scheme == "http" and is_loopback(url.hostname or "")):
            yield (*path, name), "is not an https URL", "keys that anyone on the way could change prove nothing"
    if not settings.tenants:
        yield path, "stands without tenants, one of which a token must name", "add tenants: {NAME: {}}"
    if find_spec("jwt") is None:
        yield path, "needs the package PyJWT", "pip install 'penstock[jwt]'"


def audit_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    """Check that the log of prompts and answers has a folder, a key and tenants that there are."""
    audit = settings.audit
    if (audit.folder is None) != (audit.key_file is None):
        missing = "folder" if audit.folder is None else "key_file"
        yield ("audit",), f"has no {missing}", "folder and key_file come together; openssl rand -hex 32 makes a key"
    if audit.folder is not None and find_spec("cryptography") is None:
        yield ("audit",), "needs the package cryptography", "pip install 'penstock[audit]'"
    if unknown := [each for each in audit.tenants if each not in settings.tenants]:
        yield ("audit", "tenants"), f"{listed(unknown)} is not a tenant", f"tenants: {listed(settings.tenants)}"
