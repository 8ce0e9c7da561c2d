"""Logs of every process: lines of key=value for people, or one JSON object per line for machines.

Fields come with a record as ``extra={"fields": {...}}``; a field's value is never interpreted.
"""

import atexit
import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TextIO

_PLAIN = re.compile(r"[^\s\"=]+\Z")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


LINES_MAX = 4096
"""Most lines that a `BatchingHandler` holds before it writes by itself."""


def setup(
    format: Literal["text", "json"] = "text", level: str = "info", stream: TextIO | None = None, batch: bool = False
) -> "BatchingHandler":
    """Send the logs of this process to ``stream`` (standard error where None), in one of the two forms.

    Args:
        batch: hold lines below warning until `BatchingHandler.flush` is called, which the caller does often.
    """
    handler = BatchingHandler(sys.stderr if stream is None else stream, batch)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.addFilter(_quiet_client_faults)
    logging.getLogger().handlers[:] = [handler]
    set_level(level)
    return handler


def set_level(level: str) -> None:
    """Write records of this severity and above from now on."""
    logging.getLogger().setLevel(_LEVELS[level])
    for chatty in ("asyncio", "aiohttp.access", "opentelemetry", "urllib3", "httpx2"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, _LEVELS[level]))


class HeldLine(NamedTuple):
    """A line of the log that has not been made yet; ``created``: seconds of the epoch."""

    created: float
    level: str
    logger: str
    message: str
    fields: Mapping[str, Any]


class BatchingHandler(logging.Handler):
    """Writes many lines with one system call, off the request: a line for each would be a tenth of a short one's cost.

    Warnings and worse are written at once, with all that came before them. Unwritable lines are lost and counted.
    """

    def __init__(self, stream: TextIO, batch: bool) -> None:
        super().__init__()
        self.lost = 0
        self._stream = stream
        self._batch = batch
        self._lines: list[str | HeldLine] = []
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - logging must never end what it reports on
            self.handleError(record)
            return
        self._lines.append(line)
        if not self._batch or record.levelno >= logging.WARNING or len(self._lines) > LINES_MAX:
            self.flush()

    def log_line(self, level: str, logger: str, message: str, fields: Mapping[str, Any]) -> None:
        """Take a line that is no `logging.LogRecord`, which would cost as much as routing a short request.

        ``fields`` must not change any more: the line is made of them when it is written.
        """
        self._lines.append(HeldLine(time.time(), level, logger, message, fields))
        if not self._batch or len(self._lines) > LINES_MAX:
            self.flush()

    def flush(self) -> None:
        """Write the held lines."""
        self.acquire()
        lines = self._lines[:]
        del self._lines[: len(lines)]  # the list stays: other threads append to it without a lock
        try:
            if lines:
                self._stream.write(
                    "".join([f"{line if isinstance(line, str) else self._line(line)}\n" for line in lines])
                )
                self._stream.flush()
        except (OSError, ValueError):  # a full disk, or a stream that is closed already
            self.lost += len(lines)
        finally:
            self.release()

    def _line(self, line: HeldLine) -> str:
        formatter = self.formatter
        assert isinstance(formatter, LineFormatter)
        return formatter.line(*line)


class LineFormatter(logging.Formatter):
    """Makes a line of a record or of its parts; fields that are None are left out."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _record_fields(record)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return self.line(record.created, record.levelname.lower(), record.name, record.getMessage(), fields)

    def line(self, created: float, level: str, logger: str, message: str, fields: Mapping[str, Any]) -> str:
        """Write one line; ``created``: seconds of the epoch."""
        raise NotImplementedError


class TextFormatter(LineFormatter):
    """``2026-01-31T12:00:00.123Z info penstock.access "POST /v1/..." request=... status=200``"""

    def line(self, created: float, level: str, logger: str, message: str, fields: Mapping[str, Any]) -> str:
        parts = [_utc(created), " ", level, " ", logger, " ", message]
        for key, value in fields.items():
            if value is not None:
                parts += (" ", key, "=", _quoted_value(value))
        return "".join(parts)


class JsonFormatter(LineFormatter):
    """One object per line: time, level, logger, message, then the fields."""

    def line(self, created: float, level: str, logger: str, message: str, fields: Mapping[str, Any]) -> str:
        out: dict[str, Any] = {"time": _utc(created), "level": level, "logger": logger, "message": message}
        for key, value in fields.items():
            if value is not None:
                out.setdefault(key, value)
        return json.dumps(out, ensure_ascii=False, default=str)


def direct() -> BatchingHandler | None:
    """Return this process's handler where it is the only one, so that a line may be given to it without a record."""
    handlers = logging.root.handlers
    handler = handlers[0] if len(handlers) == 1 else None
    return handler if type(handler) is BatchingHandler else None


def _record_fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", None)
    return {k: v for k, v in fields.items() if v is not None} if isinstance(fields, dict) else {}


def _quoted_value(value: Any) -> str:
    kind = type(value)
    if kind is str:
        # One record is one line, whatever a client put into its id.
        if value.isalnum() or (_PLAIN.match(value) and value.isprintable()):
            return str(value)
        return json.dumps(value, ensure_ascii=True)
    if kind is int:
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if _PLAIN.match(text) and text.isprintable() else json.dumps(text, ensure_ascii=True)


_second = (0, "")
"""The last whole second and its text: most lines share theirs with the one before."""


def _utc(created: float) -> str:
    global _second
    whole = int(created)
    known, text = _second
    if known != whole:
        text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
        _second = (whole, text)
    return f"{text}.{int(created % 1 * 1000):03d}Z"


def _quiet_client_faults(record: logging.LogRecord) -> bool:
    """Turn the HTTP library's traceback over a malformed request into one line: it is the client's fault, not ours."""
    if record.name == "aiohttp.server" and record.exc_info is not None:
        error = record.exc_info[1]
        if type(error).__module__.startswith("aiohttp.http_exceptions"):
            record.msg, record.args = f"refused a malformed request: {str(error).splitlines()[0]}", ()
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.exc_info = record.exc_text = None
    return True
