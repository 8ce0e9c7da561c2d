"""Does TensorBoard read what is written, with the very numbers of the ticks?"""

import math
import struct
from pathlib import Path

import pytest

from penstock.kernel.errors import ConfigError
from penstock_extras.telemetry.tensorboard_log import TensorBoardLog, crc32c, masked, scalars_of
from tests.lab.report.planner_runs import tick, wave


def records(path: Path) -> list[bytes]:
    """Read the frames of a file, checking lengths and sums: the twin of the writer."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        body, data = data[12 : 12 + length], data[12 + length :]
        assert len(body) == length and struct.unpack("<I", data[:4])[0] == masked(body)
        found.append(body)
        data = data[4:]
    return found


def test_the_checksum_is_that_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert crc32c(bytes([0xFF] * 32)) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_every_tick_is_a_record_of_its_own(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path / "made" / "here", clock=lambda: 1_700_000_000.25)
    ticks = wave(20, lambda n: 10.0 + n)
    for each in ticks:
        log.ticked(each)
    found = records(log.path)
    assert len(found) == 21 and b"brain.Event:2" in found[0]
    assert struct.unpack("<d", found[3][1:9])[0] == 1_700_000_000.25
    log.close()


def test_what_is_not_known_has_no_value() -> None:
    unknown = tick(1, 5.0, 2, model={"rate": None, "judged": 0, "in_slo": 0, "queued": None, "health": "broken"})
    found = scalars_of(unknown)
    assert not {"rate/m", "attainment/m", "queued/m", "ttft/m", "predicted/m/rate"} & set(found)
    assert (found["source_fresh/m"], found["target/decode"]) == (0.0, 2.0)
    assert all(math.isfinite(value) for value in found.values())


def test_a_folder_that_can_not_be_made_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"planner\.tensorboard: .* can't be written"):
        TensorBoardLog(tmp_path / "file" / "below")


def test_tensorboard_itself_reads_it(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = TensorBoardLog(tmp_path)
    ticks = wave(50, lambda n: 10 + 5 * math.sin(n / 5))
    for each in ticks:
        log.ticked(each)
    log.close()
    read = accumulator.EventAccumulator(str(tmp_path), size_guidance={accumulator.TENSORS: 0})
    read.Reload()
    assert set(read.Tags()["scalars"]) >= {"planner/gpus", "target/decode", "predicted/m/rate", "attainment/m"}
    for name in ("rate/m", "target/decode", "predicted/m/rate"):
        events = read.Scalars(name)
        assert [event.step for event in events] == [each.tick for each in ticks]
        assert [event.value for event in events] == pytest.approx([scalars_of(each)[name] for each in ticks])
