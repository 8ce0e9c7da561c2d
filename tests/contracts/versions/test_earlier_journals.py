"""Journals and snapshots of the two versions before this one are read, and come to the decisions that they record."""

from pathlib import Path

import msgspec
import pytest

from penstock.kernel.journal_frames import Frames, read_header
from penstock.kernel.machine import Snapshot
from penstock.report.journal_replay import replay
from penstock.router.events import of_earlier
from penstock.router.journal import router_of
from penstock.router.router import Router
from penstock.router.settings import RouterSettings

DATA = Path(__file__).parent / "data"
VERSIONS = sorted(path.name for path in DATA.iterdir() if path.is_dir())


def test_every_recorded_version_has_its_journals() -> None:
    assert sorted(path.stem for path in DATA.glob("*.json")) == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("machine", "decisions"), [("frontend-0", 12), ("fleet", 0)])
def test_a_journal_is_replayed_to_its_end(version: str, machine: str, decisions: int) -> None:
    replayed = replay(DATA / version / f"{machine}.journal", [])
    assert (replayed.problems, replayed.unread, replayed.mismatch) == ([], [], None)
    assert replayed.records >= 8 and replayed.decisions == decisions


@pytest.mark.parametrize("version", VERSIONS)
def test_a_router_goes_on_from_a_snapshot(version: str) -> None:
    saved = msgspec.msgpack.decode((DATA / version / "router.snapshot").read_bytes())
    router = _router(version, saved)
    router.check()
    assert set(router.requests) == {raw["event"]["id"] for raw in saved["requests"]} != set()
    assert {card.card.id for card in router.roster} == {raw["card"]["id"] for raw in saved["roster"]["workers"]}
    again = Router(RouterSettings())
    again.restore(router.snapshot())
    assert again.snapshot() == router.snapshot()


def _router(version: str, snapshot: Snapshot) -> Router:
    """Return the router of a version's journal, with a snapshot in its header's place."""
    header = read_header(next(iter(Frames((DATA / version / "frontend-0.journal").read_bytes()))))
    return router_of(msgspec.structs.replace(header, snapshot=snapshot))


def test_what_an_earlier_event_does_not_say_is_not_made_up() -> None:
    assert of_earlier({"event": "Arrived", "media": 0})["media"] == ()
    with pytest.raises(ValueError, match="nothing names them"):
        of_earlier({"event": "Arrived", "media": 2})


def test_a_snapshot_of_any_other_version_is_refused() -> None:
    saved = msgspec.msgpack.decode((DATA / VERSIONS[0] / "router.snapshot").read_bytes())
    with pytest.raises(ValueError, match="read it with the release that wrote it"):
        _router(VERSIONS[0], {**saved, "version": 4})
