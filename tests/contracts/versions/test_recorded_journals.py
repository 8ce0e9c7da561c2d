"""Recorded journals of a live run come to the same effects, and one of another version is refused by name."""

from pathlib import Path

import msgspec
import pytest

from penstock.kernel.errors import ConfigError
from penstock.kernel.journal_frames import Frames, frame, packed, read_header
from penstock_lab.report.journal_replay import replay

JOURNALS = Path(__file__).parent / "data/journals"


@pytest.mark.parametrize(("machine", "decisions"), [("frontend-0", 12), ("fleet", 0)])
def test_a_journal_is_repeated_effect_by_effect(machine: str, decisions: int) -> None:
    replayed = replay(JOURNALS / f"{machine}.journal", [])
    assert (replayed.problems, replayed.unread, replayed.mismatch) == ([], [], None)
    assert replayed.records >= 8 and replayed.decisions == decisions


@pytest.mark.parametrize("machine", ["frontend-0", "fleet"])
def test_a_journal_of_another_version_is_refused(machine: str, tmp_path: Path) -> None:
    header, *records = Frames((JOURNALS / f"{machine}.journal").read_bytes())
    whole = read_header(header)
    earlier = {**whole.snapshot, "version": whole.snapshot["version"] - 1}
    header = packed(msgspec.structs.replace(whole, snapshot=earlier))
    (tmp_path / "000000").write_bytes(b"".join(map(frame, [header, *records])))
    with pytest.raises(ConfigError, match="read it with the release that wrote it"):
        replay(tmp_path, [])
