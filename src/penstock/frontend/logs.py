"""How do logs look? Lines of key=value for people, or one JSON object per line for machines; for every process.

Fields come with a record as ``extra={"fields": {...}}``; what a field's value says is never interpreted.
"""

import json
import logging
import re
import sys
import time
from typing import Any, Literal, TextIO

_PLAIN = re.compile(r"[^\s\"=]+\Z")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def setup(format: Literal["text", "json"] = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Send the logs of this process to ``stream`` (standard error where None), in one of the two forms."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.addFilter(_quiet_client_faults)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    for chatty in ("asyncio", "aiohttp.access", "opentelemetry", "urllib3"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, _LEVELS[level]))


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
