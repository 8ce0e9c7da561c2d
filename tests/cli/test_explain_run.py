"""Does explain tell of a run that is over what it tells of a running cluster?"""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli import explain
from penstock.kernel.errors import ConfigError
from penstock_lab.cli import simulate

SHORT = (
    "--workload",
    "chat",
    "--rate",
    "6",
    "--duration",
    "12",
    "--no-html",
    "--json",
    "--fault",
    "at=5,kind=fail,worker=main-0",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    done = CliRunner().invoke(simulate.command, [*SHORT, "--out", str(out)], standalone_mode=False)
    assert done.exception is None, done.exception
    return Path(json.loads(done.stdout)["variants"][0]["wall_run"])


def ask(*arguments: str) -> Any:
    done = CliRunner().invoke(explain.command, [*arguments], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_it_lists_the_newest_requests(folder: Path) -> None:
    said = ask("--run", str(folder), "--limit", "3")
    ids = [json.loads(line)["id"] for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert [line.split()[0] for line in said.splitlines()[1:]] == ids[:-4:-1]


def test_it_shows_each_decision_with_its_candidates(folder: Path) -> None:
    records = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    moved = next(record for record in records if record.get("attempts", 1) > 1)
    said = ask(moved["id"], "--run", str(folder))
    assert f"Request {moved['id']} of sim: ok, status 200" in said
    assert "Attempt 1 went to main-0 by kv:" in said and "Attempt 2 went to" in said
    assert "failed on main-0: the connection broke" in said
    found = json.loads(ask(moved["id"], "--run", str(folder), "--json"))
    assert [decision["attempt"] for decision in found["decisions"]] == [1, 2]
    assert all(len(decision["candidates"]) + len(decision["excluded"]) == 4 for decision in found["decisions"])


def test_what_is_not_there_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no request 'r99999'"):
        ask("r99999", "--run", str(folder))
    with pytest.raises(ConfigError, match=r"not a folder of a run: it has no requests.jsonl"):
        ask("--run", str(tmp_path))


def test_a_last_line_that_was_cut_off_is_left_out(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "requests.jsonl").read_bytes()
    (tmp_path / "requests.jsonl").write_bytes(whole[:-40])
    assert len(ask("--run", str(tmp_path), "--limit", "1000").splitlines()) == len(whole.splitlines())
