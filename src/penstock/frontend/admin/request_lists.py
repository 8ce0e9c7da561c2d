"""Request lists: the answers of GET /admin/requests and GET /admin/decisions."""

from typing import Generic, TypeVar

import msgspec

from penstock.kernel.machine import Nanos
from penstock.kernel.request_record import RequestEnd

D = TypeVar("D")


class RequestList(msgspec.Struct, frozen=True):
    """Ended requests, the newest first."""

    requests: list[RequestEnd]


class DecisionList(msgspec.Struct, Generic[D], frozen=True):
    """Decisions, the newest first: as JSON where they are passed on, as ``Decision`` where they are read."""

    decisions: list[D]


class DecisionKey(msgspec.Struct, frozen=True):
    """What tells one recorded decision from all others."""

    at: Nanos
    request: str
    attempt: int
    stage: str = "aggregated"
