"""End report: what a gateway logs of a request that it carried, as one line of syslog.

Both gateways send ``penstock: BY|ID|STATUS|HOW|FIRST|WHOLE|ENDPOINT``; the rendered configs have the formats.
"""

from typing import NamedTuple

from penstock_kubernetes.picker_settings import GatewayKind

MARK, ERROR_MARK = b"penstock: ", b"penstock_error: "
"""What stands before a report, and before a line of nginx's error log, after a syslog header that says nothing more."""
FIELDS = 7
ENGINE_FAILED = (b"upstream ", b"recv() failed", b"SSL_read() failed")
"""How nginx's errors of an engine begin that it files under sending: head, tokens and break came at once."""
BROKEN_MAX = 4096
"""Most connections whose engine broke off that wait for their report."""


class EndReport(NamedTuple):
    """How a carried request ended.

    Args:
        by: name of the process that chose its worker.
        outcome: what ended it: ``whole`` the answer's end, ``client`` or ``engine`` what went away before.
        status: of the answer; 0 where there was none.
        tail: seconds from the answer's head to its end; None where no head came.
        endpoint: ``host:port`` that was asked last; empty where none was.
    """

    by: str
    id: str
    outcome: str
    status: int
    tail: float | None
    endpoint: str


class ReportReader:
    """Reads the reports of one kind of gateway.

    nginx says of a stream that its engine broke off that it is complete. Only its error log knows better, by the number
    of the client's connection; so that log comes here as well, before the request's report.
    """

    def __init__(self, kind: GatewayKind) -> None:
        self._nginx = kind == "nginx"
        self._broken: set[bytes] = set()
        """Connections on which the engine of the running request broke off."""

    def read(self, line: bytes) -> EndReport | None:
        """Return the report in a datagram; None for a line of the error log.

        Raises:
            ValueError: it is neither.
        """
        if self._nginx and ERROR_MARK in line:
            self._note_error(line)
            return None
        _, mark, text = line.partition(MARK)
        fields = text.strip().split(b"|")
        if not mark or len(fields) != FIELDS:
            raise ValueError("not a report of a gateway")
        by, id, status, how, first, whole, endpoint = fields
        if self._nginx:
            outcome, tail, endpoint = self._of_nginx(how), _seconds_between(_last(first), _last(whole)), _last(endpoint)
        else:
            outcome = "whole" if how[:2] == b"--" else "client" if how[:1] in b"Cc" else "engine"
            tail = None if int(first) < 0 else max(0, int(whole)) / 1e3
        return EndReport(by.decode(), id.decode(), outcome, max(0, int(status)), tail, endpoint.decode())

    def _of_nginx(self, how: bytes) -> str:
        """Return the outcome; ``how``: whether the answer is complete, and the connection's number."""
        complete, _, connection = how.partition(b" ")
        if connection in self._broken:
            self._broken.discard(connection)
            return "engine"
        return "whole" if complete == b"OK" else "client"

    def _note_error(self, line: bytes) -> None:
        # What broke off before the answer's head is asked again elsewhere, and ends otherwise.
        connection, _, text = line.partition(b": *")[2].partition(b" ")
        sending = b" while sending to client" in text and text.startswith(ENGINE_FAILED)
        if (sending or b" while reading upstream" in text) and len(self._broken) < BROKEN_MAX:
            self._broken.add(connection)


def _last(value: bytes) -> bytes:
    """Return what nginx says of the server that it asked last."""
    return value.rpartition(b" : ")[2].rpartition(b", ")[2]


def _seconds_between(first: bytes, whole: bytes) -> float | None:
    return None if b"-" in (first, whole) else max(0.0, float(whole) - float(first))
