"""Does replay tell what came of a journal, and end with 1 where a decision came out differently?"""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.kernel.errors import ConfigError
from penstock.kernel.journal_frames import Frames, frame
from penstock_lab.cli import replay, simulate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    asked = ["--workload", "chat", "--rate", "6", "--duration", "12", "--no-html", "--json", "--out", str(out)]
    done = CliRunner().invoke(simulate.command, asked, standalone_mode=False)
    assert done.exception is None, done.exception
    return Path(json.loads(done.stdout)["variants"][0]["wall_run"])


def ask(*arguments: str) -> Result:
    done = CliRunner().invoke(replay.command, [*arguments], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done


def test_a_simulated_run_leaves_a_journal_that_comes_to_the_same(folder: Path) -> None:
    done = ask(str(folder))
    assert done.return_value == 0
    assert "every event came to the same effects again" in done.stdout
    count = len((folder / "decisions.jsonl").read_text().splitlines())
    assert f"{count} decisions" in done.stdout
    assert "events in 2 segments" in done.stdout, "the router's and the fleet's"


def test_other_settings_are_compared_request_by_request(folder: Path) -> None:
    done = ask(str(folder), "--set", "router.mode=round_robin", "--limit", "3")
    assert "would have been others" in done.stdout and "prompt tokens expected in the cache" in done.stdout
    assert done.stdout.count("of round robin over 4 workers") == 3
    found = json.loads(ask(str(folder), "--set", "router.mode=round_robin", "--limit", "3", "--json").stdout)
    assert found["mismatch"] is None and len(found["others"]) == 3
    assert found["whole"]["moved"] <= found["whole"]["decisions"] == found["decisions"]


def test_a_difference_is_pointed_at_and_ends_with_1(folder: Path, tmp_path: Path) -> None:
    (whole,) = (folder / "journal").glob("router/*")
    payloads = list(Frames(whole.read_bytes()))
    del payloads[3]  # an event that the router took is gone, as if it had not come
    (tmp_path / "000000").write_bytes(b"".join(map(frame, payloads)))
    gap = ask(str(tmp_path))
    assert "record 2 is missing, 3 follows" in gap.stdout
    payloads = list(Frames(whole.read_bytes()))
    payloads[1:3] = [payloads[1].replace(b"main-0", b"main-9")]
    (tmp_path / "000000").write_bytes(b"".join(map(frame, payloads)))
    done = ask(str(tmp_path / "000000"))
    assert done.return_value == 1
    assert "record 0 of router" in done.stdout and "came to other effects" in done.stdout


def test_a_journal_of_which_nothing_can_be_replayed_is_a_failure(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    (segment,) = (run / "journal").glob("router/*")
    header, *records = Frames(segment.read_bytes())
    segment.write_bytes(b"".join(map(frame, [header, *(b'{"of": "another version"}' for _ in records)])))
    done = ask(str(run))  # the fleet's journal beside it comes to the same
    assert done.return_value == 1
    assert "nothing of" in done.stdout and "every event that could be read came to the same" in done.stdout
    alone = ask(str(segment))
    assert alone.return_value == 1 and "the same effects" not in alone.stdout
    shown = json.loads(ask(str(run), "--json").stdout)
    assert shown["unread"] == [str(segment.parent)]


def test_a_torn_end_is_named_and_no_failure(folder: Path, tmp_path: Path) -> None:
    (segment,) = (folder / "journal").glob("router/*")
    (tmp_path / "000000").write_bytes(segment.read_bytes()[:-3])
    done = ask(str(tmp_path))
    assert done.return_value == 0 and "not read: " in done.stdout
    assert "every event that could be read came to the same effects again" in done.stdout


def test_runs_journal_false_writes_none(tmp_path: Path) -> None:
    asked = ["--workload", "chat", "--duration", "2", "--no-html", "--json", "--out", str(tmp_path)]
    done = CliRunner().invoke(simulate.command, [*asked, "--set", "runs.journal=false"], standalone_mode=False)
    run = json.loads(done.stdout)["variants"][0]["wall_run"]
    with pytest.raises(ConfigError, match="holds no journal"):
        ask(run)
