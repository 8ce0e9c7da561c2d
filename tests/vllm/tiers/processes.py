"""How do the tests start, kill and damage the tier process of a server?"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.live.cluster import until

HOST, DISK = 64 << 20, 64 << 20
"""Bytes: room for 500 blocks of the tiny model, each."""
SMALL_HOST = 16 << 20
"""Bytes: room for 128 blocks, four prompts' of five. A quarter may be on its way, which is one prompt's."""

STOP_LIMIT = 3.0


class TierProcess:
    """A tier process at one socket; it may be killed and started again with other settings."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "s"
        self.disk = folder / "disk"
        self.disk.mkdir()
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, host: int = HOST, disk: int = 0, fault: str = "none", **settings: Any) -> None:
        """Start it, after ending the one that runs."""
        self.stop()
        config = {"host": host, "disk": disk, "disk_dirs": [str(self.disk)] if disk else [], **settings}
        child = Path(__file__).with_name("tier_child.py")
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(child), str(self.socket), json.dumps(config), fault], stdout=out, stderr=out
            )
        until(lambda: self.socket.exists() or self._ended(), 30.0, self._log.read_text)
        assert not self._ended(), self._log.read_text()

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Tell it to end."""
        self._end(signal.SIGTERM)

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _end(self, sign: int) -> None:
        if self._process is not None:
            self._process.send_signal(sign)
            try:
                self._process.wait(STOP_LIMIT)
            except subprocess.TimeoutExpired:  # it hangs in a read of its slow disk
                self._process.kill()
                self._process.wait()
            self._process = None
        self.socket.unlink(missing_ok=True)
