"""How do logs look? Lines of key=value for people, or one JSON object per line for machines; for every process.

Fields come with a record as ``extra={"fields": {...}}``; what a field's value says is never interpreted.
"""

import atexit
import json
import logging
import re
import sys
import time
from typing import Any, Literal, TextIO

_PLAIN = re.compile(r"[^\s\"=]+\Z")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


BATCH_MAX = 65_536
"""Most characters that a `BatchingHandler` holds before it writes by itself."""


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
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    for chatty in ("asyncio", "aiohttp.access", "opentelemetry", "urllib3"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, _LEVELS[level]))
    return handler


class BatchingHandler(logging.Handler):
    """Writes many lines with one system call: a line per request would be a tenth of a short request's cost.

    Warnings and worse are written at once, with all that came before them. What can't be written is lost and counted.
    """

    def __init__(self, stream: TextIO, batch: bool) -> None:
        super().__init__()
        self.lost = 0
        self._stream = stream
        self._batch = batch
        self._lines: list[str] = []
        self._size = 0
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - logging must never end what it reports on
            self.handleError(record)
            return
        self._lines.append(line + "\n")
        self._size += len(line)
        if not self._batch or record.levelno >= logging.WARNING or self._size > BATCH_MAX:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        self.acquire()
        try:
            lines, self._lines, self._size = self._lines, [], 0
            if lines:
                self._stream.write("".join(lines))
                self._stream.flush()
        except (OSError, ValueError):  # a full disk, or a stream that is closed already
            self.lost += len(lines)
        finally:
            self.release()


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z info penstock.access "POST /v1/..." request=... status=200``"""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_utc(record.created)} {record.levelname.lower()} {record.name} {record.getMessage()}"
        fields = _fields(record)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return head + "".join(f" {key}={_quoted(value)}" for key, value in fields.items())


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        out: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in _fields(record).items():
            out.setdefault(key, value)
        if record.exc_info:
            out["exception"] = self.formatException(record.exc_info)
        return json.dumps(out, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found = getattr(record, "fields", None)
    return {k: v for k, v in found.items() if v is not None} if isinstance(found, dict) else {}


def _quoted(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    # One record is one line, whatever a client put into its id.
    return text if _PLAIN.match(text) and text.isprintable() else json.dumps(text, ensure_ascii=True)


def _utc(created: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created)) + f".{int(created % 1 * 1000):03d}Z"


def _quiet_client_faults(record: logging.LogRecord) -> bool:
    """Turn the HTTP library's traceback over a malformed request into one line: it is the client's fault, not ours."""
    if record.name == "aiohttp.server" and record.exc_info is not None:
        error = record.exc_info[1]
        if type(error).__module__.startswith("aiohttp.http_exceptions"):
            record.msg, record.args = f"refused a malformed request: {str(error).splitlines()[0]}", ()
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.exc_info = record.exc_text = None
    return True
