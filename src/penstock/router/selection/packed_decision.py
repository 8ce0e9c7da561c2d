"""Packed decisions: what a run folder has of those that are written whole, and what makes decisions of it again."""

import base64
import zlib
from typing import Any

import msgspec

from penstock.kernel.values import Target, plain
from penstock.router.events import Cost, Decision, Excluded

_TABLE, _NO_TABLE = b'"table":"', b'"table":""'

_encode = msgspec.json.Encoder(enc_hook=plain).encode
_decode = msgspec.json.Decoder(Decision).decode
_columns = msgspec.json.Decoder(dict[str, list[Any]]).decode


def whole(line: bytes) -> bytes:
    """Return a line of ``decisions.jsonl`` with all candidates and exclusions that it was written with."""
    return _encode(restored(_decode(line))) if _TABLE in line and _NO_TABLE not in line else line


def restored(decision: Decision) -> Decision:
    """Return a decision with what its table holds; as it is where it was written without one."""
    if not decision.table:
        return decision
    rows = _columns(zlib.decompress(base64.b85decode(decision.table)))
    excluded = [Excluded(target=msgspec.convert(target, Target), reason=why) for target, why in rows.pop("excluded")]
    fields = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    return msgspec.structs.replace(
        decision, candidates=msgspec.convert(fields, list[Cost]), excluded=excluded, left_out=0, table=""
    )


def packed(decision: Decision) -> str:
    """Return all candidates and exclusions of a decision as text that JSON need not escape."""
    rows = list(decision.candidates)
    names = [name for name in Cost.__struct_fields__ if not rows or getattr(rows[0], name) is not msgspec.UNSET]
    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in names}
    columns["excluded"] = [(one.target, one.reason) for one in decision.excluded]
    return base64.b85encode(zlib.compress(_encode(columns))).decode()  # its alphabet needs no escapes in JSON
