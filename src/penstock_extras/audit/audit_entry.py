"""Audit entry: what the audit log holds of one request."""

import msgspec


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``at``: seconds since 1970; ``prompt``, ``answer``: bodies as the client sent and got them.

    ``outcome`` is None where its end is not known. ``cut``: the answer was longer than what is kept of it.
    """

    id: str
    at: float
    tenant: str | None
    key: str
    model: str
    endpoint: str
    outcome: str | None
    status: int | None
    prompt: bytes
    answer: bytes
    cut: bool = False
