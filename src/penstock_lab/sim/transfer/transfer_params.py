"""Transfer parameters of a body: vLLM's ``kv_transfer_params`` (pull and push) and SGLang's bootstrap fields.

do_remote_decode                    make the KV and hold it; the answer says where it is
do_remote_prefill, remote_...       pull: the KV is held by that request on that engine
do_remote_prefill, no request id    push: it will be held there under the same X-Request-Id; both legs run at once
penstock: {pin, priority}           hints for tiers below the engine's memory: seconds, and a number of 0 or more
penstock: {prefetch, after}         a further request for the prompt is likely, after so many seconds
bootstrap_host, _port, _room        both legs carry the same; the server's role decides which leg this is
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.kernel.errors import ClientError
from penstock.kernel.values import JsonObject

Role = Literal["aggregated", "prefill", "decode", "encode"]
PIN_MAX = 7 * 24 * 3600
"""Seconds of the longest pin: a client that wants more is better served by a tier that is large enough."""
ROLES: tuple[Role, ...] = ("aggregated", "prefill", "decode", "encode")


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where a prompt's KV is held: ``key`` there; ``waits``: it may not exist yet. ``tokens`` None: all of them."""

    host: str
    port: int
    key: str
    waits: bool
    tokens: int | None = None

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TransferLeg:
    """One leg of a request that two engines share: it makes KV, with ``key`` as its name where a puller has no other,
    or takes it from a source.
    """

    key: str | None = None
    source: KvSource | None = None


def leg_of(body: Mapping[str, Any], role: Role, given: str | None) -> TransferLeg | None:
    """Return which leg of a hand-off a request is; None where it is no leg.

    Args:
        given: the request's id as its sender gave it.
    Raises:
        ClientError: the fields have the wrong type, or a push has no id that both legs share.
    """
    params = body.get("kv_transfer_params")
    if params is not None and not isinstance(params, dict):
        raise ClientError("kv_transfer_params must be an object.", param="kv_transfer_params")
    if params and params.get("do_remote_decode"):
        return TransferLeg(key=None if given is None else f"request:{given}")
    if params and params.get("do_remote_prefill"):
        source = _kv_source(params, given)
        return None if source is None else TransferLeg(source=source)
    room = body.get("bootstrap_room")
    if room is None or role in ("aggregated", "encode"):
        return None
    if type(room) is not int:
        raise ClientError("bootstrap_room must be a whole number.", param="bootstrap_room")
    key = f"room:{room}"
    if role == "prefill":
        return TransferLeg(key=key)
    host, port = body.get("bootstrap_host"), _port(body.get("bootstrap_port"))
    if not isinstance(host, str) or port is None:
        raise ClientError("bootstrap_host and bootstrap_port must say where the prefill runs.", param="bootstrap_host")
    return TransferLeg(source=KvSource(host, port, key, waits=True))


def tier_hints_of(body: Mapping[str, Any]) -> tuple[float, int, float | None]:
    """Return for how many seconds tiers are to keep a request's blocks, and their priority; 0 where nothing is said.

    Also after how many seconds a further request is likely; None where nothing is said.

    Raises:
        ClientError: one of them is no such number.
    """
    params = body.get("kv_transfer_params")
    hints = params.get("penstock") if isinstance(params, dict) else None
    if hints is None:
        return 0.0, 0, None
    pin, priority = (hints.get(name, 0) if isinstance(hints, dict) else None for name in ("pin", "priority"))
    if isinstance(pin, bool) or not isinstance(pin, int | float) or not 0 <= pin <= PIN_MAX:
        raise ClientError(f"kv_transfer_params.penstock.pin must be seconds, 0 to {PIN_MAX:,}.", param="pin")
    if type(priority) is not int or not 0 <= priority < 1 << 31:
        raise ClientError("kv_transfer_params.penstock.priority must be a whole number, 0 or more.", param="priority")
    after = hints.get("after", 0) if hints.get("prefetch") is True else None
    if isinstance(after, bool) or not isinstance(after, int | float | None) or (after is not None and not after >= 0):
        raise ClientError("kv_transfer_params.penstock.after must be seconds, 0 or more.", param="after")
    return float(pin), priority, None if after is None else float(after)


def answer_of(key: str, tokens: int, blocks: int, engine: str, host: str, port: int) -> JsonObject:
    """Return the ``kv_transfer_params`` of an answer whose KV is held, for the other leg to carry."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(blocks))],
        "remote_engine_id": engine,
        "remote_request_id": key,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }


def _kv_source(params: Mapping[str, Any], given: str | None) -> KvSource | None:
    host, port, key = params.get("remote_host"), _port(params.get("remote_port")), params.get("remote_request_id")
    if not isinstance(host, str) or port is None:
        return None  # as vLLM: incomplete parameters are no hand-off, and the prompt is computed here
    if isinstance(key, str):
        tokens = params.get("remote_num_tokens")
        return KvSource(host, port, key, False, tokens if type(tokens) is int and tokens > 0 else None)
    if given is None:
        raise ClientError("A push needs an X-Request-Id that both legs carry.", param="kv_transfer_params")
    return KvSource(host, port, f"request:{given}", waits=True)


def _port(value: Any) -> int | None:
    if type(value) is not int and not (isinstance(value, str) and value.isdecimal()):
        return None
    return int(value) if 0 < int(value) < 65536 else None
