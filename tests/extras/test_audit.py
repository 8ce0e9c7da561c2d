"""Does the audit log hold every prompt and answer, encrypted, and is it noticed where something is missing?"""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.config.settings.tenant_settings import AuditSettings
from penstock.kernel.errors import ConfigError, OverloadedError
from penstock_extras.audit import audit_log
from penstock_extras.audit.audit_entry import AuditEntry
from penstock_extras.audit.audit_frames import AuditFault, AuditFile, frames, read_key
from penstock_extras.audit.audit_log import AuditLog
from penstock_extras.cli.audit import command
from tests.frontend.stand import stand

KEY = bytes(range(32))


def entry(number: int, **changes: Any) -> AuditEntry:
    fields: dict[str, Any] = {
        "id": f"r{number}",
        "at": 1.0,
        "tenant": "acme",
        "key": "acme/key-1",
        "model": "m",
        "endpoint": "chat_completions",
        "outcome": "ok",
        "status": 200,
        "prompt": b"secret question",
        "answer": b"secret answer",
    }
    return AuditEntry(**{**fields, **changes})


def log_in(folder: Path, **settings: Any) -> AuditLog:
    return AuditLog(AuditSettings(folder=str(folder), key_file="k", **settings), "frontend-0", KEY)


def written(path: Path, count: int = 3) -> tuple[Path, list[bytes]]:
    """Write a file; return it and its parts: the head, then each frame, then the end."""
    file = AuditFile(path, KEY, 0)
    marks = [0, file.size]
    for number in range(count):
        file.write(entry(number))
        marks.append(file.size)
    file.close()
    data = path.read_bytes()
    return path, [data[start:end] for start, end in zip(marks, [*marks[1:], None])]


def written_in(folder: Path) -> tuple[Path, bytes]:
    """Return the one file of a log, which only this user may read, with its bytes."""
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o077 == 0
    return path, path.read_bytes()


async def test_prompts_and_answers_are_written_for_those_who_are_audited(tmp_path: Path) -> None:
    async with stand() as s:
        s.service.audit = log_in(tmp_path)
        assert (await s.chat("what is a penstock?")).status == 200
        streamed = await s.chat("and streamed?", stream=True)
        body = await streamed.read()
        assert (await s.chat(model="unknown")).status == 404
        s.service.audit.settings = AuditSettings(folder=str(tmp_path), models=("another",))
        await s.chat("not audited")
        s.service.audit.close()
    path, data = written_in(tmp_path)
    assert b"penstock?" not in data
    one, two = frames(path, KEY)
    assert b"what is a penstock?" in one.prompt and b"xxxxx" in one.answer and (one.outcome, one.status) == ("ok", 200)
    assert b"and streamed?" in two.prompt and two.answer == body


def test_cut_changed_reordered_doubled_and_moved_frames_are_noticed(tmp_path: Path) -> None:
    path, (head, one, two, three, end) = written(tmp_path / "a.audit")
    assert [each.id for each in frames(path, KEY)] == ["r0", "r1", "r2"]
    _, (other_head, other, *_) = written(tmp_path / "b.audit")
    flipped = two[:-1] + bytes([two[-1] ^ 1])
    for name, parts, whole in (
        ("cut at the end", (head, one, two, three), 3),
        ("cut in a frame", (head, one, two[:-3]), 1),
        ("changed", (head, one, flipped, three, end), 1),
        ("reordered", (head, two, one, three, end), 0),
        ("left out", (head, one, three, end), 1),
        ("doubled", (head, one, one, two, three, end), 1),
        ("of another file", (head, other, two, three, end), 0),
        ("another head", (other_head, one, two, three, end), 0),
        ("goes on", (head, one, two, three, end, one), 3),
        ("an impossible length", (head, b"\xff\xff\xff\xff", one), 0),
    ):
        path.write_bytes(b"".join(parts))
        found: list[str] = []
        with pytest.raises(AuditFault):
            for each in frames(path, KEY):
                found.append(each.id)
        assert len(found) == whole, name


def test_a_full_disk_refuses_or_goes_on_and_nothing_that_waits_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_in(tmp_path)
    log.add(entry(0))
    log.flush()
    assert log._file is not None
    real = log._file._file.write
    room = [10]

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(file, name)

        def write(self, data: bytes) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            part, room[0] = data[: room[0]], max(0, room[0] - len(data))
            return real(part)

    file = log._file._file
    log._file._file = Full()  # type: ignore[assignment]
    log.check()
    log.add(entry(1))
    log.flush()
    with pytest.raises(OverloadedError, match="No space left") as caught:
        log.check()
    assert (caught.value.status, caught.value.code) == (503, "audit_unavailable")
    log.settings = AuditSettings(folder=str(tmp_path), on_failure="continue")
    log.check()
    log.add(entry(2))
    monkeypatch.setattr(audit_log, "BUFFER_MAX", 10)
    log.add(entry(3))
    assert log.lost == 1
    room[0] = 1 << 30
    log.close()
    (path,) = tmp_path.iterdir()
    assert [each.id for each in frames(path, KEY)] == ["r0", "r1", "r2"] and not log.failure


def test_files_rotate_and_a_missing_one_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "FILE_MAX", 500)
    folder, key = tmp_path / "log", tmp_path / "key"
    key.write_text(KEY.hex() + "\n")
    key.chmod(0o600)
    log = log_in(folder)
    for number in range(8):
        log.add(entry(number, answer=b"\xff text"))
        log.flush()
    log.close()
    paths = sorted(folder.iterdir())
    assert len(paths) > 2
    whole = CliRunner().invoke(command, ["read", str(folder), "--key", str(key)], standalone_mode=False)
    assert whole.return_value == 0 and whole.stdout.count('"prompt":"secret question"') == 8
    paths[1].unlink()
    gap = CliRunner().invoke(command, ["read", str(folder), "--key", str(key)], standalone_mode=False)
    assert gap.return_value == 1 and "is number 2 of its process, after 0" in gap.output
    key.write_text("00" * 32)
    wrong = CliRunner().invoke(command, ["read", str(folder), "--key", str(key)], standalone_mode=False)
    assert wrong.return_value == 1 and "secret" not in wrong.output


def test_a_key_is_private_and_of_the_right_length(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("abc")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="openssl rand"):
        read_key(path)
    path.write_text(KEY.hex())
    assert read_key(path) == KEY
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        read_key(path)
