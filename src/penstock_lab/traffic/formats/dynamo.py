"""Reads Dynamo request traces: JSON lines of ``dynamo.request.trace.v1`` -> `TrafficRequest`s.

A ``request_end`` row has, under ``request``, ``request_received_ms`` (Unix time), ``output_tokens`` and ``replay`` with
``trace_block_size``, ``input_length`` and ``input_sequence_hashes``; a row of an agent has ``agent_context.session_id``
as well. Rows of other events (payloads, tools) are passed over, and a row may stand in a sink's envelope under
``event``. Think time is what lay between an answer and the session's next request, tools included.
Source: NVIDIA Dynamo's request trace reference, schema version 1.
"""

from typing import Any, ClassVar

from penstock.kernel.values import JsonObject
from penstock_lab.traffic.formats.time_units import TimeUnit
from penstock_lab.traffic.formats.timed_rows import TimedRow, TimedRows
from penstock_lab.traffic.formats.trace_rows import RowProblem, hashes_of, number_of, object_of, tokens_of
from penstock_lab.traffic.traffic_request import TrafficRequest

SCHEMA = "dynamo.request.trace.v1"
OTHER_EVENTS = ("request_payload", "tool_start", "tool_end", "tool_error")


class DynamoTrace(TimedRows):
    """Iterate over the requests of a trace, in order of arrival; ``at`` counts from the first of them."""

    format = "dynamo"
    unit: TimeUnit | None = "ms"
    window: ClassVar[int | None] = None

    @staticmethod
    def recognises(line: str | bytes) -> bool:
        """Tell whether a line of a file looks like a row of this format."""
        try:
            row = _event_of(object_of(line))
        except RowProblem:
            return False
        return row.get("schema") == SCHEMA

    def _arrival(self, item: Any) -> TimedRow | None:
        row = _event_of(object_of(item))
        event = row.get("event_type")
        if event in OTHER_EVENTS:
            return None
        if row.get("schema") != SCHEMA:
            raise RowProblem("schema", row.get("schema"), f"{SCHEMA} is needed")
        if event != "request_end":
            raise RowProblem("event_type", event, f"request_end or one of {', '.join(OTHER_EVENTS)} is needed")
        request = _object_part(row, "request")
        replay = _object_part(request, "replay")
        received = number_of("request_received_ms", request.get("request_received_ms"), "milliseconds")
        isl = tokens_of("input_length", replay.get("input_length"))
        osl = tokens_of("output_tokens", request.get("output_tokens"), least=0)
        size = tokens_of("trace_block_size", replay.get("trace_block_size"))
        ids = hashes_of("input_sequence_hashes", replay.get("input_sequence_hashes"), -(-isl // size), size, isl)
        session = _session_of(row)
        ended = _end_of(row, request, received)
        if osl == 0:
            self.unanswered += 1
            return None
        arrived = TrafficRequest(at=0.0, isl=isl, osl=osl, hash_ids=ids, block_size=size, session=session)
        return TimedRow(at=received, end=ended, request=arrived)


def _event_of(row: JsonObject) -> JsonObject:
    inner = row.get("event")
    return inner if isinstance(inner, dict) else row


def _object_part(row: JsonObject, name: str) -> JsonObject:
    part = row.get(name)
    if not isinstance(part, dict):
        raise RowProblem(name, part, "a JSON object is needed")
    return part


def _session_of(row: JsonObject) -> str | None:
    if row.get("agent_context") is None:
        return None
    session = _object_part(row, "agent_context").get("session_id")
    if not isinstance(session, str) or not session:
        raise RowProblem("session_id", session, "a session's name is needed")
    return session


def _end_of(row: JsonObject, request: JsonObject, received: float) -> float | None:
    """Return when the answer was there, in Unix milliseconds."""
    if request.get("total_time_ms") is not None:
        return received + number_of("total_time_ms", request["total_time_ms"], "milliseconds")
    if row.get("event_time_unix_ms") is not None:
        return number_of("event_time_unix_ms", row["event_time_unix_ms"], "milliseconds")
    return None
