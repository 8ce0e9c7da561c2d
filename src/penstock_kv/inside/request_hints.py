"""Hints of a request for its KV blocks, in ``kv_transfer_params``: ``{"penstock": {"priority": 3, "pin": 300}}``."""

import logging
from typing import Any

import msgspec

from penstock_kv.inside.tier_protocol import RequestHints

log = logging.getLogger("vllm.penstock")

FIELD = "penstock"


class TierParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hints.

    Args:
        priority: of the request's blocks in the tiers; 0 is the lowest.
        pin: seconds for which they are not evicted.
        deadline: seconds that loading them may take; after that they are computed.
        tenant: blocks are shared only within one.
        prefetch: a further request for this prompt is likely: bring its blocks up once this one has ended.
        after: seconds after its end at which to do that; 0 is at once.
        lora: identity of its adapter, which no client says.
    """

    priority: int = 0
    pin: float = 0.0
    deadline: float | None = None
    tenant: str = ""
    prefetch: bool = False
    after: float = 0.0
    lora: str = ""

    @property
    def hints(self) -> RequestHints:
        """As they go to the tier process."""
        return RequestHints(
            priority=self.priority, pin=self.pin, deadline=self.deadline, tenant=self.tenant, lora=self.lora
        )


def tier_params(params: Any, lora: str = "") -> TierParams:
    """Return a request's hints. Hints that can't be read are logged, and none of them counts.

    Args:
        lora: identity of its adapter.
    """
    raw = params.get(FIELD) if isinstance(params, dict) else None
    if raw is not None:
        try:
            return msgspec.structs.replace(msgspec.convert(raw, TierParams), lora=lora)
        except msgspec.ValidationError as error:
            log.warning("a request's hints for the KV tiers are not heeded: kv_transfer_params.%s: %s", FIELD, error)
    return TierParams(lora=lora)
