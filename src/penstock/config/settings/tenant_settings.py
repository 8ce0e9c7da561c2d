"""Knobs of tenants, of the tokens that name them, and of the audit log of their prompts and answers."""

import hashlib
import re
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec

from penstock.kernel.settings import Knob, Settings

BudgetPeriod = Literal["day", "month"]
AuditFailure = Literal["refuse", "continue"]
HASHED = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")


def hashed(key: str) -> str:
    """Return a key as ``sha256:`` and its digest in hexadecimal; one that is written so is returned as it is."""
    if _DIGEST.match(key):
        return key
    return HASHED + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class TenantSettings(Settings, frozen=True, kw_only=True):
    """One tenant: its keys, and what they may do. Its weight is in ``router.queue.shares``."""

    keys: Annotated[
        tuple[str, ...],
        Knob(
            "Keys of its clients, or sha256: and the SHA-256 of one in hexadecimal, which is all that is ever written "
            "down."
        ),
    ] = ()
    key_files: Annotated[
        tuple[str, ...], Knob("Files with more of them, one a line; a line that begins with # is a comment.")
    ] = ()
    models: Annotated[
        tuple[str, ...],
        Knob(
            "Models and LoRA adapters that it may ask for, each by its name, or several as acme-*; a model's adapters "
            "do not come with it. None named is all."
        ),
    ] = ()
    classes: Annotated[
        tuple[str, ...],
        Knob("Classes of slo that it may name, of which the first is taken where it names none; empty is any."),
    ] = ()
    priority_max: Annotated[
        int,
        Knob("Highest priority and strict class of its requests; what is higher is lowered to it.", ge=-(2**31)),
    ] = 0
    pins: Annotated[bool, Knob("Whether it may choose the worker or rank of a request.")] = False
    tokens_per_minute: Annotated[
        int | None,
        Knob("Tokens of prompts and answers per minute, of all its keys; unset means no limit.", unit="tokens", gt=0),
    ] = None
    budget: Annotated[
        int | None,
        Knob("Tokens of prompts and answers in a period, of all its keys; unset means no limit.", unit="tokens", gt=0),
    ] = None
    budget_period: Annotated[
        BudgetPeriod, Knob("Period of the budget: a calendar day or month of UTC, after which it begins anew.")
    ] = "month"

    def __post_init__(self) -> None:
        # Only digests are kept from here on: no config.yaml, log or page can have a key.
        msgspec.structs.force_setattr(self, "keys", tuple(map(hashed, self.keys)))

    def names(self, model: str) -> bool:
        """Return whether a model or adapter is among those that it may ask for."""
        return not self.models or any(fnmatchcase(model, each) for each in self.models)


class JwtSettings(Settings, frozen=True, kw_only=True):
    """Tokens of an OIDC issuer in place of keys. Needs the extra penstock[jwt]."""

    issuer: Annotated[str | None, Knob("Issuer whose tokens are accepted, as their iss says; unset accepts none.")] = (
        None
    )
    audience: Annotated[str | None, Knob("What a token's aud must be, or hold; needed with issuer.")] = None
    jwks_url: Annotated[
        str | None,
        Knob("URL of the issuer's public keys; unset is what its /.well-known/openid-configuration says."),
    ] = None
    tenant_claim: Annotated[str, Knob("Claim of a token that names its tenant.")] = "tenant"


class AuditSettings(Settings, frozen=True, kw_only=True):
    """An encrypted log of prompts and answers, off unless it has a folder. Needs the extra penstock[audit]."""

    folder: Annotated[str | None, Knob("Folder of the log; unset writes none.")] = None
    key_file: Annotated[
        str | None, Knob("File with its key, 64 hexadecimal digits, which only this user may be able to read.")
    ] = None
    tenants: Annotated[tuple[str, ...], Knob("Tenants whose requests it has; none named is everybody's.")] = ()
    models: Annotated[tuple[str, ...], Knob("Models whose requests it has; none named is all.")] = ()
    on_failure: Annotated[
        AuditFailure,
        Knob(
            "What happens while it can't be written: refuse answers audited requests with 503, continue answers them "
            "and counts what the log lacks."
        ),
    ] = "refuse"
