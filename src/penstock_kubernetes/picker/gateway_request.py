"""Gateway request: a client's request as the gateway that carries it shows it to us."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class GatewayRequest(NamedTuple):
    """A request as a gateway shows it.

    Args:
        headers: names in lower case.
        subset: endpoints among which the gateway wants one chosen; None allows all.
        priority: of its objective: a class that goes before every lower one.
        tenant: on whose behalf it is sent; counts for the rate of a key.
        model: in place of the one that its body names.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    remote: str | None = None
    subset: Sequence[str] | None = None
    priority: int = 0
    tenant: str | None = None
    model: str | None = None
