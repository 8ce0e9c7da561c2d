"""KV transfer protocols: the body fields that make KV go from a prefill engine to a decode engine.

    completed   vLLM (pull), the simulated engine: ``kv_transfer_params``; TensorRT-LLM: ``disaggregated_params``
    push        vLLM's push connector: ``kv_transfer_params`` of the decode leg say where the prefill runs
    bootstrap   SGLang: both legs carry one address and one number

The prefill leg is always asked for one token, not streamed; that token is dropped, since the decode leg makes it
again from the KV.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from penstock.config.derived.engine_flags import PP_SIZE, TP_SIZE
from penstock.kernel.values import TIERS_LABEL, HandoffProtocol, JsonObject, WorkerCard
from penstock.router.events import Handoff

Fields = JsonObject

_ONE_TOKEN: Fields = {"stream": False, "max_tokens": 1}
_NEEDLESS = (
    *("stream_options", "min_tokens", "return_token_ids", "logprobs", "top_logprobs"),
    "max_completion_tokens",  # another name of max_tokens, and TensorRT-LLM takes no request with both
)
TIERS = TIERS_LABEL
"""Label: the eviction order of an engine's KV tiers that read our hints; absent where it has none."""
TIER_SOCKET = "kv_tier_socket"
"""Label: where the tier process of an engine listens, on the engine's machine."""
LEASE = "kv_lease"
"""Label of engines: for how many seconds one holds KV for another that does not say that it still wants it."""
LEASE_USUAL, LEASE_STARTED = 30, 600
"""vLLM's own default, and what those get that are started here: beyond any deadline of ours. A decode worker that reads
KV after its lease reads what has taken its place, answers 200 with a wrong text, and keeps it in its prefix cache."""
PARAMS, HINTS = "kv_transfer_params", "penstock"
"""Where the tiers find a request's hints: field of its body, and field in that."""
BOOTSTRAP_PORT = 8998
"""SGLang's own default."""


class KvTransferProtocol(Protocol):
    """How one kind of engine takes part in a hand-off. Fields are of the request's body."""

    def prefill(self, fields: Mapping[str, Any], handoff: Handoff, card: WorkerCard) -> Fields:
        """Return the body of the leg that makes the KV.

        Args:
            fields: the body from the client, or of the leg before.
            card: the worker that makes it.
        """
        ...

    def decode_params(self, answer: Mapping[str, Any]) -> Fields | None:
        """Return the decode leg's fields from the prefill leg's answer, or None where no KV is held for it."""
        ...

    def decode(self, made: Fields | None, handoff: Handoff) -> Fields:
        """Return the fields that make the decode leg take the KV.

        Args:
            made: from `decode_params`; None where both legs start at once.
        """
        ...


class VllmPull:
    """vLLM's NixlConnector: the prefill's answer says which blocks wait where, and the decode engine reads them."""

    def prefill(self, fields: Mapping[str, Any], handoff: Handoff, card: WorkerCard) -> Fields:
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        return {**one_token(fields), PARAMS: with_tier_hints(params, tier_hints_in(fields))}

    def decode_params(self, answer: Mapping[str, Any]) -> Fields | None:
        params = answer.get("kv_transfer_params")
        return dict(params) if isinstance(params, dict) and params.get("do_remote_prefill") else None

    def decode(self, made: Fields | None, handoff: Handoff) -> Fields:
        return {} if made is None else {"kv_transfer_params": made}


class VllmPush(VllmPull):
    """vLLM's push connector: the decode leg names the prefill engine, which writes to it once it is done."""

    def decode_params(self, answer: Mapping[str, Any]) -> Fields | None:
        return {}

    def decode(self, made: Fields | None, handoff: Handoff) -> Fields:
        assert handoff.source is not None
        host, port = meeting_point(handoff.source)
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": handoff.source.labels.get("engine_id"),
            "remote_host": host,
            "remote_port": port,
            "tp_size": int(handoff.source.labels.get(TP_SIZE, 1)),
            "pp_size": int(handoff.source.labels.get(PP_SIZE, 1)),
        }
        return {"kv_transfer_params": params}


class Bootstrap:
    """SGLang: both legs carry where they meet, and a number of their own (``bootstrap_room``)."""

    def prefill(self, fields: Mapping[str, Any], handoff: Handoff, card: WorkerCard) -> Fields:
        return {**fields, "stream": False, **_meeting(handoff, card)}

    def decode_params(self, answer: Mapping[str, Any]) -> Fields | None:
        return {}

    def decode(self, made: Fields | None, handoff: Handoff) -> Fields:
        assert handoff.source is not None
        return _meeting(handoff, handoff.source)


class TensorRt:
    """TensorRT-LLM: the context leg's answer has an opaque state and the first token, which the generation leg takes.

    That token is the answer's first, so the context leg is asked as the whole would be: it ends after one token anyway.
    """

    def prefill(self, fields: Mapping[str, Any], handoff: Handoff, card: WorkerCard) -> Fields:
        body = {name: value for name, value in fields.items() if name != "stream_options"}
        return {**body, "stream": False, "disaggregated_params": {"request_type": "context_only"}}

    def decode_params(self, answer: Mapping[str, Any]) -> Fields | None:
        choices = answer.get("choices") or [{}]
        choice = choices[0] if isinstance(choices[0], dict) else {}
        if choice.get("finish_reason") not in (None, "length", "not_finished"):
            return None  # the first token was the last: nobody waits for its KV
        params = choice.get("disaggregated_params")
        return dict(params) if isinstance(params, dict) else None

    def decode(self, made: Fields | None, handoff: Handoff) -> Fields:
        return {} if made is None else {"disaggregated_params": {**made, "request_type": "generation_only"}}


HANDOVERS: Mapping[tuple[HandoffProtocol, str], KvTransferProtocol] = {
    ("completed", "vllm"): VllmPull(),
    ("completed", "sim"): VllmPull(),
    ("completed", "trtllm"): TensorRt(),
    ("push", "vllm"): VllmPush(),
    ("push", "sim"): VllmPush(),
    ("bootstrap", "sglang"): Bootstrap(),
    ("bootstrap", "sim"): Bootstrap(),
}
"""(protocol, kind of engine) -> its implementation."""

USUAL: Mapping[str, HandoffProtocol] = {
    "vllm": "completed",
    "sim": "completed",
    "trtllm": "completed",
    "sglang": "bootstrap",
}
"""Kind of engine -> the protocol that it speaks where the settings name no other."""


def meeting_point(card: WorkerCard) -> tuple[str, int]:
    """Return host and port of a prefill worker's bootstrap server: from its card, else by its URL."""
    if card.bootstrap is not None:
        host, _, port = card.bootstrap.rpartition(":")
        return host, int(port)
    url = urlsplit(card.url)
    port_of_url = url.port or 80
    return url.hostname or "127.0.0.1", BOOTSTRAP_PORT if card.engine == "sglang" else port_of_url


def _meeting(handoff: Handoff, card: WorkerCard) -> Fields:
    host, port = meeting_point(card)
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": handoff.key}


def configured_lease(text: str) -> int:
    """Return the shortest lease, in seconds, of a ``--kv-transfer-config``'s hand-offs; 0 where it can't be read."""

    def leases(config: Any) -> Iterator[int]:
        extra = config.get("kv_connector_extra_config", {})
        for each in extra.get("connectors", ()):
            yield from leases(each)
        if "connectors" not in extra and config.get("kv_connector", "Nixl").startswith("Nixl"):
            yield max(0, int(float(extra.get("kv_lease_duration", LEASE_USUAL))))

    try:
        return min(leases(msgspec.json.decode(text)), default=LEASE_USUAL)
    except (msgspec.DecodeError, AttributeError, TypeError, ValueError, OverflowError, RecursionError):
        return 0  # then nothing is fetched that is not there for sure


def lease_of(card: WorkerCard) -> float:
    """Return for how many seconds an engine holds KV that another is to fetch; infinite where it knows no lease."""
    lease = card.labels.get(LEASE)
    if lease is None:
        return LEASE_USUAL if card.engine == "vllm" else math.inf
    return float(lease) if lease.isdecimal() else LEASE_USUAL


def tier_hints_in(fields: Mapping[str, Any]) -> Fields:
    """Return the hints for KV tiers that a body has, or none."""
    params = fields.get(PARAMS)
    hints = params.get(HINTS) if isinstance(params, dict) else None
    return hints if isinstance(hints, dict) else {}


def with_tier_hints(params: Mapping[str, Any], hints: Fields) -> Fields:
    """Return transfer parameters with hints for KV tiers beside what a hand-off put there."""
    return {**params, HINTS: hints} if hints else {**params}


def one_token(fields: Mapping[str, Any]) -> Fields:
    """Return a request's body, asked for one token as a whole answer."""
    return {**{name: value for name, value in fields.items() if name not in _NEEDLESS}, **_ONE_TOKEN}
