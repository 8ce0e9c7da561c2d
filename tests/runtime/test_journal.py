"""Does every segment of a router's journal replay by itself, and is what lies on disk bounded and never in the way?"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.kernel.errors import ConfigError
from penstock.kernel.journal_frames import Frames, frame, packed, read_header, read_record
from penstock.router import journal as router_journal
from penstock.router.journal import event_of, router_book, router_of
from penstock.router.settings import IndexSettings, RouterSettings
from penstock.runtime.records import journal_writer as module
from penstock.runtime.records.journal_writer import JournalWriter
from penstock_lab.report.journal_replay import replay
from penstock_lab.runs.run_form import RUNS
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.simulate.simulation_plan import Fault
from tests.lab.simulate.test_simulated_cluster import chat, plan

FAULTS = [Fault(at=8.0, kind="fail", worker="main-1"), Fault(at=15.0, kind="drain", worker="main-0")]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other things ends no journal."""
    monkeypatch.setattr(module, "SNAPSHOT_MAX", 60.0)


def write(
    folder: Path, segment: int = 1 << 20, segments: int = 100, flush_every: int = 50, batch: int = 1, **more: Any
) -> JournalWriter:
    """Simulate a cluster with faults, and journal its router."""
    journal: JournalWriter | None = None
    seen = 0

    def watch(*happened: Any) -> None:
        nonlocal seen
        assert journal is not None
        if happened[1] != "router":
            return
        journal.watch(*happened)
        seen += 1
        if seen % flush_every == 0:
            journal.flush()

    cluster = SimulatedCluster(plan(faults=FAULTS, **more), chat(25), watch=watch)
    journal = JournalWriter(
        folder, router_book(cluster.router), wall_ns=1, segment_bytes=segment, segments=segments, batch=batch
    )
    journal.begin(0)
    cluster.run()
    journal.encode()
    journal.flush()
    return journal


@pytest.mark.parametrize("by_block", [True, False])
@pytest.mark.parametrize(
    "settings",
    [RouterSettings(), RouterSettings(index=IndexSettings(kind="approximate")), RouterSettings(mode="random")],
)
def test_every_segment_comes_to_the_same_decisions_by_itself(
    tmp_path: Path, settings: RouterSettings, by_block: bool
) -> None:
    write(tmp_path / "j", segment=1 << 16, router=settings, by_block=by_block)
    files = sorted((tmp_path / "j").iterdir())
    assert len(files) > 2
    whole = replay(tmp_path / "j", [])
    assert whole.mismatch is None and whole.problems == [] and whole.segments == len(files)
    parts = [replay(file, []) for file in files]
    assert all(part.mismatch is None and not part.problems for part in parts)
    assert sum(part.records for part in parts) == whole.records > 200
    assert sum(part.decisions for part in parts) == whole.decisions >= len(chat(25))


def test_the_snapshot_of_a_later_segment_is_what_the_segments_before_come_to(tmp_path: Path) -> None:
    write(tmp_path / "j", segment=1 << 16)
    first, second = (tmp_path / "j" / name for name in ("000000", "000001"))
    payloads = iter(Frames(first.read_bytes()))
    router = router_of(read_header(next(payloads)))
    for payload in payloads:
        record = read_record(payload)
        router.handle(record.now, event_of(record, RUNS))
    header = read_header(next(iter(Frames(second.read_bytes()))))
    assert packed(router.snapshot()) == packed(header.snapshot)


def test_events_that_are_encoded_together_are_the_same_bytes(tmp_path: Path) -> None:
    """But for where a segment ends: a batch is not torn."""
    for name, batch in (("one", 1), ("many", 64)):
        write(tmp_path / name, batch=batch)
    assert (tmp_path / "one" / "000000").read_bytes() == (tmp_path / "many" / "000000").read_bytes()
    write(tmp_path / "cut", segment=1 << 16, batch=64)
    cut, whole = replay(tmp_path / "cut", []), replay(tmp_path / "one", [])
    assert cut.mismatch is None and cut.problems == [] and cut.segments > 2
    assert (cut.records, cut.decisions) == (whole.records, whole.decisions)


def test_only_the_newest_segments_are_kept(tmp_path: Path) -> None:
    journal = write(tmp_path / "j", segment=1 << 16, segments=2)
    files = sorted((tmp_path / "j").iterdir())
    assert len(files) == 2 and int(files[0].name) > 0
    found = replay(tmp_path / "j", [])
    assert found.mismatch is None and found.records and not found.problems and journal.lost == 0


def test_only_the_newest_routers_of_a_run_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUTERS", 2)
    for name in ("a", "b", "c"):
        write(tmp_path / name)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["b", "c"]


def test_another_decision_is_pointed_at(tmp_path: Path) -> None:
    write(tmp_path / "j")
    file = tmp_path / "j" / "000000"
    payloads = list(Frames(file.read_bytes()))
    at = next(n for n, payload in enumerate(payloads[1:], 1) if read_record(payload).placed)
    record = read_record(payloads[at])
    request, attempt, _, rank = record.placed[0]
    payloads[at] = packed(
        msgspec.structs.replace(record, digest=record.digest ^ 1, placed=[(request, attempt, "main-9", rank)])
    )
    file.write_bytes(b"".join(map(frame, payloads)))
    wrong = replay(file, []).mismatch
    assert wrong is not None and (wrong.sequence, wrong.at) == (record.sequence, record.now)
    assert wrong.event == "Arrived" and wrong.request == request
    assert wrong.recorded == [(request, attempt, "main-9", rank)] and wrong.replayed == record.placed


@pytest.mark.parametrize("share", [0.2, 0.7, 0.999])
def test_a_journal_that_was_cut_off_or_damaged_gives_what_can_be_read(tmp_path: Path, share: float) -> None:
    write(tmp_path / "j")
    file = tmp_path / "j" / "000000"
    whole = file.read_bytes()
    all_of_it = replay(file, []).records
    file.write_bytes(whole[: int(len(whole) * share)])
    cut = replay(file, [])
    assert cut.mismatch is None and 0 < cut.records < all_of_it and "cut off at byte" in cut.problems[0]
    file.write_bytes(whole[: int(len(whole) * share)] + b"\0" * 64 + whole[int(len(whole) * share) + 64 :])
    damaged = replay(file, [])
    assert damaged.mismatch is None and damaged.records < all_of_it and "damaged at byte" in damaged.problems[0]


def test_a_missing_segment_is_told_and_the_rest_replays(tmp_path: Path) -> None:
    write(tmp_path / "j", segment=1 << 16)
    (tmp_path / "j" / "000001").unlink()
    found = replay(tmp_path / "j", [])
    assert found.mismatch is None and len(found.problems) == 1 and "are missing" in found.problems[0]


def test_a_segment_without_a_header_is_told(tmp_path: Path) -> None:
    (tmp_path / "000000").write_bytes(frame(packed({"some": "thing"})))
    with pytest.raises(ConfigError, match="no header that can be read"):
        replay(tmp_path, [])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no journal"):
        replay(tmp_path / "empty", [])


def test_a_disk_that_cannot_be_written_costs_a_segment_and_no_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY", 0.0)
    folder = tmp_path / "j"
    folder.write_text("a file stands in the way")
    records: list[Any] = []
    journal: JournalWriter | None = None

    def watch(*happened: Any) -> None:
        assert journal is not None
        if happened[1] != "router":
            return
        journal.watch(*happened)
        journal.flush()
        if len(records) == 20 and folder.is_file():
            folder.unlink()

    cluster = SimulatedCluster(plan(faults=FAULTS), chat(25), watch=watch, record=records.append)
    journal = JournalWriter(folder, router_book(cluster.router), wall_ns=1, segment_bytes=1 << 20, segments=100)
    journal.begin(0)
    cluster.run()
    journal.flush()
    assert len(records) == len(chat(25)) and journal.lost > 20 and journal.failing is None
    found = replay(folder, [])
    assert found.mismatch is None and found.problems == [] and found.records > 50


def test_a_router_that_takes_long_to_write_down_is_not_held_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_MAX", 0.0)
    journal = write(tmp_path / "j", segment=1 << 16)
    assert journal.ended is not None and "hold it up" in journal.ended
    assert [file.name for file in (tmp_path / "j").iterdir()] == ["000000"]
    assert replay(tmp_path / "j", []).mismatch is None


def test_what_a_router_knows_says_how_long_writing_it_down_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_journal, "PER_GUESSED", 1.0)
    journal = write(tmp_path / "j", segment=1 << 16, router=RouterSettings(index=IndexSettings(kind="approximate")))
    assert journal.ended is not None and [file.name for file in (tmp_path / "j").iterdir()] == ["000000"]


def test_it_holds_no_text(tmp_path: Path) -> None:
    write(tmp_path / "j")
    for payload in Frames((tmp_path / "j" / "000000").read_bytes()):
        assert b"messages" not in payload and b"content" not in payload


def test_the_same_settings_would_have_decided_the_same(tmp_path: Path) -> None:
    write(tmp_path / "j")
    found = replay(tmp_path / "j", ["router.mode=kv"])
    whole = found.whole
    assert whole.decisions == found.decisions > 100 and whole.moved == 0
    assert (whole.cached, whole.ahead, whole.ttft) == (whole.other_cached, whole.other_ahead, whole.other_ttft)


def test_other_settings_decide_otherwise_and_the_effect_is_predicted(tmp_path: Path) -> None:
    write(tmp_path / "j")
    found = replay(tmp_path / "j", ["router.mode=round_robin"])
    whole = found.whole
    assert whole.decisions == found.decisions and whole.moved > 0.3 * whole.decisions
    assert whole.cached > whole.other_cached > 0, "round robin finds less in the caches"
    assert whole.predicted > 0 and whole.other_ttft > whole.ttft
    assert all(other.moved and "round robin" in other.reason for other in found.others)
    greedy = replay(tmp_path / "j", ["router.cost.overlap_credit=50"]).whole
    assert replay(tmp_path / "j", ["router.cost.overlap-credit=50"]).whole == greedy, "as every command takes a knob"
    assert greedy.moved and greedy.other_cached >= greedy.cached


def test_what_is_none_of_the_routers_settings_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "j")
    with pytest.raises(ConfigError, match="not one of the router's settings"):
        replay(tmp_path / "j", ["frontend.port=1"])
    with pytest.raises(ConfigError, match="mode"):
        replay(tmp_path / "j", ["router.mode=fastest"])
