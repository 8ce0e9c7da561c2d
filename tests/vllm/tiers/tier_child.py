"""A tier process for tests, which can have a slow or a full disk.

usage: python tier_child.py SOCKET SETTINGS FAULT      SETTINGS: JSON of CacheSettings; FAULT: none, slow, full or dear
"""

import asyncio
import errno
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from penstock.kernel.pass_report import PassReport
from penstock_kv.cache_settings import CacheSettings
from penstock_kv.tiers.measured_prefill import MeasuredPrefill
from penstock_kv.tiers.tier_process import run_tiers
from penstock_kv.transfer.storage.record_header import SECTOR
from penstock_kv.transfer.storage.slab_file import FileCalls

SLOW = 10.0
"""Seconds of each read of a block."""
DEAR = 1_000
"""How many times as long as they took the engine's passes count: the tiny model computes faster than a busy machine
copies, so that loading never pays."""


def main(path: str, settings: str, fault: str) -> int:
    """Serve until it is told to end."""
    if fault == "slow":
        read = FileCalls.preadv

        def slowly(self: FileCalls, fd: int, buffers: Any, offset: int) -> int:
            if sum(map(len, buffers)) > SECTOR:  # not the headers, which are read at start
                time.sleep(SLOW)
            return read(self, fd, buffers, offset)

        FileCalls.preadv = slowly  # type: ignore[method-assign]
    if fault == "full":
        write = FileCalls.pwritev

        def full(self: FileCalls, fd: int, buffers: Any, offset: int) -> int:
            if sum(map(len, buffers)) > SECTOR:  # not the file's own header
                raise OSError(errno.ENOSPC, "no space left on device")
            return write(self, fd, buffers, offset)

        FileCalls.pwritev = full  # type: ignore[method-assign]
    if fault == "dear":
        heard = MeasuredPrefill.heard

        def dearly(self: MeasuredPrefill, report: PassReport) -> None:
            heard(self, msgspec.structs.replace(report, wall=DEAR * report.wall))

        MeasuredPrefill.heard = dearly  # type: ignore[method-assign]
    return asyncio.run(run_tiers(CacheSettings(**json.loads(settings)), Path(path)))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
