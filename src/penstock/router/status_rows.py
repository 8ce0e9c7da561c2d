"""Rows of a status: models, workers, queues, counts and findings, as every process and operator reads them."""

from typing import Literal

import msgspec

from penstock.kernel.values import HandoffProtocol, Role

Level = Literal["info", "warning", "error"]
IndexKind = Literal["off", "approximate", "exact", "mixed"]
OUTCOMES = ("ok", "failed", "rejected", "cancelled", "expired")


class StatusFinding(msgspec.Struct, frozen=True):
    """What an operator should know: how bad it is, a sentence, and the next step."""

    level: Level
    text: str
    hint: str


class QueueStatus(msgspec.Struct, frozen=True):
    """``length``: requests of one model that wait for a worker."""

    length: int


class StatusCounts(msgspec.Struct, kw_only=True):
    """Requests since the start. ``http_inflight``: those that a frontend process has open, of every route."""

    inflight: int = 0
    total: int = 0
    ok: int = 0
    failed: int = 0
    rejected: int = 0
    cancelled: int = 0
    expired: int = 0
    http_inflight: int = 0


class ModelStatus(msgspec.Struct, kw_only=True):
    """One model. ``tokenizer``: its folder as configured; ``refused``: requests by the limit that refused them.

    ``adapters``: requests that found their LoRA adapter (hit), waited for it (wait), had it loaded (load), loads that
    failed, adapters that were unloaded for others, and that an engine did not hold (missing).
    ``media``: images and the like by what became of them, where a worker's role is to encode; ``embedding_bytes``:
    about how many bytes of them are in the store. ``awaited``: requests of sessions for which a worker's KV tiers were
    told to bring blocks up: those that came to it (home), and those that went elsewhere.
    """

    name: str
    block_size: int | None = None
    max_model_len: int | None = None
    ready: bool = False
    workers: int = 0
    index: IndexKind = "off"
    index_pairs: int | None = None
    hit_rate: float | None = None
    inflight: int = 0
    tokenizer: str | None = None
    roles: dict[Role, int] = {}
    handoff: HandoffProtocol | None = None
    handoffs: dict[str, int] | None = None
    media: dict[str, int] | None = None
    embedding_bytes: int = 0
    awaited: dict[str, int] = {}
    refused: dict[str, int] = {}
    adapters: dict[str, int] = {}
    ok: int = 0
    rejected: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0


class KvEventsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """KV events of one worker: ``lost`` of the gaps could not be replayed."""

    applied: int
    gaps: int
    lost: int


class StepsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's last window of passes: means of a pass, tokens per second; None is unknown."""

    source: str
    wall_window_s: float
    wall_age_s: float
    wall_passes: int | None
    wall_pass_ms: float | None
    wall_prefill_tokens_per_s: float | None
    wall_decode_tokens_per_s: float | None
    wall_decode_seqs: float | None
    wall_decode_kv_tokens: float | None
    wall_queued_requests: float | None
    wall_queued_prefill_tokens: float | None
    estimated: list[str]


class CanaryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Canary probes of one worker. ``wall_s``: seconds that the last token took."""

    sent: int
    missed: int
    verdict: str | None
    wall_s: float | None


class WorkerStatus(msgspec.Struct, kw_only=True):
    """One worker. ``since``: seconds in its state; ``why_not``: why it takes no requests; ``stats``: endpoint of its
    statistics plug-in.

    A frontend's node fills ``steps``, ``canary`` and ``restarts``; the router knows none of them.
    """

    id: str
    model: str
    role: Role
    url: str
    engine: str
    state: str
    why_not: str | None
    epoch: int
    pid: int | None
    since: float
    index: str
    active_requests: int
    active_prefill_tokens: int
    active_blocks: int
    """Blocks of running requests, those to be computed included: the load by which requests are placed."""
    kv_blocks: int | None
    block_size: int | None
    requests: int
    failures: int
    breaker: Literal["closed", "open", "half_open"]
    kv_events: KvEventsStatus | None
    paired: bool = False
    """Whether it takes only requests in which a worker of another role has a part."""
    resident_blocks: int | None = None
    """Whole blocks in its engine's memory by its KV events, whether requests run with them or nobody does; None where
    they are not heard."""
    stats: str | None = None
    labels: dict[str, str] = {}
    steps: StepsStatus | None = None
    canary: CanaryStatus | None = None
    restarts: int = 0
    restart_reason: str | None = None


class RouterStatus(msgspec.Struct, kw_only=True):
    """State of one router for operators; unknown numbers are None."""

    name: str
    mode: str
    models: list[ModelStatus]
    workers: list[WorkerStatus]
    queue: dict[str, QueueStatus]
    requests: StatusCounts
    hit_rate: float | None
    dropped_events: int
    findings: list[StatusFinding]
