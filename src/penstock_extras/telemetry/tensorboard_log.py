"""TensorBoard log of a planner's ticks: writes event files without TensorFlow's libraries.

A record of such a file: length (8 bytes, little endian), masked CRC-32C of these, an ``Event`` as protobuf, masked
CRC-32C of that. An ``Event`` here holds only wall time, step and simple values, so its few fields are written by hand.
Source: the record format of TensorFlow's ``tf.data.TFRecordDataset``, and event.proto and summary.proto beside it.
"""

import logging
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.config.settings.planning_settings import PlanningSettings
from penstock.kernel.errors import ConfigError, write_hint
from penstock.planner.tick_record import TickRecord

log = logging.getLogger("penstock.planner.tensorboard")

VERSION = "brain.Event:2"
_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8


def tensorboard_log(settings: PlanningSettings, run: Path | None) -> "TensorBoardLog | None":
    """Return the log that the settings ask for: an entry of the seam ``tick listener``."""
    return None if settings.tensorboard is None else TensorBoardLog(settings.tensorboard)


class TensorBoardLog:
    """One event file in a folder; `ticked` adds a tick. A disk that is full is logged once and costs only the log.

    Args:
        clock: seconds since 1970.
    Raises:
        ConfigError: the folder can't be written.
    """

    def __init__(self, folder: Path | str, clock: Any = time.time) -> None:
        self._clock = clock
        self.failing: str | None = None
        name = f"events.out.tfevents.{int(clock()):010d}.{socket.gethostname()}.{os.getpid()}.0.penstock"
        self.path = Path(folder) / name
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self._file.write(record_of(first_event(clock())))
        except OSError as error:
            raise ConfigError(
                f"planner.tensorboard: {self.path} can't be written: {error.strerror}",
                hint=write_hint(error, "set it to another folder"),
            ) from error

    def ticked(self, record: TickRecord, _: object = None) -> None:
        """Add the scalars of a tick."""
        data = record_of(event(self._clock(), record.tick, scalars_of(record)))
        try:
            self._file.write(data)
        except OSError as error:
            if self.failing is None:
                log.warning("%s can't be written: %s", self.path, error)
            self.failing = str(error)

    async def close(self) -> None:
        """End the log."""
        self._file.close()


def scalars_of(record: TickRecord) -> dict[str, float]:
    """Return the scalars of a tick: name -> value. Unknown values are absent."""
    scalars: dict[str, float | None] = {"planner/gpus": record.gpus, "planner/late_seconds": record.late}
    for name, pool in record.pools.items():
        for value in ("target", "ready", "starting", "draining", "failed", "given_up"):
            scalars[f"{value}/{name}"] = getattr(pool, value)
    for name, model in record.models.items():
        for value in ("rate", "ttft", "itl", "queued"):
            scalars[f"{value}/{name}"] = getattr(model, value)
        for value in ("isl", "osl", "hit_rate"):
            scalars[f"{value}/{name}"] = getattr(model.shape, value)
        scalars[f"attainment/{name}"] = model.in_slo / model.judged if model.judged else None
        scalars[f"source_fresh/{name}"] = float(model.health == "fresh")
        scalars |= {f"predicted/{name}/{each}": value for each, value in _predicted(model.predicted).items()}
    return {name: float(value) for name, value in scalars.items() if value is not None}


def _predicted(predicted: Mapping[str, Any]) -> dict[str, float | None]:
    seconds, requests, shape = predicted.get("seconds"), predicted.get("requests"), predicted.get("shape", {})
    rate = requests / seconds if seconds and requests is not None else None
    return {"rate": rate, "isl": shape.get("isl"), "osl": shape.get("osl")}


def first_event(wall: float) -> bytes:
    """Return the ``Event`` that every file begins with."""
    return _double(1, wall) + _bytes_field(3, VERSION.encode())


def event(wall: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """Return an ``Event`` with simple values (fields of event.proto: 1 wall_time, 2 step, 5 summary)."""
    summary = b"".join(
        # summary.proto: Summary.value = 1; Value.tag = 1, Value.simple_value = 2
        _bytes_field(1, _bytes_field(1, tag.encode()) + _field_key(2, 5) + struct.pack("<f", value))
        for tag, value in scalars.items()
    )
    return _double(1, wall) + _field_key(2, 0) + _encode_varint(step) + _bytes_field(5, summary)


def record_of(data: bytes) -> bytes:
    """Return data framed as a record."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data))


def masked(data: bytes) -> int:
    """Return the masked CRC-32C: rotated and shifted, since a checksum of data that holds checksums is a weak one."""
    checksum = crc32c(data)
    return (((checksum >> 15) | (checksum << 17)) + _MASK) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Return the Castagnoli checksum (RFC 3720, appendix B.4)."""
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _TABLE[(checksum ^ byte) & 0xFF] ^ (checksum >> 8)
    return checksum ^ 0xFFFFFFFF


def _crc_table() -> Iterable[int]:
    for byte in range(256):
        entry = byte
        for _ in range(8):
            entry = (entry >> 1) ^ (_POLYNOMIAL if entry & 1 else 0)
        yield entry


_TABLE = tuple(_crc_table())


def _field_key(field: int, kind: int) -> bytes:
    return _encode_varint(field << 3 | kind)


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _double(field: int, value: float) -> bytes:
    return _field_key(field, 1) + struct.pack("<d", value)


def _bytes_field(field: int, data: bytes) -> bytes:
    return _field_key(field, 2) + _encode_varint(len(data)) + data
