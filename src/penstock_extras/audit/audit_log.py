"""Audit log of a frontend process: a bounded buffer of entries, written off the event loop into bounded files."""

import logging
import threading
import time
from collections import deque
from pathlib import Path

from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.config.settings.tenant_settings import AuditSettings
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.kernel.errors import OverloadedError
from penstock_extras.audit.audit_entry import AuditEntry
from penstock_extras.audit.audit_frames import SUFFIX, AuditFile, read_key
from penstock_extras.audit.audited_answer import RecordedAnswer

log = logging.getLogger("penstock.frontend")

BUFFER_MAX = 64 << 20
"""Bytes of entries that wait to be written: what a disk that hangs for seconds makes, at some 10 MB/s of text."""
FILE_MAX = 64 << 20
"""Bytes of a file, after which the next one begins: a fault in one leaves the others readable."""
RETRY_AFTER = 5.0
"""Seconds that a refused client is told to wait."""


class AuditLog:
    """The log of one process (`penstock.frontend.record_writer.BackgroundWriter`).

    Args:
        process: name of this one; in the names of its files.
        key: of the log, 32 bytes.
    """

    def __init__(self, settings: AuditSettings, process: str, key: bytes) -> None:
        assert settings.folder is not None
        self.settings = settings
        self.folder = Path(settings.folder).expanduser()
        self.lost = 0
        """Entries that the log lacks, since it could not be written."""
        self.written = 0
        self.failure = ""
        """Why the last write failed; empty where it did not."""
        self._key = key
        self._prefix = f"{process}-{time.time_ns()}"
        self._buffer: deque[AuditEntry] = deque()
        self._buffered = 0
        self._lock = threading.Lock()
        self._file: AuditFile | None = None
        self._number = 0

    def wants(self, tenant: str | None, model: str) -> bool:
        """Return whether requests of a tenant for a model are in it."""
        settings = self.settings
        return (not settings.tenants or tenant in settings.tenants) and (
            not settings.models or model in settings.models
        )

    def check(self) -> None:
        """Refuse a request that could not be written down, where that is the policy.

        Raises:
            OverloadedError: 503.
        """
        if self.settings.on_failure == "refuse" and (self.failure or self._buffered >= BUFFER_MAX):
            text = f"the audit log can't be written: {self.failure or 'its buffer is full'}"
            raise OverloadedError(text, retry_after=RETRY_AFTER, code="audit_unavailable")

    def filter_of(self, caller: HttpExchange) -> RecordedAnswer:
        """Return what remembers a request's answer, to be written down when it is over."""
        return RecordedAnswer(caller, self.add)

    def add(self, entry: AuditEntry) -> None:
        """Take an entry; where the buffer is full it is lost and counted."""
        size = len(entry.prompt) + len(entry.answer)
        with self._lock:
            if self._buffered + size > BUFFER_MAX and self._buffer:
                self.lost += 1
                return
            self._buffer.append(entry)
            self._buffered += size

    def flush(self) -> None:
        """Write what waits; blocks. What can't be written waits on, and is tried again the next time."""
        try:
            while self._buffer:
                entry = self._buffer[0]
                self._open().write(entry)
                with self._lock:
                    self._buffer.popleft()
                    self._buffered -= len(entry.prompt) + len(entry.answer)
                self.written += 1
            if self._file is not None:
                self._file.sync()
        except OSError as error:
            if not self.failure:
                log.error("the audit log in %s can't be written: %s", self.folder, error)
            self.failure = error.strerror or str(error)
            return
        if self.failure:
            log.warning("the audit log in %s is written again", self.folder)
        self.failure = ""

    def close(self) -> None:
        """Write what waits and end the file; blocks."""
        self.flush()
        if self._file is not None:
            try:
                self._file.close(whole=not self._buffer)
            except OSError as error:
                log.error("the end of the audit log in %s can't be written: %s", self.folder, error)
            self._file = None
        self.lost += len(self._buffer)
        self._buffer.clear()

    def _open(self) -> AuditFile:
        if self._file is not None and self._file.size >= FILE_MAX:
            self._file.close()
            self._file = None
        if self._file is None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.folder / f"{self._prefix}-{self._number:06d}{SUFFIX}"
            self._file = AuditFile(path, self._key, self._number)
            self._number += 1
        return self._file


def open_log(settings: ClusterSettings, process: str) -> AuditLog | None:
    """Return the log of prompts and answers, where the settings want one.

    Args:
        process: name of this one.
    Raises:
        ConfigError: its key can't be read, or the package for it is missing.
    """
    if settings.audit.folder is None or settings.audit.key_file is None:
        return None
    return AuditLog(settings.audit, process, read_key(Path(settings.audit.key_file).expanduser()))
