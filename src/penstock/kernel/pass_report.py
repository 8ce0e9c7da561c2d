"""`PassReport`: the message about one forward pass that `penstock.inside` sends from an engine to the adapters."""

import msgspec

STATS_ENV = "PENSTOCK_STATS_ENDPOINT"
"""Environment name that switches the statistics plug-in on: the ZMQ endpoint that it binds."""
VERSION = 1


class PassReport(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass, as the engine's scheduler reports it. What the engine does not report is None.

    Units: ``wall`` seconds; tokens; requests. ``number`` counts by one per process and shows what was lost.
    """

    version: int = VERSION
    rank: int
    number: int
    wall: float
    prefill_requests: int
    prefill_tokens: int
    decode_seqs: int
    decode_tokens: int
    """More than ``decode_seqs`` where the engine speculates."""
    waiting: int | None = None
    running: int | None = None
    kv_usage: float | None = None
    preemptions: int | None = None
